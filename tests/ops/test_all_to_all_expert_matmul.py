"""all_to_all_expert_matmul over real ranks: numerics, order, gradients, wrong input."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autofuse.lowering.ops  # noqa: F401
from tests.ops.bags import spoil
from tests.ops.tokens import Case, close, gather, grouped, listed
from tests.ranks import RankPool, RanksFailed, fresh_group

Ranks = Callable[[int], RankPool]

UNEVEN = ((40, 3), (0, 61))
MANY = ((900, 0), (1300, 1110))
EMPTY = ((0, 0, 0, 0), (9, 0, 70, 1), (0, 33, 2, 0), (0, 0, 40, 0))


def _x(case: Case, rank: int) -> Tensor:
    if case.sends is None:
        return case.randn(rank, 1, case.world, case.count, case.outer * case.c, case.k)
    return case.randn(rank, 1, sum(case.sends[rank]), case.k)


def _call(
    case: Case, rank: int, x: Tensor, w: list[Tensor], bias: list[Tensor], group: str, gate: str = ""
) -> list[Tensor]:
    sends, receives = case.splits(rank)
    dropless = case.sends is not None
    return torch.ops.autofuse.all_to_all_expert_matmul(
        x,
        listed(case, w),
        listed(case, bias),
        gate,
        case.experts,
        case.offsets(rank) if dropless else None,
        case.positions(rank) if dropless else None,
        receives,
        sends,
        1,
        case.outer,
        True,
        group,
        case.order,
        "test",
    )


def _outputs(case: Case, results: list[Tensor]) -> list[Tensor]:
    """Results per consumer, batched."""
    if not case.listed or case.sends is not None:
        return results
    return [torch.stack(results[i * case.count : (i + 1) * case.count]) for i in range(case.terms)]


def _forward(rank: int, world: int, case: Case) -> None:
    group = dist.group.WORLD.group_name
    spoil(group)
    x, w, bias = _x(case, rank), case.weights(rank), case.biases(rank)
    *results, exchanged = _call(case, rank, x, w, bias, group)
    exact = gather(case, rank, [_x(case, r).double() for r in range(world)])
    assert torch.equal(exchanged.double(), exact)
    outputs = _outputs(case, results)
    for i, y in enumerate(outputs):
        b = bias[i].double() if bias else None
        close(y, grouped(case, rank, exact, w[i].double(), b), case.k, case.dtype)
    again = _call(case, rank, x, w, bias, group)
    assert all(torch.equal(a, b) for a, b in zip(again, [*results, exchanged], strict=True))
    if len(results) == 2:
        y, other = _call(case, rank, x, w, bias, group, "silu")
        assert torch.equal(y, torch.nn.functional.silu(results[0]) * results[1])
        assert torch.equal(other, exchanged)
        kept = _call(case, rank, x, w, bias, group, "silu; products")
        assert all(torch.equal(a, b) for a, b in zip(kept, [y, *results, other], strict=True))


def _backward(rank: int, world: int, case: Case) -> None:
    group = dist.group.WORLD.group_name
    spoil(group)
    x, w, bias = _x(case, rank), case.weights(rank), case.biases(rank)
    for t in (x, *w, *bias):
        t.requires_grad_()
    *results, exchanged = _call(case, rank, x, w, bias, group)
    outputs = [*_outputs(case, results), exchanged]
    exact = [[_x(case, r).double(), *case.weights(r), *case.biases(r)] for r in range(world)]
    exact = [[t.double().requires_grad_() for t in tensors] for tensors in exact]
    loss = exact[0][0].new_zeros(())
    for r in range(world):
        whole = gather(case, r, [tensors[0] for tensors in exact])
        grads = _grads(case, r, whole.shape)
        for i in range(case.terms):
            b = exact[r][1 + case.terms + i] if case.bias else None
            loss = loss + (grouped(case, r, whole, exact[r][1 + i], b) * grads[i].double()).sum()
        loss = loss + (whole * grads[-1].double()).sum()
    loss.backward()
    torch.autograd.backward(outputs, _grads(case, rank, exchanged.shape))
    if len(results) == 2:
        with pytest.raises(RuntimeError, match="has no gradient"):
            _call(case, rank, x, w, bias, group, "silu")[0].sum().backward()
    for got, want in zip((x, *w, *bias), exact[rank], strict=True):
        assert got.grad is not None
        assert want.grad is not None
        close(got.grad, want.grad, 4 * max(case.n * case.terms, exchanged.shape[-2]), case.dtype)


def _grads(case: Case, rank: int, shape: torch.Size) -> list[Tensor]:
    outputs = [case.randn(rank, 30 + i, *shape[:-1], case.n) for i in range(case.terms)]
    return [*outputs, case.randn(rank, 40, *shape)]


FORMS = [
    Case(2),
    Case(2, c=1, order="ring"),
    Case(2, c=256, bias=True),
    Case(2, c=260, outer=2, listed=True, terms=2, bias=True),
    Case(2, c=3, outer=2, dtype=torch.bfloat16, order="oblivious"),
    Case(2, c=0),
    Case(2, c=7, outer=3, listed=True, terms=2),
    Case(2, c=4, terms=2, bias=True),
    Case(2, sends=MANY, bias=True),
    Case(2, sends=MANY, listed=True, terms=2, dtype=torch.bfloat16),
    Case(2, sends=UNEVEN, terms=2, bias=True),
    Case(2, sends=UNEVEN, shuffled=True, dtype=torch.bfloat16),
    Case(2, sends=UNEVEN, listed=True, dtype=torch.float16, order="ring"),
    Case(2, sends=((0, 0), (0, 0))),
    Case(4, c=257, terms=3, k=5),
    Case(4, sends=EMPTY, count=1),
    Case(4, sends=EMPTY, count=3, shuffled=True, bias=True),
]


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_forward(ranks: Ranks, case: Case) -> None:
    ranks(case.world).run(_forward, case)


@pytest.mark.parametrize("case", [c for c in FORMS if c.dtype == torch.float32], ids=str)
def test_gradients(ranks: Ranks, case: Case) -> None:
    ranks(case.world).run(_backward, case)


def _random_splits(rank: int, world: int, calls: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for i in range(calls):
        sends = torch.randint(0, 60, (world, world), generator=generator)
        sends = sends * torch.randint(0, 2, (world, world), generator=generator)
        _forward(rank, world, Case(world, sends=tuple(map(tuple, sends.tolist())), shuffled=i % 2 == 0))


@pytest.mark.parametrize("world", [2, 4])
def test_splits_that_change_with_every_call(ranks: Ranks, world: int) -> None:
    ranks(world).run(_random_splits, 15)


def _disagree(rank: int, world: int) -> str:
    splits = [[5, 5], [5, 5]] if rank == 0 else [[5, 5], [4, 5]]
    sends, receives = splits
    x, w = torch.randn(sum(sends), 4), torch.randn(1, 4, 4)
    offsets = torch.tensor([sum(receives)], dtype=torch.int32)
    with pytest.raises(RuntimeError) as caught:
        torch.ops.autofuse.all_to_all_expert_matmul(
            x, [w], [], "", 0, offsets, None, receives, sends, 1, 1, False, fresh_group(), "direct", "test"
        )
    return str(caught.value)


def test_splits_that_disagree_raise_everywhere(ranks: Ranks) -> None:
    for text in ranks(2).run(_disagree):
        assert "rank 0 sends 5 rows to rank 1, which expects 4" in text


def _bad_offsets(rank: int, world: int) -> None:
    offsets = torch.tensor([3, 1], dtype=torch.int32)
    torch.ops.autofuse.all_to_all_expert_matmul(
        torch.randn(4, 4), [torch.randn(2, 4, 4)], [], "", 0, offsets, None, [2, 2], [2, 2], 1, 1, False,
        fresh_group(), "direct", "test",
    )  # fmt: skip


def test_offsets_must_ascend(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="ascending offsets"):
        ranks(2).run(_bad_offsets)
