"""all_to_all_embedding_bag_backward by itself: the exchanged gradient, its own gradient, repeatability."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering.ops import all_to_all_embedding_bag_backward as backward
from tests.ops.bags import Case, arrange, inputs_of, pooled, spoil
from tests.ops.test_embedding_bag_all_to_all import EVEN, FOUR, UNEVEN
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]

CASES = [
    Case(EVEN, "stbd"),
    Case(UNEVEN, "sbc", weighted=True, order="ring"),
    Case(UNEVEN, weighted=True, last_offset=True, bare=1),
    Case(FOUR, "bsc", mode="mean", padding=3, order="oblivious"),
]


def _call(case: Case, rank: int, grad: Tensor, keep: bool) -> list[Tensor]:
    weights, indices, offsets, samples = inputs_of(case, rank)
    group = dist.group.WORLD.group_name
    results: list[Tensor] = torch.ops.autofuse.all_to_all_embedding_bag_backward(
        grad, indices, offsets, samples, [w.shape[0] for w in weights], [w.shape[1] for w in weights],
        *case.options, case.table, [False] * len(weights), case.columns, case.layout, keep, group,
        case.order, "test",
    )  # fmt: skip
    return results


def _bags(case: Case, rank: int) -> list[Tensor]:
    """Gradients of the bags of the tables of `rank`."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(case.b * len(case.dims), d, generator=generator) for d in case.dims[rank]]


def _exchange(rank: int, world: int, case: Case) -> None:
    spoil(dist.group.WORLD.group_name)
    grad = arrange(case, [_bags(case, r) for r in range(world)], rank)
    *tables, exchanged = _call(case, rank, grad, True)
    assert torch.equal(exchanged, torch.cat(_bags(case, rank), 1))
    assert all(torch.equal(a, b) for a, b in zip(tables, _call(case, rank, grad, False), strict=True))


def _twice(rank: int, world: int, case: Case) -> None:
    """The gradient of `<dweights, V> + <G, U>` in grad is the op itself on V as tables, plus U."""
    spoil(dist.group.WORLD.group_name)
    grad = arrange(case, [_bags(case, r) for r in range(world)], rank).contiguous().requires_grad_()
    *tables, exchanged = _call(case, rank, grad, True)
    weights = inputs_of(case, rank)[0]
    torch.autograd.backward([*tables, exchanged], [*weights, torch.cat(_bags(case, rank), 1)])
    assert grad.grad is not None
    whole = [
        [p + g for p, g in zip(pooled(case, inputs_of(case, r)), _bags(case, r), strict=True)]
        for r in range(world)
    ]
    want = arrange(case, whole, rank)
    assert bool(((grad.grad - want).abs() <= 64 * torch.finfo(torch.float32).eps * (1 + want.abs())).all())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exchanged_gradient(ranks: Ranks, case: Case) -> None:
    ranks(len(case.dims)).run(_exchange, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_second_gradient(ranks: Ranks, case: Case) -> None:
    ranks(len(case.dims)).run(_twice, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_gpus_add_without_a_kernel(case: Case) -> None:
    """What aten adds for a table is what the reference adds."""
    weights, indices, offsets, samples = inputs_of(case, 0)
    exchanged = torch.cat(_bags(case, 0), 1)
    sizes = [w.shape[0] for w in weights], [w.shape[1] for w in weights]
    args = backward.AllToAllEmbeddingBagBackward(
        exchanged, indices, offsets, samples, *sizes, *case.options, torch.float32, [False] * len(weights),
        case.columns, case.layout, False, "", case.order, "test",
    )  # fmt: skip
    with patch.object(backward, "_adds_with_aten", lambda device: True):
        found = backward._gradients(exchanged, args)
    for got, want in zip(found, backward._gradients(exchanged, args), strict=True):
        assert bool(((got - want).abs() <= 64 * torch.finfo(torch.float32).eps * (1 + want.abs())).all())
