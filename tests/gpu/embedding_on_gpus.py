"""What the tests of embedding_bag_all_to_all run on ranks with GPUs."""

import random
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.expected import capturable, group_of_all, poison
from tests.gpu.telling import about, first_wrong
from tests.ops.bags import Case, Inputs, arrange, bound, doubled, inputs_of, pooled
from tests.ranks import fresh_group

if TYPE_CHECKING:
    from autofuse.lowering.gpu.embedding.ways import ExchangeProblem


def wanted(case: Case, rank: int) -> Tensor:
    """In fp64, on the GPU."""
    whole = [pooled(case, doubled(inputs_of(case, r))) for r in range(len(case.dims))]
    return arrange(case, whole, rank).cuda()


def on_device(case: Case, rank: int) -> Inputs:
    weights, indices, offsets, samples = ([t.cuda() for t in kind] for kind in inputs_of(case, rank))
    return weights, indices, offsets, samples


def call(way: str, case: Case, inputs: Inputs, group: str = "") -> Tensor:
    from autofuse.lowering.gpu.choice.kernel import ways_of
    from autofuse.lowering.gpu.embedding.call import tables_of
    from autofuse.lowering.gpu.embedding.run import exchange
    from autofuse.lowering.gpu.memory.workspace import workspace_for
    from autofuse.lowering.ops.embedding_bag_all_to_all import EmbeddingBagAllToAll, reference

    device = torch.device("cuda", torch.cuda.current_device())
    workspace = workspace_for(group or group_of_all().group_name, device)
    problem, tables = problem_of(case), tables_of(*inputs, *case.options)
    found = ways_of(problem)[way]
    if found.fused:
        out = exchange(workspace, found, problem, tables, "test")
        if out is not None:
            return out
    arguments = EmbeddingBagAllToAll(
        weights=list(tables.weights),
        indices=list(tables.indices),
        offsets=list(tables.offsets),
        per_sample_weights=list(tables.samples),
        mode=tables.mode,
        include_last_offset=tables.last,
        padding_idx=tables.padding,
        dtype=problem.dtype,
        columns=list(problem.columns),
        layout=problem.layout,
        group_name=workspace.group_name,
        order="direct",
        site="test",
    )
    return reference(arguments)


def problem_of(case: Case) -> "ExchangeProblem":
    from autofuse.lowering.gpu.embedding.ways import ExchangeProblem

    programs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return ExchangeProblem(case.b, tuple(case.columns), case.layout, case.wire, programs)


def ways_of(case: Case) -> list[str]:
    from autofuse.lowering.gpu.choice.kernel import ways_of

    return list(ways_of(problem_of(case)))


def kernels_of(case: Case) -> list[str]:
    return [way for way in ways_of(case) if way != "torch+nccl"]


def check(got: Tensor, case: Case, reference: Tensor) -> str:
    """What is wrong with a result; empty if nothing is."""
    got = got.double().view(reference.shape)
    if (off := got.isnan()).any():
        return f"not written: {first_wrong(got, reference, off)}"
    over = (got - reference).abs() / bound(case, reference)
    if float(over.max()) <= 1:
        return ""
    return f"{float(over.max()):.2f} times the bound: {first_wrong(got, reference, over > 1)}"


def some_of(ways: list[str], number: int) -> list[str]:
    """Two of them, other ones for every number: each is compiled for each kind of tables."""
    return [ways[(2 * number + i) % len(ways)] for i in range(min(2, len(ways)))]


def all_ways(rank: int, world: int, case: Case, number: int | None = None) -> dict[str, str]:
    """What is wrong with each way, or with some: against fp64, and two runs against each other."""
    inputs, reference, found = on_device(case, rank), wanted(case, rank), {}
    for way in ways_of(case) if number is None else some_of(kernels_of(case), number):
        with about(way):
            call(way, case, inputs)
            poison()
            first, second = call(way, case, inputs), call(way, case, inputs)
        same = torch.equal(first, second) or way.startswith("torch")
        found[way] = check(first, case, reference) or ("" if same else "other bits in another run")
    return found


def many_calls(rank: int, world: int, cases: list[Case], calls: int) -> str:
    """Calls of changing shapes and ways, back to back, rank 0 late now and then; the first that is wrong."""
    draw = random.Random(7)
    ready = [
        (c, on_device(c, rank), wanted(c, rank), some_of(kernels_of(c), number))
        for number, c in enumerate(cases)
    ]
    outputs = []
    for number in range(calls):
        case, inputs, reference, ways = draw.choice(ready)
        way = draw.choice(ways)
        if rank == 0 and number % 50 == 0:
            torch.cuda._sleep(2_000_000)
            time.sleep(0.01)
        outputs.append((way, case, call(way, case, inputs), reference))
        if len(outputs) == 50:
            for each, of, got, expected in outputs:
                if wrong := check(got, of, expected):
                    return f"call {number}, {each}, {of}: {wrong}"
            outputs = []
    return ""


def replayed(rank: int, world: int, case: Case, replays: int) -> str:
    """A captured graph of all ways, also at addresses that they have not seen, replayed; what is wrong."""
    inputs, reference = on_device(case, rank), wanted(case, rank)
    weights, indices, offsets, samples = ([t.clone() for t in kind] for kind in inputs)
    others = weights, indices, offsets, samples  # at other addresses
    ways = capturable(kernels_of(case))
    for way in ways:
        call(way, case, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(way, case, which) for way in ways for which in (inputs, others)]
    for _ in range(replays):
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        call(ways[0], case, inputs)  # an eager one in between
        for number, out in enumerate(outputs):
            if wrong := check(out, case, reference):
                return f"{ways[number // 2]}: {wrong}"
    return ""


def bad_index(rank: int, world: int, case: Case) -> str:
    """Rank 1 has an index that its table has not; what a later check tells all. Nobody hangs."""
    import autofuse

    group = fresh_group()
    inputs = on_device(case, rank)
    if rank == 1:
        inputs[1][1][0] = 1 << 40
    call("bags", case, inputs, group)
    torch.cuda.synchronize()
    dist.barrier()
    time.sleep(1.5)  # in which the ranks tell each other
    try:
        autofuse.check(group)
    except RuntimeError as error:
        return str(error)
    return ""


def op(rank: int, world: int, case: Case) -> str:
    """`torch.ops.autofuse`, with a table of ways that says to fuse."""
    from autofuse.lowering.gpu.choice.choose import add_points
    from autofuse.lowering.gpu.choice.points import Point
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    device = torch.device("cuda", torch.cuda.current_device())
    workspace = workspace_for(group_of_all().group_name, device)
    add_points(workspace, (Point.of(problem_of(case), {"bags": 1.0}),))
    got = torch.ops.autofuse.embedding_bag_all_to_all(
        *on_device(case, rank), *case.options, case.wire, case.columns, case.layout,
        group_of_all().group_name, "direct", "test",
    )  # fmt: skip
    return check(got, case, wanted(case, rank))
