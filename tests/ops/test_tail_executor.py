"""Ops with tails over real ranks.

Sums of small integers are exact in every dtype and order, so that pointwise stages must have the bits of
eager torch; norms may differ by the rounding of their statistics.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from autofuse.lowering.cpu.reduce_executor import partition
from autofuse.lowering.reference.layout import parts
from autofuse.lowering.reference.tail import tail_reference
from tests.ops.dense import DTYPES, ORDERS, poison, same_on_all_ranks, seeded, world_group
from tests.ranks import RankPool
from tests.subsets import in_tiers

Ranks = Callable[[int], RankPool]

# -2 and -1 stand for the extents of V.
TAILS: list[tuple[str, list[tuple[int, ...]]]] = [
    ("add %0; keep; to float32; rms 1e-06 keep; to bfloat16; mul %1", [(-2, -1), (-1,)]),
    (
        "to float32; add %0; standardize 1e-05 keep; mul %1; keep; add %2; to float16",
        [(-2, -1), (1, -1), (-1,)],
    ),
    ("mul 0.3; rsub %0; keep; div %1; neg; relu; sub 1.5", [(-2, 1), (-2, -1)]),
    (
        "masked_fill %0 -2.5; keep; to float32; keep; where %1 %2; keep; where %0 1",
        [(-2, -1), (-2, 1), (-1,)],
    ),
    ("add %0; gelu tanh; keep; silu; mul %1", [(-2, -1), (1, 1)]),
    ("keep; to float32; keep; mul %0", [()]),
    ("mul %0; clamp_min -2; clamp_max 3; keep; to float8_e4m3fn", [(-1,)]),
]
MASKS = {3: (0, 1)}
NORMS = (0, 1)
ROUNDED = (*NORMS, 4)  # torch's gelu and silu depend on the place in memory
SHAPES = [(1, 40), (2, 16), (7, 33), (70, 24), (130, 6)]
LARGE = (1030, 700)
"""Chunks of several tiles."""


def _integers(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _operands(i: int, m: int, n: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    sizes = [tuple({-2: m, -1: n, 1: 1}[d] for d in shape) for shape in TAILS[i][1]]
    found = [seeded(seed + j, *size, dtype=dtype) for j, size in enumerate(sizes)]
    return [t > 0 if j in MASKS.get(i, ()) else t for j, t in enumerate(found)]


def _check(results: list[Tensor], wanted: list[Tensor], i: int) -> None:
    assert len(results) == len(wanted)
    for result, expected in zip(results, wanted, strict=True):
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        if i in ROUNDED:
            narrowest = torch.bfloat16 if "to bfloat16" in TAILS[i][0] else result.dtype
            eps = max(torch.finfo(narrowest).eps * 2, 2e-6)
            torch.testing.assert_close(result, expected, rtol=eps, atol=eps)
        else:
            assert torch.equal(result, expected), (result.double() - expected.double()).abs().max()


def _all_reduce(rank: int, world: int, order: str, dtype: torch.dtype) -> None:
    cases = [*product(SHAPES, range(len(TAILS))), *([(LARGE, 0)] if dtype != torch.float16 else [])]
    for ((m, n), i), (form, keep, op) in product(
        cases,
        [
            ("every", False, "sum"),
            ("owner", True, "avg"),
            ("differ", False, "sum"),
            ("unproven", True, "avg"),
        ],
    ):
        x = [[_integers(10 * r + t, m, 8 + t, dtype=dtype) for t in range(2)] for r in range(world)]
        w = [[_integers(10 * r + t + 5, 8 + t, n, dtype=dtype) for t in range(2)] for r in range(world)]
        products = [a @ v + b @ u for (a, b), (v, u) in zip(x, w, strict=True)]
        total = torch.stack([p.float() for p in products]).sum(0)
        total = (total * (1 / world)).to(dtype) if op == "avg" else total.to(dtype)
        given = _operands(i, m, n, dtype, 0 if form == "owner" else rank)
        proof = {"every": "", "owner": "ab", "differ": f"{rank:02x}"}.get(form, form if rank else "ab")
        poison(world_group())
        for _ in range(2):
            results = torch.ops.autofuse.matmul_all_reduce(
                x[rank],
                w[rank],
                [],
                "mm",
                op,
                keep,
                given,
                TAILS[i][0],
                proof,
                world_group(),
                order,
                f"{form} {i}",
            )
            if keep:
                assert torch.equal(results.pop(), products[rank])
            _check(results, tail_reference(total, given, TAILS[i][0]), i)
            if form == "owner":
                for result in results:
                    same_on_all_ranks(result)


@in_tiers(order=ORDERS, dtype=DTYPES, world=[2, 3])
def test_all_reduce(ranks: Ranks, world: int, order: str, dtype: torch.dtype) -> None:
    ranks(world).run(_all_reduce, order, dtype, timeout=200)


def _with_tails_of_their_own(rank: int, world: int, order: str) -> None:
    """The last rank has no tail."""
    for (m, n), i in product(SHAPES, range(len(TAILS))):
        x = [_integers(10 * r, m, 8, dtype=torch.float32) for r in range(world)]
        w = [_integers(10 * r + 5, 8, n, dtype=torch.float32) for r in range(world)]
        total = torch.stack([a @ b for a, b in zip(x, w, strict=True)]).sum(0)
        mine = (i + rank) % len(TAILS)
        has_one = rank < world - 1
        given = _operands(mine, m, n, torch.float32, rank) if has_one else []
        tail = TAILS[mine][0] if has_one else ""
        for _ in range(2):
            results = torch.ops.autofuse.matmul_all_reduce(
                [x[rank]], [w[rank]], [], "mm", "sum", False, given, tail, "", world_group(), order, "own"
            )
            _check(results, tail_reference(total, given, tail) if has_one else [total], mine)


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_may_have_tails_of_their_own(ranks: Ranks, order: str) -> None:
    ranks(3).run(_with_tails_of_their_own, order)


def test_owners_own_rows() -> None:
    for world in (2, 3):
        given = ("matmul_all_reduce", 1031, 700, 4, 0, 1, world, "direct")
        chunks = partition(*given, owner=True).shape.chunks[0]
        assert [columns for _, columns in chunks] == [700] * world
        assert sum(rows for rows, _ in chunks) == 1031


def _reduce_scatter(rank: int, world: int, order: str, dtype: torch.dtype) -> None:
    for (rows, columns), i, (dim, outer) in product(
        SHAPES, range(len(TAILS)), [(0, 1), (0, 2), (1, 1), (1, 2)]
    ):
        if dim == 1 and i in NORMS:
            continue
        m, n = (rows * outer * world, columns) if dim == 0 else (rows, columns * outer * world)
        x = [_integers(r, m, 8, dtype=dtype) for r in range(world)]
        w = [_integers(r + 5, 8, n, dtype=dtype) for r in range(world)]
        products = [a @ b for a, b in zip(x, w, strict=True)]
        part = parts(torch.stack(products).float().sum(0).to(dtype), dim, outer, world)[rank]
        given = _operands(i, *part.shape, dtype, rank)
        poison(world_group())
        *results, kept = torch.ops.autofuse.matmul_reduce_scatter(
            [x[rank]],
            [w[rank]],
            [],
            "mm",
            "sum",
            dim,
            outer,
            True,
            given,
            TAILS[i][0],
            "",
            world_group(),
            order,
            "rs",
        )
        assert torch.equal(kept, products[rank])
        _check(results, tail_reference(part, given, TAILS[i][0]), i)


@in_tiers(order=ORDERS, dtype=DTYPES)
def test_reduce_scatter(ranks: Ranks, order: str, dtype: torch.dtype) -> None:
    ranks(2).run(_reduce_scatter, order, dtype, timeout=200)


def _nothing(rank: int, world: int) -> None:
    for m, n in [(0, 4), (3, 0)]:
        x, w = torch.ones(m, 2), torch.ones(2, n)
        y, scale = torch.ops.autofuse.matmul_all_reduce(
            [x], [w], [], "mm", "sum", False, [], "rms 1e-06 keep", "", world_group(), "direct", "nothing"
        )
        assert (y.shape, scale.shape) == ((m, n), (m, 1))


def test_empty_matrices(ranks: Ranks) -> None:
    ranks(2).run(_nothing)


def _refused(rank: int, world: int) -> None:
    x, w, r = torch.ones(4, 3), torch.ones(3, 6), torch.ones(4, 6)

    def call(given: list[Tensor], tail: str, x: Tensor = x) -> list[Tensor]:
        return torch.ops.autofuse.matmul_all_reduce(
            [x], [w], [], "mm", "sum", False, given, tail, "", world_group(), "direct", "refused"
        )

    with pytest.raises(ValueError, match=r"malformed tail 'add'.*expected"):
        call([], "add")
    with pytest.raises(ValueError, match="uses 1 operands, got 0"):
        call([], "add %0")
    with pytest.raises(ValueError, match="does not broadcast"):
        call([r.t()], "add %0")
    with pytest.raises(ValueError, match="whole rows"):
        torch.ops.autofuse.matmul_reduce_scatter(
            [x], [w], [], "mm", "sum", 1, 1, False, [], "rms 1", "", world_group(), "direct", "refused"
        )
    (y,) = call([r], "add %0", x.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="a tail has no gradient"):
        y.sum().backward()
    # Nothing has failed for good.
    assert torch.equal(call([r], "add %0")[0], torch.full((4, 6), 3.0 * world + 1))


def test_refused(ranks: Ranks) -> None:
    ranks(2).run(_refused)


def _opcheck(rank: int, world: int) -> None:
    x, w, r = seeded(rank, 6, 4), seeded(rank + 5, 4, 8), seeded(rank + 9, 6, 8)
    tail = "add %0; keep; to float32; rms 1e-06 keep; to bfloat16; keep; to bfloat16"
    args = ([x], [w], [], "mm", "sum", True, [r], tail, "", world_group(), "direct", "opcheck")
    torch.library.opcheck(torch.ops.autofuse.matmul_all_reduce.default, args)
    args = ([x], [w], [], "mm", "sum", 0, 1, True, [r[:3]], tail, "", world_group(), "direct", "opcheck")
    torch.library.opcheck(torch.ops.autofuse.matmul_reduce_scatter.default, args)


def test_opcheck(ranks: Ranks) -> None:
    ranks(2).run(_opcheck)
