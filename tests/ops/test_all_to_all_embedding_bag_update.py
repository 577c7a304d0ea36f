"""all_to_all_embedding_bag_update by itself, against fp64: fused and with plain collectives."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering.ops.library import FUSED_OPS
from tests.ops.bags import Case, arrange, doubled, inputs_of, pooled, spoil
from tests.ops.test_embedding_bag_all_to_all import EVEN, FOUR, UNEVEN
from tests.ranks import RankPool

OP = "all_to_all_embedding_bag_update"
LR, EPS = 0.25, 1e-3
HALF = torch.bfloat16

CASES = [
    Case(EVEN, "stbd"),
    Case(EVEN, "bsc", rows=3, pooling=9, last_offset=True, padding=1),
    Case(UNEVEN, "sbc", weighted=True, order="ring", index=torch.int32),
    Case(FOUR, "bsc", mode="mean", padding=3, order="oblivious"),
    Case(EVEN, "sbtd", table=HALF, wire=HALF, weighted=True),
    Case(EVEN, "bstd", wire=torch.float16, rows=1),
    Case(EVEN, pooling=0),
    Case(UNEVEN, weighted=True, bare=1),
]


def _bags(case: Case, rank: int) -> list[Tensor]:
    """Gradients of the bags of the tables of `rank`."""
    generator = torch.Generator().manual_seed(rank)
    bags = case.b * len(case.dims)
    return [torch.randn(bags, d, generator=generator).to(case.wire) for d in case.dims[rank]]


def _run(rank: int, world: int, case: Case, rowwise: bool, fused: bool) -> None:
    group = dist.group.WORLD.group_name
    spoil(group)
    weights, *rest = inputs_of(case, rank)
    before = [w.clone() for w in weights]
    states = [torch.linspace(0, 1, len(w)) for w in weights] if rowwise else []
    old = [s.double() for s in states]
    rates = [torch.tensor([LR / (1 + t), EPS]) for t in range(len(weights))]
    grad = arrange(case, [_bags(case, r) for r in range(world)], rank)
    op = FUSED_OPS[OP]
    run = getattr(torch.ops.autofuse, OP) if fused else lambda *given: op.reference(op.parse(given))
    exchanged = run(
        weights, states, rates, grad, *rest, *case.options, case.columns, case.layout, True, group,
        case.order, "test",
    )  # fmt: skip
    assert torch.equal(exchanged, torch.cat(_bags(case, rank), 1))

    tables = [w.requires_grad_() for w in doubled((before, *rest))[0]]
    whole = pooled(
        replace(case, table=torch.float64), (tables, rest[0], rest[1], doubled((before, *rest))[3])
    )
    torch.autograd.backward(whole, [g.double() for g in _bags(case, rank)])
    for t, table in enumerate(tables):
        assert table.grad is not None
        indices = rest[0][t].long()
        touched = torch.zeros(len(table), dtype=torch.bool)
        touched[indices[indices != case.padding]] = True
        lr, eps = rates[t].double()
        step = lr.expand(len(table))
        if rowwise:
            state = old[t] + table.grad.square().sum(1) / max(1, table.shape[1])
            step = lr / (state.sqrt() + eps)
            torch.testing.assert_close(states[t].double(), state, rtol=1e-5, atol=1e-6)
            assert torch.equal(states[t][~touched].double(), old[t][~touched])
        assert torch.equal(weights[t][~touched], before[t][~touched])
        want = table.detach() - step[:, None] * table.grad
        small = 64 * max(1, len(indices)) * torch.finfo(torch.float32).eps
        error = (weights[t].double() - want).abs() - torch.finfo(case.table).eps * want.abs()
        assert bool((error <= small * (1 + step[:, None])).all()), (case, t)


@pytest.mark.parametrize("rowwise", [False, True], ids=["sgd", "adagrad"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(ranks: Callable[[int], RankPool], case: Case, fused: bool, rowwise: bool) -> None:
    ranks(len(case.dims)).run(_run, case, rowwise, fused)


def _refused(rank: int, world: int) -> None:
    weights, *rest = inputs_of(CASES[1], rank)
    rates = [torch.tensor([LR, EPS]) for _ in weights]
    states = [torch.zeros(CASES[1].rows) for _ in weights]
    grad = arrange(CASES[1], [_bags(CASES[1], r) for r in range(world)], rank)
    group = dist.group.WORLD.group_name
    for tables, sums, numbers, says in (
        ([w.double() for w in weights], states, rates, "float64"),
        ([w.t().contiguous().t() for w in weights], states, rates, "contiguous"),
        (weights, [s.half() for s in states], rates, "state of table 0"),
        (weights, states, [r.double() for r in rates], "rates of table 0"),
    ):
        with pytest.raises(ValueError, match=says):
            torch.ops.autofuse.all_to_all_embedding_bag_update(
                tables, sums, numbers, grad, *rest, *CASES[1].options, CASES[1].columns, "bsc", False, group,
                "direct", "test",
            )  # fmt: skip


def test_refused(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(_refused)
