"""Collectives of one group keep their order, fused ones counted where they stand."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code

import autofuse
from tests.passes.dense import group as everybody
from tests.passes.harness import fake_group, passes_only
from tests.ranks import RankPool
from tests.robustness.seven import integers
from tests.subsets import in_tiers

Ranks = Callable[[int], RankPool]
Program = Callable[..., Tensor | tuple[Tensor, ...]]
_KIND = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


def reduce(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", everybody())


def gather(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, everybody())


def scatter(x: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(x, "sum", 0, everybody())


def exchange(x: Tensor) -> Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single(x, None, None, everybody()))


def mixed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Fused and kept collectives by turns."""
    a = reduce(x @ w)
    b = reduce(a.sin())
    c = gather(b) @ w
    d = scatter(c.cos())
    e = scatter(c @ w)
    return a, exchange(d), e


def independent(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Nothing but their order relates them."""
    return reduce(x.sin()), reduce(x @ w), gather(x.cos()), scatter(w @ x), gather(w) @ x, reduce(x @ x)


def matmul_first(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The matmuls come long before their collectives."""
    p, q = x @ w, w @ x
    a = reduce(x.sin())
    b = scatter(q)
    c = reduce(p)
    return a, b, c


def read_early(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A product is read by an earlier collective: the fused op cannot hand it out before that."""
    p = x @ w
    early = reduce(p.sin())
    return early, reduce(p), p.cos(), reduce(w @ x)


def read_before_another(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A product is read before an earlier collective, which does not need it: the reader moves behind."""
    p = x @ w
    early = p.sin().sum(-1)
    other = reduce(x.cos())
    return early, other, scatter(p), reduce(w @ x)


def weight_late(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The gather starts before a collective that makes the weight."""
    gathered = gather(x)
    late = reduce(w.sin())
    return gathered @ late, reduce(x @ w)


def two_gathers(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A collective makes the weight of the second gather: one op for both would have to come behind it."""
    first = gather(x) @ w
    late = reduce(w.sin())
    return first, gather(x) @ late


def in_place(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w
    before = y + 1
    dist.all_reduce(y)
    z = y @ w
    dist.all_reduce(z)
    return before, y, z


PROGRAMS = [
    mixed, independent, matmul_first, read_early, read_before_another, weight_late, two_gathers, in_place,
]  # fmt: skip


def collectives(code: str) -> list[str]:
    """The collectives of a graph in the order of its code, a fused op as the collective that it holds."""
    found = []
    code = "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("#"))
    for namespace, name in re.findall(r"\b(_c10d_functional|autofuse)\.(\w+)", code):
        if namespace == "autofuse":
            name = next(
                kind for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all") if kind in name
            )
        name = _KIND.get(name, name).removesuffix("_single").removesuffix("_")
        if name != "wait_tensor":
            found.append(name)
    return found


@in_tiers(program=PROGRAMS, order=["direct", "ring"])
def test_the_sequence_is_kept(program: Program, order: str) -> None:
    with fake_group(2), autofuse.config.patch(policy="always", order=order):
        report = autofuse.explain(program)(torch.ones(8, 8), torch.ones(8, 8))
    assert report.fused, report
    for graph in report.graphs:
        assert collectives(str(graph.before)) == collectives(str(graph.after))
        assert len(collectives(str(graph.before))) == len(graph.sites)


def test_readers_move_behind_the_fused_op() -> None:
    """In a forward graph; in one for inference Inductor has moved them to where their results are read."""
    with fake_group(2), autofuse.config.patch(policy="always"):
        report = autofuse.explain(read_before_another)(torch.ones(8, 8, requires_grad=True), torch.ones(8, 8))
    graph = report.graphs[0]
    assert [site.fused for site in graph.sites] == [False, True, True], report
    assert collectives(str(graph.before)) == collectives(str(graph.after))
    assert str(graph.after).count("aten.mm") == 0, graph.after


def dropped_weight(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The weight would have to be known before the gather."""
    gathered = gather(x)
    return gathered @ (w * torch.rand_like(w)), torch.rand(3)


def dropped_weight_behind(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    gathered, noise = gather(x), torch.rand(3)
    return gathered @ (w * torch.rand_like(w)), noise


def dropped_weight_of_two(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The second gather would be computed with the first one."""
    first, noise = gather(x) @ w, torch.rand(3)
    return first, noise, gather(x) @ (w * torch.rand_like(w))


def read_early_with_noise(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The reader of the product would have to come behind the second collective."""
    p = x @ w
    early = p * torch.rand_like(p)
    other, noise = reduce(x.cos()), torch.rand(3)
    return early, other, reduce(p), noise


@pytest.mark.parametrize(
    ("program", "fused"),
    [
        (dropped_weight, [True]),
        (dropped_weight_behind, [False]),
        (dropped_weight_of_two, [True, True]),
        (read_early_with_noise, [False, True]),
    ],
)
def test_random_numbers_keep_their_sequence(program: Program, fused: list[bool]) -> None:
    """Where Inductor leaves them to torch: each draw depends on how many were drawn before."""
    draws = []
    with fake_group(2), autofuse.config.patch(policy="always"), inductor.patch(fallback_random=True):
        report = autofuse.explain(program)(torch.ones(8, 8), torch.ones(8, 8))
    for listing in (report.graphs[0].before, report.graphs[0].after):
        draws.append(re.findall(r"aten\.rand\w*", str(listing)))
    assert draws[0] == draws[1]
    assert sorted(set(draws[0])) == ["aten.rand", "aten.rand_like"]
    assert [site.fused for site in report.sites] == fused, report


def by_memory(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The less memory the others need beside the first one, the rather Inductor would run them before it."""
    large = reduce(x @ w)
    small, other = reduce(w[:, :16] @ x[:16]), reduce(w[:16] @ x.t()[:16].t())
    return small.sum(), other.sum(), (large.sin() + 1).sum()


@pytest.mark.parametrize("rows", [8, 512])
def test_generated_code_keeps_the_order_of_the_graph(rows: int) -> None:
    """Whatever the sizes, which may differ between ranks; calls are direct ones, and name no rank or way."""
    torch._dynamo.reset()
    with fake_group(2), autofuse.config.patch(policy="always"), torch.no_grad():
        x, w = torch.ones(rows, 16), torch.ones(16, rows)
        _, (code,) = run_and_get_code(torch.compile(by_memory, backend="autofuse"), x, w)
    calls = [line.partition(" = ")[2] for line in code.splitlines() if ".autofuse.direct." in line]
    assert [call.split("(")[0] for call in calls] == ["torch.ops.autofuse.direct.matmul_all_reduce_cpu"] * 3
    operands = [re.findall(r"arg\d_1", call) for call in calls]
    assert operands[0] == ["arg0_1", "arg1_1"] != operands[1], calls


def with_other_matmuls(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The gradients of weights in a backward graph stand so: no collective needs them."""
    first = reduce(x @ w)
    p = w @ x
    second = reduce(x.cos() @ w)
    q = x.sin() @ w
    return (first.sin() + 1).sum(), p, second.sum(), q.sum(), reduce(w.cos() @ x).sum()


def test_matmuls_keep_their_places_between_fused_ops() -> None:
    """Whatever the sizes. If one rank multiplied before a fused op and another one behind it, each would wait
    for the matmul of the other."""
    orders = []
    for rows in (8, 512):
        torch._dynamo.reset()
        with fake_group(2), autofuse.config.patch(policy="always"), torch.no_grad():
            x, w = torch.ones(rows, 16), torch.ones(16, rows)
            _, (code,) = run_and_get_code(torch.compile(with_other_matmuls, backend="autofuse"), x, w)
        orders.append(re.findall(r"extern_kernels\.mm|direct\.matmul_all_reduce", code))
    assert len(orders[0]) == 5
    assert orders[0] == orders[1]


def _numbers(rank: int, world: int, program: Program) -> None:
    torch._dynamo.reset()
    x, w = integers(rank, 8, 8) / 8, integers(9 + rank, 8, 8) / 8
    with torch.no_grad():
        expected, actual = program(x, w), torch.compile(program, backend=passes_only())(x, w)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("program", PROGRAMS)
def test_numbers(ranks: Ranks, program: Program) -> None:
    ranks(2).run(_numbers, program)
