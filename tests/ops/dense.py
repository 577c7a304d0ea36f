"""What the tests of the dense ops share: inputs that every rank can make, exact results and error bounds."""

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.reference.product import product_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ORDERS = ["direct", "ring", "oblivious"]


def seeded(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers on every rank, exactly representable in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


Products = list[tuple[str, list[tuple[int, ...]]]]
"""Products, and the shapes of their operands: -2 and -1 stand for the extents of the product."""

EPILOGUES: Products = [
    ("mm; add %0", [(1, -1)]),
    ("mm; mul %0; add %1", [(-2, 1), (-1,)]),
    ("mm; neg; sub %0", [(-2, -1)]),
    ("mm; mul 0.5; to float32", []),
    ("addmm %0; to bfloat16", [(-1,)]),
    ("mm; masked_fill %0 %1; relu", [(-2, 1), ()]),
    ("mm; where %0 %1", [(-1,), (-2, -1)]),
]


def factors(
    world: int, m: int, k: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """`x: [M, K]` and a column-major `w: [K, N]` of every rank."""
    return [
        (seeded(seed + r, m, k, dtype=dtype), seeded(seed + r + 50, n, k, dtype=dtype).t())
        for r in range(world)
    ]


def products(inputs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`[W, M, N]`: the products of all ranks in float64, and those of the absolute values."""
    exact = torch.stack([x.double() @ w.double() for x, w in inputs])
    return exact, torch.stack([x.double().abs() @ w.double().abs() for x, w in inputs])


Terms = tuple[list[Tensor], list[Tensor], list[Tensor]]


def two_terms(rank: int, m: int, k: int, n: int, product: str, shapes: list[tuple[int, ...]]) -> Terms:
    """x, w and operands of a product of two matmuls, in float16; the first of two operands may be a mask."""
    x = [seeded(10 * rank + i, m, k + i, dtype=torch.float16) for i in range(2)]
    w = [seeded(10 * rank + i + 5, k + i, n, dtype=torch.float16) for i in range(2)]
    sizes = [tuple({-2: m, -1: n, 1: 1}[d] for d in shape) for shape in shapes]
    operands = [seeded(rank + 7, *size, dtype=torch.float16) for size in sizes]
    if "%0 %1" in product:
        operands[0] = operands[0] > 0
    return x, w, operands


def kept_by_all(p: Tensor, given: Terms, product: str, world: int) -> Tensor:
    """The products `[W, M, N]` that the ranks kept; AssertionError if this rank's, `p`, is not what it is."""
    expected = product_reference(*given, product)
    torch.testing.assert_close(p, expected, rtol=0.02, atol=0.03)
    assert p.dtype == expected.dtype
    found = [torch.empty_like(p) for _ in range(world)]
    dist.all_gather(found, p)
    return torch.stack(found)


Leaves = tuple[Tensor, Tensor, Tensor]


def three_leaves(rank: int, world: int) -> tuple[Leaves, list[Leaves], list[Tensor]]:
    """x, w and residual of this rank; those of all in float64, and their products `mm; mul 0.5; sub %0`.

    Gradients are wanted of all.
    """
    given = [(seeded(r, 4, 3), seeded(r + 5, 3, 6), seeded(r + 8, 4, 6)) for r in range(world)]
    exact = [tuple(t.double().requires_grad_() for t in each) for each in given]
    mine = tuple(t.requires_grad_() for t in given[rank])
    return mine, exact, [(x @ w) * 0.5 - residual for x, w, residual in exact]  # type: ignore[return-value]


def assert_gradients(leaves: Leaves, exact: Leaves) -> None:
    for mine, expected in zip(leaves, exact, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), expected.grad, rtol=1e-4, atol=1e-4)


def world_group() -> str:
    """The name of the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    name: str = group.group_name
    return name


def poison(group_name: str) -> None:
    """Fills both buffers of the workspace with bytes that are NaN in every floating dtype."""
    workspace = workspace_for(group_name)
    for _ in range(2):
        with workspace.call("poison", "test", "", workspace.capacity) as call:
            call.tensor(workspace.rank, 0, (workspace.capacity,), torch.uint8).fill_(255)
            call.exchange([])


def assert_close(actual: Tensor, exact: Tensor, magnitude: Tensor, length: int, roundings: int) -> None:
    """Checks `actual` against `exact` (float64) with the bound of floating-point sums.

    `magnitude` is the result with every number replaced by its absolute value. Sums of `length` numbers in
    float32 err by at most `length * eps32` of that, every rounding to the dtype by half its eps.
    """
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    info = torch.finfo(actual.dtype)
    eps32 = torch.finfo(torch.float32).eps
    bound = (
        magnitude * (length * eps32 + roundings * info.eps / 2 * 1.01)
        + roundings * info.smallest_normal * info.eps
    )
    error = (actual.double() - exact).abs()
    worst = (error - bound).max().item() if error.numel() else 0.0
    assert not actual.isnan().any(), "NaN: memory was read before it was written"
    assert worst <= 0, f"error {error.max().item():.3g} exceeds its bound by {worst:.3g}"


def same_on_all_ranks(t: Tensor) -> None:
    """Raises unless all ranks hold the same bits."""
    bits = t.contiguous().view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, bits.numel() + 1)
    digest = torch.tensor([int((bits.flatten() * weights).sum())])
    low, high = digest.clone(), digest.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    assert low.item() == high.item(), "ranks disagree on the bits of a result"
