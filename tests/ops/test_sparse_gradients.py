"""Sparse gradients of embedding bags: what is exchanged and expanded is what torch makes, bit by bit."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering.ops.all_to_all_embedding_bag_backward import (
    AllToAllEmbeddingBagBackward,
    reference,
)
from tests.ops.bags import Case, arrange, inputs_of, pooled, spoil
from tests.ops.test_embedding_bag_all_to_all import BRAIN, EVEN, FOUR, HALF, UNEVEN
from tests.ranks import RankPool, fresh_group

Ranks = Callable[[int], RankPool]

CASES = [
    *(Case(EVEN, layout) for layout in ("bsc", "sbc", "stbd")),
    Case(EVEN, "stbd", weighted=True, padding=3),
    Case(EVEN, mode="mean", padding=0, index=torch.int32, last_offset=True),
    Case(EVEN, pooling=0),
    Case(EVEN, b=1, pooling=1, last_offset=True),
    Case(EVEN, rows=1, padding=0),
    Case(UNEVEN, "sbc", order="ring", index=torch.int32),
    Case(UNEVEN, weighted=True, last_offset=True),
    *(Case(UNEVEN, table=t, wire=t, mode="mean", pooling=40, padding=5) for t in (BRAIN, HALF)),
    *(Case(UNEVEN, table=t, wire=t, weighted=True) for t in (BRAIN, HALF)),
    Case(UNEVEN, table=torch.float32, wire=BRAIN, mode="mean"),
    Case(UNEVEN, table=BRAIN, wire=torch.float32, weighted=True),
    Case(((3,), (5,)), b=2, mode="mean", table=BRAIN, wire=HALF, pooling=700),
    Case(UNEVEN, table=torch.float64, wire=torch.float32, mode="mean", padding=1),
    Case(FOUR, b=3, order="oblivious", mode="mean", padding=3),
    Case(FOUR, "sbc", b=5, index=torch.int32, last_offset=True, padding=2),
    Case(((256,),) * 4, "bstd", b=9, pooling=100, weighted=True),
]


def _bags(case: Case, rank: int) -> list[Tensor]:
    """Gradients of the bags of the tables of `rank`."""
    generator = torch.Generator().manual_seed(rank)
    bags = case.b * len(case.dims)
    return [torch.randn(bags, d, generator=generator).to(case.wire) for d in case.dims[rank]]


def _arguments(case: Case, rank: int, sparse: list[bool], grad: Tensor, group: str) -> tuple[object, ...]:
    weights, indices, offsets, samples = inputs_of(case, rank)
    return (
        *(grad, indices, offsets, samples, [w.shape[0] for w in weights], [w.shape[1] for w in weights]),
        *(*case.options, case.table, sparse, case.columns, case.layout, False, group, case.order, "test"),
    )


def _call(case: Case, rank: int, sparse: list[bool], grad: Tensor, group: str = "") -> list[Tensor]:
    group = group or dist.group.WORLD.group_name
    arguments = _arguments(case, rank, sparse, grad, group)
    results: list[Tensor] = torch.ops.autofuse.all_to_all_embedding_bag_backward(*arguments)
    return results


def _wanted(case: Case, rank: int) -> list[Tensor]:
    """Torch's sparse gradients of the tables of `rank`."""
    weights, indices, offsets, samples = inputs_of(case, rank)
    leaves = [w.requires_grad_() for w in weights]
    bags = pooled(case, (leaves, indices, offsets, samples), sparse=True)
    torch.autograd.backward(bags, [g.to(case.table) for g in _bags(case, rank)])
    return [w.grad for w in leaves if w.grad is not None]


def _check_same(found: Tensor, wanted: Tensor) -> None:
    assert (found.layout, found.shape, found.dtype) == (wanted.layout, wanted.shape, wanted.dtype)
    assert found.is_coalesced() == wanted.is_coalesced()
    assert torch.equal(found._indices(), wanted._indices())
    assert torch.equal(found._values(), wanted._values())


def _as_torch(rank: int, world: int, case: Case) -> None:
    spoil(dist.group.WORLD.group_name)
    grad = arrange(case, [_bags(case, r) for r in range(world)], rank)
    tables = len(case.dims[rank])
    dense, sparse = (_call(case, rank, [kind] * tables, grad) for kind in (False, True))
    for found, wanted in zip(sparse, _wanted(case, rank), strict=True):
        _check_same(found, wanted)
    some = [t % 2 == 0 for t in range(tables)]
    for t, found in enumerate(_call(case, rank, some, grad)):
        if some[t]:
            _check_same(found, sparse[t])
        else:
            assert torch.equal(found, dense[t])
    arguments = _arguments(case, rank, [True] * tables, grad, dist.group.WORLD.group_name)
    for found, wanted in zip(reference(AllToAllEmbeddingBagBackward(*arguments)), sparse, strict=True):  # type: ignore[arg-type]
        _check_same(found, wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_torch(ranks: Ranks, case: Case) -> None:
    ranks(len(case.dims)).run(_as_torch, case)


def _twice(rank: int, world: int, case: Case) -> None:
    """As that of dense gradients."""
    whole = [_bags(case, r) for r in range(world)]
    weights = inputs_of(case, rank)[0]
    found = []
    for kind in (False, True):
        grad = arrange(case, whole, rank).contiguous().requires_grad_()
        tables = [t.to_dense() for t in _call(case, rank, [kind] * len(weights), grad)]
        torch.autograd.backward(tables, weights)
        assert grad.grad is not None
        found.append(grad.grad)
    assert torch.equal(*found)


def test_second_gradient(ranks: Ranks) -> None:
    ranks(2).run(_twice, Case(EVEN, padding=3, weighted=True))


def _bad(rank: int, world: int, offset: bool) -> str:
    case = Case(EVEN, last_offset=True)
    arguments = list(_arguments(case, rank, [True] * 3, torch.randn(case.b, 96), fresh_group()))
    if rank == 1:
        _, indices, offsets = arguments[:3]
        (offsets[2] if offset else indices[2])[1] = case.rows + 1000  # type: ignore[index]
    try:
        torch.ops.autofuse.all_to_all_embedding_bag_backward(*arguments)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("offset", [False, True])
def test_bad_input_raises(ranks: Ranks, offset: bool) -> None:
    theirs, ours = ranks(2).run(_bad, offset)
    assert ("of table 2 ends before it starts" if offset else "index 1037 of table 2") in ours
    assert not theirs or "rank 1" in theirs  # who has all it needs may be done before
