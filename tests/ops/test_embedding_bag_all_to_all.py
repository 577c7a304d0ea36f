"""embedding_bag_all_to_all over real ranks: layouts, dtypes, modes, gradients, wrong input."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autofuse.lowering.ops  # noqa: F401
from tests.ops.bags import Case, Inputs, arrange, bound, doubled, inputs_of, pooled, spoil
from tests.ranks import RankPool, fresh_group

Ranks = Callable[[int], RankPool]

EVEN = ((16, 16, 16), (16, 16, 16))
UNEVEN = ((7, 64), (130,))
FOUR = ((8,), (24, 3), (0,), (33, 1, 16))
HALF, BRAIN = torch.float16, torch.bfloat16

CASES = [
    *(Case(EVEN, layout) for layout in ("bsc", "sbc", "bstd", "stbd", "sbtd")),
    *(Case(UNEVEN, layout, order="ring") for layout in ("bsc", "sbc")),
    Case(FOUR, b=3, order="oblivious"),
    Case(FOUR, "sbc", b=5, index=torch.int32, last_offset=True, padding=2),
    Case(EVEN, weighted=True, padding=3),
    Case(EVEN, mode="mean", padding=0, index=torch.int32),
    Case(EVEN, mode="max", last_offset=True),
    Case(EVEN, mode="max", padding=1, rows=4, pooling=2),
    Case(UNEVEN, table=BRAIN, wire=BRAIN, pooling=40),
    Case(UNEVEN, table=HALF, wire=HALF, weighted=True),
    Case(UNEVEN, table=torch.float32, wire=BRAIN),
    Case(UNEVEN, table=BRAIN, wire=torch.float32, mode="mean"),
    Case(UNEVEN, table=torch.float64, wire=torch.float32),
    Case(UNEVEN, table=torch.float64, wire=torch.float64),
    Case(EVEN, "stbd", pooling=0),
    Case(EVEN, b=1, pooling=1),
    Case(((256,),) * 4, "bstd", b=9, pooling=100),
]


def _call(case: Case, inputs: Inputs, group: str) -> Tensor:
    result: Tensor = torch.ops.autofuse.embedding_bag_all_to_all(
        *inputs, *case.options, case.wire, case.columns, case.layout, group, case.order, "test"
    )
    return result


def _forward(rank: int, world: int, case: Case) -> None:
    group = dist.group.WORLD.group_name
    spoil(group)
    inputs = inputs_of(case, rank)
    y = _call(case, inputs, group)
    want = arrange(case, [pooled(case, doubled(inputs_of(case, r))) for r in range(world)], rank)
    assert (y.shape, y.dtype) == (want.shape, case.wire)
    assert bool(((y.double() - want).abs() <= bound(case, want)).all())
    assert torch.equal(y, _call(case, inputs, group))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(ranks: Ranks, case: Case) -> None:
    ranks(len(case.dims)).run(_forward, case)


def _backward(rank: int, world: int, case: Case) -> None:
    group = dist.group.WORLD.group_name
    spoil(group)
    inputs = inputs_of(case, rank)
    leaves = [t.requires_grad_() for t in (*inputs[0], *inputs[3])]
    y = _call(case, inputs, group)
    every = [doubled(inputs_of(case, r)) for r in range(world)]
    exact = [t.requires_grad_() for t in (*every[rank][0], *every[rank][3])]
    whole = [pooled(case, tensors) for tensors in every]
    loss = whole[0][0].new_zeros(())
    grads = []
    for r in range(world):
        part = arrange(case, whole, r)
        grads.append(torch.randn(part.shape, generator=torch.Generator().manual_seed(r)).to(case.wire))
        loss = loss + (part * grads[-1].double()).sum()
    loss.backward()
    y.backward(grads[rank])
    # Up to bags * pooling gradients meet in a row, of which each is a product that is rounded.
    terms = case.b * world * case.pooling + 256
    for got, want in zip(leaves, exact, strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert got.grad.dtype == case.table
        limit = torch.finfo(case.table).eps * (want.grad.abs() + 4 * terms**0.5)
        limit = limit + 8 * terms * torch.finfo(torch.float32).eps
        assert bool(((got.grad.double() - want.grad).abs() <= limit).all())


@pytest.mark.parametrize("case", [c for c in CASES if c.mode != "max"], ids=str)
def test_gradients(ranks: Ranks, case: Case) -> None:
    ranks(len(case.dims)).run(_backward, case)


def _bad_index(rank: int, world: int) -> str:
    case = Case(EVEN)
    inputs = inputs_of(case, rank)
    if rank == 1:
        inputs[1][2][0] = case.rows
    with pytest.raises(RuntimeError) as caught:
        _call(case, inputs, fresh_group())
    return str(caught.value)


def test_a_bad_index_raises_everywhere(ranks: Ranks) -> None:
    theirs, ours = ranks(2).run(_bad_index)
    assert "index 37 of table 2 is outside of its 37 rows" in ours
    assert "rank 1" in theirs
    assert "index 37 of table 2" in theirs


def _uneven_batch(rank: int, world: int) -> str:
    weight, indices, offsets = torch.randn(5, 4), torch.zeros(3, dtype=torch.int64), torch.arange(3)
    with pytest.raises(ValueError, match="3 bags") as caught:
        torch.ops.autofuse.embedding_bag_all_to_all(
            [weight], [indices], [offsets], [], 0, False, -1, torch.float32, [4, 4], "bsc", fresh_group(),
            "direct", "test",
        )  # fmt: skip
    return str(caught.value)


def test_a_batch_that_cannot_be_cut(ranks: Ranks) -> None:
    assert all("cut into 2 equal parts" in text for text in ranks(2).run(_uneven_batch))


def _many(rank: int, world: int) -> None:
    for b in (1, 200, 3, 64, 17) * 4:
        _forward(rank, world, Case(UNEVEN, b=b, pooling=b % 7))


def test_changing_shapes(ranks: Ranks) -> None:
    ranks(2).run(_many)
