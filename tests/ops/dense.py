"""What the tests of the dense ops share: inputs that every rank can make, exact results and error bounds."""

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering.cpu.workspace import workspace_for

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ORDERS = ["direct", "ring", "oblivious"]


def seeded(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers on every rank, exactly representable in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


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
