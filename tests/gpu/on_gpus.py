"""What tests run on ranks with GPUs."""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import ProcessGroup

import autofuse
from tests.ranks import ONE_GPU, fresh_group

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

    from autofuse.timeline import Timeline

MOST_ERROR = 4e-3  # of bfloat16, whose roundings are 2**-9 each: of the partial sums and of the result


def group_of_all() -> ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None, "this process has joined no group"
    return group


def capturable(ways: Sequence[str]) -> list[str]:
    """Those that a CUDA graph can hold: ranks on one GPU have no NCCL."""
    return [way for way in ways if not (ONE_GPU and "nccl" in way)]


def runnable(ways: Sequence[str]) -> list[str]:
    """Those that these ranks can run: on one GPU none of copy engines, and none of torch's of several
    streams."""
    from autofuse.lowering.gpu.dense.ways import ASYNC_TP

    return [way for way in ways if not (ONE_GPU and ("copied=1" in way or way == ASYNC_TP))]


def operands(
    op: str, m: int, k: int, n: int, rank: int, world: int, transposed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x (a gather's part) and w, other ones on every rank."""
    torch.manual_seed(1000 * rank + m + n)
    rows = m // world if op == "all_gather_matmul" else m
    x = torch.randn(rows, k, device="cuda", dtype=dtype)
    w = torch.randn((n, k) if transposed else (k, n), device="cuda", dtype=dtype) / math.sqrt(k)
    return x, w.t() if transposed else w


def reference(op: str, x: Tensor, w: Tensor, outer: int = 1, dim: int = 0) -> Tensor:
    """In fp64, from partial products that are rounded as the collective takes them."""
    from autofuse.lowering.reference.layout import parts, whole

    world, rank = dist.get_world_size(), dist.get_rank()
    if op == "all_gather_matmul":
        gathered = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(gathered, x)
        return whole(torch.stack(gathered), 0, outer).double() @ w.double()
    total = (x.double() @ w.double()).to(x.dtype).double()
    if op == "matmul_all_gather":
        products = [torch.empty_like(total) for _ in range(world)]
        dist.all_gather(products, total)
        return whole(torch.stack(products), dim, outer)
    dist.all_reduce(total)
    return total if op == "matmul_all_reduce" else parts(total, dim, outer, world)[rank]


def error_of(found: Tensor, wanted: Tensor) -> float:
    assert not found.isnan().any(), "something was not written"
    assert found.shape == wanted.shape
    return float((found.double() - wanted).norm() / wanted.norm())


def poison() -> None:
    """All that the workspace's kernels do not read before it is written becomes NaN."""
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    device = torch.device("cuda", torch.cuda.current_device())
    memory = workspace_for(group_of_all().group_name, device).memory
    torch.cuda.synchronize()
    dist.barrier()
    for region in (memory.inbox, memory.finished, memory.copies, memory.products):
        region.views[memory.rank].fill_(255)
    memory.outbox.fill_(255)
    memory.pieces.fill_(math.nan)
    torch.cuda.synchronize()
    dist.barrier()


def every_result(way: str, op: str, given: tuple[Any, ...]) -> list[list[Tensor]]:
    """What an op returns in a way: in calls back to back, and in replays of a CUDA graph that holds one."""
    from autofuse.lowering.gpu import by_name

    by_name.run(way, op, given)  # grows the workspace if need be
    poison()
    results = [by_name.run(way, op, given) for _ in range(3)]
    if capturable([way]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(by_name.run(way, op, given))
        for _ in range(2):
            for t in results[-1]:
                t.fill_(torch.nan)
            graph.replay()
        torch.cuda.synchronize()  # before the graph is freed
    return results


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
    """A product that torch computes, of `x: [m, .]`, and a tail behind its sum over the ranks."""

    text: str
    keep: bool = False
    terms: int = 1
    dtype: torch.dtype = torch.bfloat16
    tail: str = ""

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
            return [left], [right.t()], [torch.ones((), device="cuda") for _ in range(2)]
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


class Block(torch.nn.Module):
    """A tensor-parallel MLP as plain code writes it."""

    def __init__(self, width: int, hidden: int, world: int, group_name: "GroupName") -> None:
        super().__init__()
        self.group_name = group_name
        self.up = torch.nn.Linear(width, hidden // world, bias=False)
        self.down = torch.nn.Linear(hidden // world, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.silu(self.up(x))
        return funcol.all_reduce(self.down(y), "sum", self.group_name)


def vocabulary(rank: int, world: int) -> tuple[float, list[str | None]]:
    """A compiled model against the same model in eager mode: its error, and the ops that were fused.

    The model reads an embedding whose table is sharded by rows. Then it multiplies, scales, casts to float32
    and reduces."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    group, rows, columns = fresh_group(), 1000, 512
    table = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(columns, columns, device="cuda", dtype=torch.bfloat16) / math.sqrt(columns)

    def model(ids: Tensor) -> tuple[Tensor, Tensor]:
        theirs = (ids < rank * rows) | (ids >= (rank + 1) * rows)
        local = (ids - rank * rows).masked_fill(theirs, 0)
        found = torch.nn.functional.embedding(local, table).masked_fill(theirs[..., None], 0)
        x = funcol.all_reduce(found, "sum", group)
        y = (x.flatten(0, 1) @ w * 0.5).float()
        return funcol.all_reduce(y, "sum", group), y

    run, worst = torch.compile(model, backend="autofuse", options={"policy": "always"}), 0.0
    with autofuse.debug() as report, torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            ids = torch.randint(0, world * rows, (4, 16), device="cuda")
            for found, wanted in zip(run(ids), model(ids), strict=True):
                worst = max(worst, error_of(found, wanted.double()))
    return worst, [site.op for site in report.fused]


def compiled(rank: int, world: int, mode: str | None, dynamic: bool) -> tuple[float, int]:
    """Error of a compiled model against eager over several token counts, and how many sites were fused.

    The group is new: its workspace is made, and grows, while the model runs.
    """

    torch._dynamo.reset()
    torch.manual_seed(rank)
    model = Block(512, 2048, world, fresh_group()).cuda().bfloat16()
    run = torch.compile(model, backend="autofuse", mode=mode, dynamic=dynamic)
    worst, tokens = 0.0, (7, 64, 300, 1024) if dynamic else (64,)
    # Calls this short are fused only where they are captured: by Inductor, or as somebody says.
    with autofuse.debug() as report, torch.no_grad():
        for m in (*tokens, *tokens):
            torch.manual_seed(m)
            x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
            dist.broadcast(x, 0)
            for _ in range(3):
                found = run(x).clone()
            worst = max(worst, error_of(found, model(x).double()))
    return worst, len(report.fused)


def _gradients(model: torch.nn.Module) -> list[Tensor]:
    """Of all parameters, each of which has one."""
    found = []
    for p in model.parameters():
        assert p.grad is not None
        found.append(p.grad)
    return found


def trained(rank: int, world: int) -> float:
    """Gradients of a compiled, checkpointed model against eager; the largest error."""
    from torch.utils.checkpoint import checkpoint

    torch._dynamo.reset()
    torch.manual_seed(rank)
    model = Block(512, 2048, world, group_of_all().group_name).cuda().bfloat16()

    def step(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model, x, use_reentrant=False)
        return (y.float() ** 2).mean()

    torch.manual_seed(99)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    step(x).backward()
    wanted = [g.double() for g in _gradients(model)]
    model.zero_grad()
    torch.compile(step, backend="autofuse")(x).backward()
    return max(error_of(found, g) for found, g in zip(_gradients(model), wanted, strict=True))


def with_biases(rank: int, world: int, m: int) -> float:
    """Weights of different widths, with biases or some, and the gathered X or not; the largest error of every
    way."""
    from autofuse.lowering.gpu.choice.kernel import ways_of as by_name
    from autofuse.lowering.gpu.dense.run import Gather, of_weights, problem_of
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    x, wide = operands("all_gather_matmul", m, 512, 1024, rank, world, True, torch.bfloat16)
    _, tall = operands("all_gather_matmul", m, 512, 1032, rank, world, False, torch.bfloat16)
    gathered = reference("all_gather_matmul", x, torch.eye(512, device="cuda", dtype=torch.bfloat16))
    workspace = workspace_for(group_of_all().group_name, x.device)
    cases = [
        ((wide, wide[:, :136], wide[:, 64:400]), (True, True, True)),
        ((tall[:, :136], tall, tall[:, 8:], tall[:, :8], tall), (False,) * 5),  # the last one is late
        ((wide, wide), (True, False)),
        ((wide, wide), (False, True)),
        ((tall, wide[:, 16:]), (True, True)),  # laid out otherwise
    ]
    worst = 0.0
    for w, biased in cases:
        biases = [
            torch.randn(wi.shape[1], device="cuda", dtype=torch.bfloat16) if b else None
            for wi, b in zip(w, biased, strict=True)
        ]
        problem = of_weights(problem_of("all_gather_matmul", x, w[0], workspace), w, biases)
        wanted = [gathered @ wi.double() for wi in w]
        wanted = [p if b is None else p + b.double() for p, b in zip(wanted, biases, strict=True)]
        for name, way in by_name(problem).items():
            for keep in (True, False):
                more = keep or len(w) > len(problem.columns)
                gather = Gather(
                    workspace, way, problem, w[0].stride(), more, keep, f"test {len(w)}", biased=biased[0]
                )
                gather(x, w, biases)  # grows the workspace if need be
                poison()
                outputs = gather(x, w, biases)
                if keep:
                    assert torch.equal(outputs.pop().double(), gathered), name
                worst = max(worst, *map(error_of, outputs, wanted))
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
