"""matmul_all_reduce over real ranks, against float64."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autofuse.ops
from autofuse.lowering.cpu import recipes
from autofuse.lowering.cpu.rendezvous import GroupSpansHosts
from autofuse.lowering.ops import library
from autofuse.lowering.reference.product import contract, epilogue, parse, product_reference
from autofuse.native_kernels import cpu
from tests.ops.dense import (
    DTYPES,
    ORDERS,
    Products,
    assert_close,
    factors,
    poison,
    products,
    same_on_all_ranks,
    seeded,
    world_group,
)
from tests.ranks import RankPool, fresh_group

Ranks = Callable[[int], RankPool]

# M = 1 (columns are cut), fewer rows than ranks, odd sizes, rows cut, two phases at more than two ranks
SHAPES = [(1, 64, 96), (1, 7, 1), (3, 17, 5), (37, 19, 23), (130, 33, 70), (300, 24, 40)]


def _call(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    product: str = "mm",
    reduce_op: str = "sum",
    keep: bool = False,
    order: str = "direct",
) -> list[Tensor]:
    result: list[Tensor] = torch.ops.autofuse.matmul_all_reduce(
        x, w, operands, product, reduce_op, keep, [], "", "", world_group(), order, "test"
    )
    return result


def _plain(rank: int, world: int, dtype: torch.dtype, order: str) -> None:
    for i, (m, k, n) in enumerate(SHAPES):
        for transposed in (False, True):
            inputs = factors(world, m, k, n, dtype, 100 * i)
            x, w = inputs[rank]
            w = w if transposed else w.contiguous()
            poison(world_group())
            (y,) = _call([x], [w], [], order=order)
            (again,) = _call([x], [w], [], order=order)
            assert torch.equal(y, again)
            same_on_all_ranks(y)
            exact, size = products(inputs)
            assert_close(y, exact.sum(0), size.sum(0), k + world, 2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_plain(ranks: Ranks, world: int, dtype: torch.dtype, order: str) -> None:
    ranks(world).run(_plain, dtype, order)


def _two_phases(rank: int, world: int) -> None:
    """Large enough that each rank reduces its own chunk, of several tiles, by rows and by columns."""
    for m, n in [(2100, 700), (515, 2050)]:
        inputs = factors(world, m, 16, n)
        poison(world_group())
        (y,) = _call([inputs[rank][0]], [inputs[rank][1]], [], reduce_op="avg")
        same_on_all_ranks(y)
        exact, size = products(inputs)
        assert_close(y, exact.mean(0), size.mean(0), 16 + world, 2)


def test_two_phases(ranks: Ranks) -> None:
    ranks(4).run(_two_phases)


PRODUCTS: Products = [
    ("mm; add %0", [(1, -1)]),
    ("mm; mul %0; add %1", [(-2, 1), (-1,)]),
    ("mm; mul 0.5; neg; sub %0", [(-2, -1)]),
    ("mm; div %0; to float32", [()]),
    ("addmm %0; add 1", [(-1,)]),
    ("addmm %0; to bfloat16", [(-2, -1)]),
    ("addmm %0 0.5 2; relu", [(-1,)]),
    ("mm; masked_fill %0 %1", [(-2, 1), ()]),
    ("mm; where %0 %1", [(-1,), (-2, -1)]),
]


def _epilogues(rank: int, world: int, order: str) -> None:
    for m, n in [(1, 12), (140, 50)]:
        for product, shapes in PRODUCTS:
            for terms in (1, 2):
                x = [seeded(10 * rank + i, m, 9 + i, dtype=torch.bfloat16) for i in range(terms)]
                w = [seeded(10 * rank + i + 5, 9 + i, n, dtype=torch.bfloat16) for i in range(terms)]
                sizes = [tuple({-2: m, -1: n, 1: 1}[d] for d in shape) for shape in shapes]
                operands = [seeded(rank + 7, *size, dtype=torch.bfloat16).abs() + 1 for size in sizes]
                if "%0 %1" in product:
                    operands[0] = operands[0] > 1.5  # a mask
                poison(world_group())
                y, p = _call(x, w, operands, product, "avg", True, order)
                first, _, stages = product.partition("; ")
                again, kept = _call(x, w, operands, f"{first}; keep; {stages}", "avg", True, order)
                torch.testing.assert_close(kept, contract(parse(first), x, w, operands), rtol=0.03, atol=0.03)
                expected = product_reference(x, w, operands, product)
                # A tile is computed by another matmul than the whole: one rounding apart per stage.
                torch.testing.assert_close(p, expected, rtol=0.03, atol=0.03)
                assert p.dtype == expected.dtype
                for result, of in ((y, p), (again, epilogue(kept, operands, product))):
                    parts = [torch.empty_like(of) for _ in range(world)]
                    dist.all_gather(parts, of)
                    exact = torch.stack([part.double() for part in parts])
                    assert_close(result, exact.mean(0), exact.abs().mean(0), world, 1)
                    same_on_all_ranks(result)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world", [2, 4])
def test_epilogues(ranks: Ranks, world: int, order: str) -> None:
    """The reduction is exact up to one rounding of the products that the ranks kept."""
    ranks(world).run(_epilogues, order)


def _gradients(rank: int, world: int, reduce_op: str) -> None:
    xs = [seeded(r, 2, 5, 8) for r in range(world)]
    ws = [seeded(r + 10, 8, 6) for r in range(world)]
    cs = [seeded(r + 20, 2, 5, 6) for r in range(world)]
    exact = [[t.double().requires_grad_() for t in (x, w)] for x, w in zip(xs, ws, strict=True)]
    bias = seeded(40, 6).double().requires_grad_()
    total = torch.stack([x @ w + bias for x, w in exact]).sum(0) / (world if reduce_op == "avg" else 1)
    sum((total * c).sum() for c in cs).backward()  # type: ignore[union-attr]

    x, w = xs[rank].requires_grad_(), ws[rank].requires_grad_()
    b = seeded(40, 6).requires_grad_()
    y = autofuse.ops.matmul_all_reduce(x, w, b, reduce_op=reduce_op)
    torch.testing.assert_close(y.double(), total, rtol=1e-5, atol=1e-5)
    (y * cs[rank]).sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert b.grad is not None
    assert bias.grad is not None
    torch.testing.assert_close(x.grad.double(), exact[rank][0].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(w.grad.double(), exact[rank][1].grad, rtol=1e-5, atol=1e-5)
    dist.all_reduce(b.grad)  # a replicated bias collects the gradients of all ranks
    torch.testing.assert_close(b.grad.double(), bias.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_gradients(ranks: Ranks, reduce_op: str) -> None:
    ranks(2).run(_gradients, reduce_op)


def _many(rank: int, world: int) -> None:
    for i in range(300):
        m, n, order = 1 + i * 7 % 40, 1 + i * 11 % 60, ORDERS[i % 3]
        xs = [seeded(i + r, m, 4) for r in range(world)]
        ws = [seeded(i + r + 5, 4, n) for r in range(world)]
        (y,) = _call([xs[rank]], [ws[rank]], [], order=order)
        exact = torch.stack([x.double() @ w.double() for x, w in zip(xs, ws, strict=True)]).sum(0)
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_300_calls_of_changing_shapes(ranks: Ranks, world: int) -> None:
    ranks(world).run(_many)


def _opcheck(rank: int, world: int) -> None:
    for keep in (False, True):
        x, w = seeded(rank, 6, 4).requires_grad_(), seeded(rank + 5, 4, 8).requires_grad_()
        bias = seeded(rank + 9, 8).requires_grad_()
        args = ([x], [w], [bias], "addmm %0", "sum", keep, [], "", "", world_group(), "direct", "opcheck")
        torch.library.opcheck(torch.ops.autofuse.matmul_all_reduce.default, args)


def test_opcheck(ranks: Ranks) -> None:
    ranks(2).run(_opcheck)


def _other_dtypes(rank: int, world: int) -> None:
    """float64 has no kernel: the reference, with the same result."""
    x, w = seeded(rank, 5, 4, dtype=torch.float64), seeded(rank + 5, 4, 3, dtype=torch.float64)
    y = autofuse.ops.matmul_all_reduce(x, w, reduce_op="avg")
    exact = torch.stack(
        [seeded(r, 5, 4, dtype=x.dtype) @ seeded(r + 5, 4, 3, dtype=x.dtype) for r in range(world)]
    )
    torch.testing.assert_close(y, exact.mean(0))


def test_dtypes_without_a_kernel(ranks: Ranks) -> None:
    ranks(2).run(_other_dtypes)


def _edges(rank: int, world: int) -> None:
    """No rows; no columns; nothing to sum over; inference mode; a group of one rank."""
    for m, k, n in [(0, 4, 5), (3, 4, 0), (3, 0, 5)]:
        for order in ORDERS:
            poison(world_group())
            (y,) = _call([torch.ones(m, k)], [torch.ones(k, n)], [], order=order)
            assert torch.equal(y, torch.full((m, n), float(world * k)))
    with torch.inference_mode():
        y = autofuse.ops.matmul_all_reduce(torch.ones(3, 4), torch.ones(4, 5))
    assert torch.equal(y, torch.full((3, 5), world * 4.0))
    alone = [dist.new_group([r]) for r in range(world)][rank]
    y = autofuse.ops.matmul_all_reduce(torch.ones(2, 3), torch.ones(3, 2), reduce_op="avg", group=alone)
    assert torch.equal(y, torch.full((2, 2), 3.0))
    rows = torch.ones(3)
    assert torch.equal(autofuse.ops.matmul_all_reduce(rows, torch.ones(3, 2)), torch.full((2,), world * 3.0))


def test_edges(ranks: Ranks) -> None:
    ranks(2).run(_edges)


def _spans_hosts(rank: int, world: int) -> None:
    def elsewhere(group_name: str) -> None:
        raise GroupSpansHosts(f"group {group_name} spans two hosts")

    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "workspace_for", elsewhere)
        patch.setattr(library.log, "warning", lambda *args: messages.append(args[0] % args[1:]))
        for _ in range(2):
            y = autofuse.ops.matmul_all_reduce(torch.ones(3, 4), torch.ones(4, 5))
            assert torch.equal(y, torch.full((3, 5), world * 4.0))
    assert len(messages) == 1
    assert "runs unfused: group" in messages[0]


def test_a_group_that_spans_hosts_runs_unfused(ranks: Ranks) -> None:
    ranks(2).run(_spans_hosts)


def _no_room(rank: int, world: int) -> None:
    create, messages = cpu.create_segment, list[str]()

    def full(name: str, nbytes: int) -> int:
        if rank == 1 and nbytes > 1 << 18:
            raise cpu.NoRoom(f"cannot get {nbytes} bytes")
        return create(name, nbytes)

    x, w = torch.ones(300, 4), torch.ones(4, 500)
    group = fresh_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "create_segment", full)
        patch.setattr(library.log, "warning", lambda *args: messages.append(args[0] % args[1:]))
        for _ in range(2):
            y = autofuse.ops.matmul_all_reduce(x, w, group=group)
            assert torch.equal(y, torch.full((300, 500), world * 4.0))
            y = autofuse.ops.matmul_all_reduce(x[:2], w, group=group)  # there is room for this one
            assert torch.equal(y, torch.full((2, 500), world * 4.0))
    assert len(messages) == 1
    assert "room" in messages[0] or "cannot get" in messages[0]
    y = autofuse.ops.matmul_all_reduce(x, w, group=group)
    assert torch.equal(y, torch.full((300, 500), world * 4.0))


def test_without_room_for_shared_memory_it_runs_unfused(ranks: Ranks) -> None:
    ranks(2).run(_no_room)


def _bad_input(rank: int, world: int) -> None:
    x, w = torch.ones(4, 3), torch.ones(3, 5)
    op = autofuse.ops.matmul_all_reduce
    with pytest.raises(ValueError, match=r"cannot multiply x \(4, 3\) by w \(5, 3\)"):
        op(x, w.t())
    with pytest.raises(ValueError, match=r"tensors of torch.float32 and torch.bfloat16; cast"):
        op(x, w.bfloat16())
    with pytest.raises(ValueError, match=r"tensors on cpu and meta; move"):
        op(x, w.to("meta"))
    with pytest.raises(ValueError, match=r"reduce_op 'max' is not supported; use 'sum' or 'avg'"):
        op(x, w, reduce_op="max")
    with pytest.raises(ValueError, match=r"no process group called 'nobody'"):
        op(x, w, group="nobody")
    with pytest.raises(ValueError, match=r"an operand \(4,\) does not broadcast"):
        op(x, w, torch.ones(4))
    with pytest.raises(ValueError, match=r"this rank is not in the group"):
        op(x, w, group=dist.GroupMember.NON_GROUP_MEMBER)


def test_bad_input_raises_before_any_communication(ranks: Ranks) -> None:
    ranks(2).run(_bad_input)


def test_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        autofuse.ops.matmul_all_reduce(torch.ones(2, 2), torch.ones(2, 2))
