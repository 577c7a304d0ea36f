"""Calls of the dense ops that tests run on ranks with GPUs: each way, many calls, streams, updates, times."""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .expected import capturable, error_of, every_result, group_of_all, operands, poison, reference, runnable

if TYPE_CHECKING:
    from autofuse.timeline import Timeline


def run_way(
    way: str, op: str, x: Tensor, w: Tensor, outer: int = 1, dim: int = 0, order: str = "direct",
    terms: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    """terms: lengths of K into which x and w are cut, whose products a reduction adds up."""
    from autofuse.lowering.gpu.dense.plain import run
    from autofuse.lowering.gpu.dense.run import problem_of
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    workspace = workspace_for(group_of_all().group_name, x.device)
    problem = replace(problem_of(op, x, w, workspace, dim, outer), terms=terms)
    return run(workspace, way, problem, x, w, order, "test")


def ways_of(
    op: str, x: Tensor, w: Tensor, outer: int = 1, dim: int = 0, copied: bool = False,
    terms: tuple[int, ...] = (),
) -> list[str]:  # fmt: skip
    """All, or those of copy engines. Ranks that share a GPU have neither these nor torch's of several
    streams."""
    from autofuse.lowering.gpu.choice.kernel import ways_of as by_name
    from autofuse.lowering.gpu.dense.run import problem_of
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    workspace = workspace_for(group_of_all().group_name, x.device)
    found = by_name(replace(problem_of(op, x, w, workspace, dim, outer), terms=terms))
    taken = [way for way in found.values() if not (workspace.serial and (way.is_copied or way.by_streams))]
    return [way.name for way in taken if way.is_copied or not copied]


def all_ways(
    rank: int,
    world: int,
    op: str,
    m: int,
    k: int,
    n: int,
    outer: int,
    dim: int,
    transposed: bool,
    dtype: torch.dtype,
    terms: tuple[int, ...] = (),
) -> dict[str, tuple[float, bool]]:
    """Of every way: its error, and whether two runs gave the same bits (on all ranks, where all get
    the same)."""
    x, w = operands(op, m, k, n, rank, world, transposed, dtype)
    wanted = reference(op, x, w, outer, dim)
    found = {}
    for way in ways_of(op, x, w, outer, dim, terms=terms):
        run_way(way, op, x, w, outer, dim, terms=terms)  # grows the workspace if need be
        poison()
        first = run_way(way, op, x, w, outer, dim, terms=terms)
        second = run_way(way, op, x, w, outer, dim, terms=terms)
        same = torch.equal(first, second)
        if op in ("matmul_all_reduce", "matmul_all_gather"):
            other = first.clone()
            dist.broadcast(other, 0)
            same = same and torch.equal(first, other)
        found[way] = error_of(first, wanted), same
    return found


def sums(rank: int, world: int, op: str, m: int, n: int, terms: tuple[int, ...]) -> float:
    """The error of a sum of matmuls, as graphs call the op."""
    x, w = operands(op, m, sum(terms), n, rank, world, False, torch.bfloat16)
    place = (0, 1) if op == "matmul_reduce_scatter" else ()
    out = getattr(torch.ops.autofuse, op)(
        [t.contiguous() for t in x.split(terms, 1)], list(w.split(terms)), [], "mm", "sum", *place, False,
        [], "", "", group_of_all().group_name, "direct", "sums",
    )[0]  # fmt: skip
    return error_of(out, reference(op, x, w))


def staged(rank: int, world: int, op: str, text: str, m: int, k: int, n: int) -> dict[str, float]:
    """Each rank adds a row of its own to its product, or scales it; the error of every way."""
    from autofuse.lowering.gpu import by_name

    x, w = operands(op, m, k, n, rank, world, True, torch.bfloat16)
    torch.manual_seed(300 + rank)
    row = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    total = x.double() @ w.double()
    total = total + row.double() if "%0" in text else total / 3
    dist.all_reduce(total)
    if op == "matmul_reduce_scatter":
        total = total.chunk(world)[rank]
    place = (0, 1) if op == "matmul_reduce_scatter" else ()
    found: dict[str, float] = {}
    for bias in (row, torch.cat([row[:1], row])[1:]):  # the second begins at an odd element
        given = (
            [x], [w], [bias] * ("%0" in text), text, "sum", *place, False, [], "", "",
            group_of_all().group_name, "direct", "staged",
        )  # fmt: skip
        for way in runnable(by_name.names(op, given, True)):
            for (out,) in every_result(way, op, given):
                found[way] = max(found.get(way, 0.0), error_of(out, total))
    return found


@dataclass(frozen=True)
class Made:
    """A product that torch computes, of `x: [m, .]`, and a tail behind its sum over the ranks. by_rows: a
    float8 product has a scale for each row of x and column of w."""

    text: str
    keep: bool = False
    terms: int = 1
    dtype: torch.dtype = torch.bfloat16
    tail: str = ""
    by_rows: bool = False

    def factors(self, rank: int, m: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """x, w, and operands."""
        torch.manual_seed(70 * rank + m)
        k, n = 264, 1528

        def new(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=self.dtype)

        if self.text.startswith("rows"):
            places = torch.randint(0, 100, (m, 1), device="cuda")
            return [places], [new(100, n)], [places % 2 == rank % 2]
        if self.text.startswith("scaled_mm"):
            wide = [torch.randn(rows, 256, device="cuda") for rows in (m, n + 8)]
            left, right = (t.to(torch.float8_e4m3fn) for t in wide)
            scales = ((m, 1), (1, n + 8)) if self.by_rows else ((), ())
            return [left], [right.t()], [torch.rand(shape, device="cuda") + 0.5 for shape in scales]
        x, w = ([new(*shape) for _ in range(self.terms)] for shape in ((m, k), (k, n)))
        return x, w, [new(m, n)]


def made(rank: int, world: int, op: str, m: int, of: Made) -> dict[str, float]:
    """The largest error of each way. The output of `keep_product` must have the bits that torch computes."""
    from autofuse.lowering.gpu import by_name
    from autofuse.lowering.reference.product import with_kept
    from autofuse.lowering.reference.tail import tail_reference

    x, w, more = of.factors(rank, m)
    product, kept = with_kept(x, w, more, of.text)
    total = product.double()
    dist.all_reduce(total)
    if op == "matmul_reduce_scatter":
        total = total.chunk(world)[rank]
    behind = [total.new_ones(total.shape[1]).to(product.dtype)] if of.tail else []
    wanted = tail_reference(total, behind, of.tail)
    place = (0, 1) if op == "matmul_reduce_scatter" else ()
    given = (
        x, w, more, of.text, "sum", *place, of.keep, behind, of.tail, "", group_of_all().group_name,
        "direct", "made",
    )  # fmt: skip
    found: dict[str, float] = {}
    for way in by_name.names(op, given, True):
        for results in every_result(way, op, given):
            if of.keep:
                assert torch.equal(results.pop(), kept), way
            errors = [error_of(got, exact) for got, exact in zip(results, wanted, strict=True)]
            found[way] = max(found.get(way, 0.0), *errors)
    for _ in range(4):  # as a model calls it, from the second call on the short way
        results = getattr(torch.ops.autofuse, op)(*given)
        assert not of.keep or torch.equal(results.pop(), kept)
        found["auto"] = max(found.get("auto", 0.0), error_of(results[0], wanted[0]))
    return found


def orders(rank: int, world: int, op: str, m: int, k: int, n: int) -> dict[str, float]:
    x, w = operands(op, m, k, n, rank, world, False, torch.bfloat16)
    wanted = reference(op, x, w)
    ways = [way for way in ways_of(op, x, w) if way.startswith("tiles")]
    assert ways
    return {
        f"{order} {way}": error_of(run_way(way, op, x, w, order=order), wanted)
        for order in ("direct", "ring", "oblivious")
        for way in ways[:2]
    }


def many_calls(
    rank: int, world: int, calls: int, straggler: int, sizes: Sequence[int], n: int, copied: bool
) -> float:
    """Calls of changing shapes and ways, back to back, one rank late now and then; the largest error."""
    draw = random.Random(7)
    cases = []
    for op in ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_gather"):
        for m in sizes:
            if m == 1 and op != "matmul_all_reduce":
                continue
            if m % world:
                m += world - m % world
            x, w = operands(op, m, 264, n, rank, world, m % 3 == 0, torch.bfloat16)
            cases += [(way, op, x, w, reference(op, x, w)) for way in ways_of(op, x, w, copied=copied)]
    worst = torch.zeros((), device="cuda", dtype=torch.float64)
    for call in range(calls):
        way, op, x, w, wanted = draw.choice(cases)
        if call % 50 == 0 and rank == straggler:
            torch.cuda._sleep(2_000_000)
            time.sleep(0.01)
        found = run_way(way, op, x, w)
        worst = torch.maximum(worst, (found.double() - wanted).norm() / wanted.norm())
    return float(worst)


def replayed(rank: int, world: int, replays: int, problems: Sequence[tuple[str, int]], copied: bool) -> float:
    """A captured graph of an odd number of calls of every op, replayed; the largest error of each replay."""
    cases, outputs = [], []
    for op, m in problems:
        x, w = operands(op, m, 512, 1024, rank, world, False, torch.bfloat16)
        ways = capturable(ways_of(op, x, w, copied=copied))
        cases += [(way, op, x, w, reference(op, x, w)) for way in ways]
    for way, op, x, w, _ in cases:
        run_way(way, op, x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [run_way(way, op, x, w) for way, op, x, w, _ in cases]
    worst = 0.0
    for _ in range(replays):
        for out in outputs:
            out.fill_(math.nan)
        graph.replay()
        way, op, x, w, wanted = cases[3]
        worst = max(worst, error_of(run_way(way, op, x, w), wanted))  # eager calls in between
        worst = max(worst, *(error_of(out, case[4]) for out, case in zip(outputs, cases, strict=True)))
    return worst


def updated(rank: int, world: int, calls: int) -> float:
    """Shapes by turns, whose tiles are added where those of others have been; the largest error."""
    from autofuse import config

    op, cases = "matmul_reduce_scatter", []
    for m, n in ((1024, 2048), (2056, 1528), (4096, 4096)):
        x, w = operands(op, m, 264, n, rank, world, False, torch.bfloat16)
        cases.append((x, w, reference(op, x, w)))
    worst = 0.0
    with config.patch(update=True):
        for call in range(calls):
            x, w, wanted = cases[call % 3]
            (way,) = (way for way in ways_of(op, x, w) if "update=1" in way)
            found = run_way(way, op, x, w)
            if call % 2:  # else back to back
                worst = max(worst, error_of(found, wanted))
                run_way("clusters", op, x, w)  # stores where it likes
    return worst


def on_streams(rank: int, world: int) -> float:
    """Calls on two streams by turns; the library orders them."""
    x, w = operands("matmul_all_reduce", 512, 512, 1024, rank, world, False, torch.bfloat16)
    wanted = reference("matmul_all_reduce", x, w)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    torch.cuda.synchronize()
    for call in range(40):
        with torch.cuda.stream(streams[call % 2]):
            outputs.append(
                torch.ops.autofuse.matmul_all_reduce(
                    [x], [w], [], "mm", "sum", False, [], "", "", group_of_all().group_name, "direct", "s"
                )[0]
            )
    torch.cuda.synchronize()
    return max(error_of(out, wanted) for out in outputs)


def in_pairs(rank: int, world: int) -> float:
    """Groups of two ranks side by side."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    group = groups[rank // 2]
    torch.manual_seed(rank)
    worst = 0.0
    for m in (4, 640):
        x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
        wanted = (x.double() @ w.double()).to(x.dtype).double()
        dist.all_reduce(wanted, group=group)
        for _ in range(20):
            out = torch.ops.autofuse.matmul_all_reduce(
                [x], [w], [], "mm", "sum", False, [], "", "", group.group_name, "direct", "p"
            )[0]
        worst = max(worst, error_of(out, wanted))
    return worst


def traced(rank: int, world: int, op: str) -> "Timeline":
    from autofuse.lowering.gpu.dense.trace import record
    from autofuse.timeline import read

    return read(rank, record(op, 2048, 1024, 2048, torch.bfloat16, "direct").tolist())


def tma_less(rank: int, world: int) -> float:
    """Odd sizes, which no TMA loads: the unfused way answers."""
    x, w = operands("matmul_all_reduce", 5, 33, 77, rank, world, False, torch.bfloat16)
    out = torch.ops.autofuse.matmul_all_reduce(
        [x], [w], [], "mm", "sum", False, [], "", "", group_of_all().group_name, "direct", "t"
    )[0]
    return error_of(out, reference("matmul_all_reduce", x, w))


def measured(rank: int, world: int) -> tuple[tuple[tuple[str, float], ...], str]:
    """What measuring a problem finds, and what is chosen then."""
    from autofuse.lowering.gpu.choice.choose import add_points, chosen
    from autofuse.lowering.gpu.choice.measure import measure
    from autofuse.lowering.gpu.dense.measure import trials
    from autofuse.lowering.gpu.dense.run import problem_of
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    x, w = operands("matmul_all_reduce", 256, 512, 1024, rank, world, False, torch.bfloat16)
    workspace = workspace_for(group_of_all().group_name, x.device)
    problem = problem_of("matmul_all_reduce", x, w, workspace)
    point = measure(workspace, problem, trials)
    add_points(workspace, (replace(point, times=point.times),))
    return point.times, chosen(problem, workspace).name
