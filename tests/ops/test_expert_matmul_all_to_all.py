"""expert_matmul_all_to_all over real ranks: numerics, epilogues, positions, gradients."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autofuse.lowering.ops  # noqa: F401
from tests.ops.bags import spoil
from tests.ops.test_all_to_all_expert_matmul import EMPTY, FORMS
from tests.ops.tokens import Case, close, grouped, listed, spread
from tests.ranks import RankPool, fresh_group

Ranks = Callable[[int], RankPool]


def _x(case: Case, rank: int) -> list[Tensor]:
    if case.sends is None:
        shape = (case.count, case.outer * case.world * case.c, case.k)
    else:
        shape = (sum(case.received(rank)), case.k)
    return [case.randn(rank, 1 + i, *shape) for i in range(case.terms)]


def _call(
    case: Case,
    rank: int,
    x: list[Tensor],
    w: list[Tensor],
    bias: list[Tensor],
    group: str,
    product: str = "mm",
    operands: tuple[Tensor, ...] = (),
    keep: bool = False,
) -> list[Tensor]:
    sends, receives = case.splits(rank)  # of the dispatch: combine goes the other way
    dropless = case.sends is not None
    return torch.ops.autofuse.expert_matmul_all_to_all(
        x if dropless else listed(case, x),
        listed(case, w),
        listed(case, bias),
        list(operands),
        product,
        case.experts,
        case.offsets(rank) if dropless else None,
        case.positions(rank) if dropless else None,
        sends,
        receives,
        1,
        case.outer,
        keep,
        group,
        case.order,
        "test",
    )


def _product(case: Case, rank: int, x: list[Tensor], w: list[Tensor], bias: list[Tensor]) -> Tensor:
    terms = [
        grouped(case, rank, xi, wi, bias[i] if bias else None)
        for i, (xi, wi) in enumerate(zip(x, w, strict=True))
    ]
    return torch.stack(terms).sum(0)


def _inputs(case: Case, rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return _x(case, rank), case.weights(rank), case.biases(rank)


def _exact(case: Case, rank: int) -> Tensor:
    x, w, bias = ([t.double() for t in ts] for ts in _inputs(case, rank))
    return _product(case, rank, x, w, bias)


def _forward(rank: int, world: int, case: Case) -> None:
    group = dist.group.WORLD.group_name
    spoil(group)
    inputs = _inputs(case, rank)
    (y,) = _call(case, rank, *inputs, group)
    want = spread(case, rank, [_exact(case, r) for r in range(world)])
    close(y, want, case.k * case.terms, case.dtype)
    (again,) = _call(case, rank, *inputs, group)
    assert torch.equal(y, again)
    kept, p = _call(case, rank, *inputs, group, keep=True)
    close(kept, want, case.k * case.terms, case.dtype)
    close(p, _exact(case, rank), case.k * case.terms, case.dtype)


def _epilogue(rank: int, world: int, case: Case) -> None:
    group = dist.group.WORLD.group_name
    spoil(group)
    scales = [_exact(case, r)[..., :1].float() for r in range(world)]
    (y,) = _call(case, rank, *_inputs(case, rank), group, "mm; mul %0; neg; to bfloat16", (scales[rank],))
    assert y.dtype == torch.bfloat16
    exact = [-_exact(case, r) * scales[r].double() for r in range(world)]
    close(y, spread(case, rank, exact), case.k * 100, torch.bfloat16)


def _backward(rank: int, world: int, case: Case, keep: bool) -> None:
    group = dist.group.WORLD.group_name
    spoil(group)
    inputs = _inputs(case, rank)
    leaves = [t.requires_grad_() for ts in inputs for t in ts]
    outputs = _call(case, rank, *inputs, group, keep=keep)
    every = [[[t.double().requires_grad_() for t in ts] for ts in _inputs(case, r)] for r in range(world)]
    products = [_product(case, r, *tensors) for r, tensors in enumerate(every)]
    loss = products[0].new_zeros(())
    for r in range(world):
        y = spread(case, r, products)
        loss = loss + (y * case.randn(r, 30, *y.shape).double()).sum()
        if keep:
            loss = loss + (products[r] * case.randn(r, 31, *products[r].shape).double()).sum()
    loss.backward()
    grads = [case.randn(rank, 30 + i, *t.shape) for i, t in enumerate(outputs)]
    torch.autograd.backward(outputs, grads)
    for got, want in zip(leaves, [t for ts in every[rank] for t in ts], strict=True):
        assert got.grad is not None
        assert want.grad is not None
        close(got.grad, want.grad, 4 * max(case.n, products[rank].shape[-2]), case.dtype)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_forward(ranks: Ranks, case: Case) -> None:
    ranks(case.world).run(_forward, case)


@pytest.mark.parametrize("case", [FORMS[0], FORMS[2], FORMS[6], Case(4, sends=EMPTY, shuffled=True)], ids=str)
def test_epilogue(ranks: Ranks, case: Case) -> None:
    ranks(case.world).run(_epilogue, case)


@pytest.mark.parametrize("case", [c for c in FORMS if c.dtype == torch.float32], ids=str)
def test_gradients(ranks: Ranks, case: Case) -> None:
    ranks(case.world).run(_backward, case, case.terms > 1)


def _shared_rows(rank: int, world: int, duplicates: bool) -> None:
    """Rows that share a position are added; positions that no row has are zero."""
    group = dist.group.WORLD.group_name
    spoil(group)
    x, w = torch.randn(1404, 8), torch.randn(1, 8, 8)
    positions = torch.arange(1404) + 3  # the last four rows belong to no expert
    if duplicates:
        positions[1] = positions[0]
    splits, offsets = [750, 750], torch.tensor([1400], dtype=torch.int32)
    (y,) = torch.ops.autofuse.expert_matmul_all_to_all(
        [x], [w], [], [], "mm", 0, offsets, positions, splits, splits, 1, 1, False, group, "direct", "test"
    )
    sent = torch.zeros(1500, 8, dtype=torch.float64)
    sent = sent.index_add(0, positions[:1400], x[:1400].double() @ w[0].double())
    parts = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(parts, sent)
    close(y, torch.cat([p.split(750)[rank] for p in parts]), 16, torch.float32)


@pytest.mark.parametrize("duplicates", [False, True])
def test_positions_that_are_shared_or_missing(ranks: Ranks, duplicates: bool) -> None:
    ranks(2).run(_shared_rows, duplicates)


def _addmm(rank: int, world: int) -> None:
    """A single batched expert may start with any contraction."""
    group = dist.group.WORLD.group_name
    spoil(group)
    case = Case(world, count=1, c=20)
    x, w, _ = _inputs(case, rank)
    bias = case.randn(rank, 50, case.n).requires_grad_()
    (y,) = _call(case, rank, x, w, [], group, "addmm %0; mul 2", (bias,))
    exact = [2 * (_exact(case, r) + case.randn(r, 50, case.n).double()) for r in range(world)]
    close(y, spread(case, rank, exact), 2 * case.k, case.dtype)
    y.sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full_like(bias, 2.0 * world * case.c))


def test_addmm_of_one_expert(ranks: Ranks) -> None:
    ranks(2).run(_addmm)


def _disagree(rank: int, world: int) -> str:
    splits = [5, 5] if rank == 0 else [5, 6]
    x, w = torch.randn(sum(splits), 4), torch.randn(1, 4, 4)
    offsets = torch.tensor([sum(splits)], dtype=torch.int32)
    with pytest.raises(RuntimeError) as caught:
        torch.ops.autofuse.expert_matmul_all_to_all(
            [x],
            [w],
            [],
            [],
            "mm",
            0,
            offsets,
            None,
            [5, 5],
            splits,
            1,
            1,
            False,
            fresh_group(),
            "direct",
            "test",
        )
    return str(caught.value)


def test_splits_that_disagree_raise_everywhere(ranks: Ranks) -> None:
    for text in ranks(2).run(_disagree):
        assert "rank 1 sends 6 rows to rank 1, which expects 5" in text


def _many(rank: int, world: int) -> None:
    for c in (1, 300, 7, 64, 256) * 6:
        _forward(rank, world, replace(FORMS[0], c=c, world=world))


def test_changing_shapes(ranks: Ranks) -> None:
    ranks(2).run(_many)
