"""What the tests of all_to_all_embedding_bag_backward run on ranks with GPUs."""

import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.embedding_on_gpus import on_device, problem_of, some_of
from tests.gpu.expected import capturable, group_of_all, poison
from tests.gpu.telling import about, first_wrong
from tests.ops.bags import Case, Inputs, arrange, doubled, inputs_of, pooled
from tests.ranks import fresh_group

if TYPE_CHECKING:
    from autofuse.lowering.gpu.embedding.ways import ExchangeProblem


def backward_problem(case: Case) -> "ExchangeProblem":
    from autofuse.lowering.gpu.embedding.ways import BACKWARD

    return replace(problem_of(case), op=BACKWARD)


def ways_of(case: Case) -> list[str]:
    from autofuse.lowering.gpu.choice.kernel import ways_of

    return list(ways_of(backward_problem(case)))


def kernels_of(case: Case) -> list[str]:
    return [way for way in ways_of(case) if way != "torch+nccl"]


def bag_gradients(case: Case, rank: int) -> list[Tensor]:
    """Of all bags of the tables of a rank, as they are exchanged."""
    generator = torch.Generator().manual_seed(rank)
    bags = case.b * len(case.dims)
    return [torch.randn(bags, d, generator=generator).to(case.wire) for d in case.dims[rank]]


def grad_on_device(case: Case, rank: int) -> Tensor:
    whole = [bag_gradients(case, r) for r in range(len(case.dims))]
    return arrange(case, whole, rank).contiguous().cuda()


def wanted(case: Case, rank: int) -> tuple[list[Tensor], int]:
    """Gradients of the tables in fp64, and the most terms that one row adds up."""
    weights, indices, offsets, samples = doubled(inputs_of(case, rank))
    weights = [w.requires_grad_() for w in weights]
    outputs = pooled(case, (weights, indices, offsets, samples))
    torch.autograd.backward(outputs, [g.double() for g in bag_gradients(case, rank)])
    most = max((int(i.long().bincount().max()) for i in indices if len(i)), default=0)
    return [w.grad.cuda() for w in weights if w.grad is not None], most


def call(
    way: str, case: Case, inputs: Inputs, grad: Tensor, group: str = "", keep: bool = False
) -> list[Tensor]:
    from autofuse.lowering.gpu.choice.kernel import ways_of
    from autofuse.lowering.gpu.embedding.call import tables_of
    from autofuse.lowering.gpu.embedding.run import exchange_backward
    from autofuse.lowering.gpu.memory.workspace import workspace_for
    from autofuse.lowering.ops.all_to_all_embedding_bag_backward import (
        AllToAllEmbeddingBagBackward,
        reference,
    )

    device = torch.device("cuda", torch.cuda.current_device())
    workspace = workspace_for(group or group_of_all().group_name, device)
    problem, tables = backward_problem(case), tables_of(*inputs, *case.options)
    found = ways_of(problem)[way]
    if found.fused:
        gradients = replace(tables, weights=[torch.empty_like(w) for w in tables.weights])
        results = exchange_backward(workspace, found, problem, gradients, grad, keep, "test")
        if results is not None:
            return results
    arguments = AllToAllEmbeddingBagBackward(
        grad=grad,
        indices=list(tables.indices),
        offsets=list(tables.offsets),
        per_sample_weights=list(tables.samples),
        num_embeddings=[w.shape[0] for w in tables.weights],
        dims=tables.dims,
        mode=tables.mode,
        include_last_offset=tables.last,
        padding_idx=tables.padding,
        dtype=tables.weights[0].dtype,
        sparse=[False] * len(tables.weights),
        columns=list(problem.columns),
        layout=problem.layout,
        keep_exchanged=keep,
        group_name=workspace.group_name,
        order="direct",
        site="test",
    )
    return reference(arguments)


def check(got: list[Tensor], case: Case, reference: tuple[list[Tensor], int]) -> str:
    """What is wrong with gradients of tables; empty if nothing is."""
    expected, terms = reference
    small = 8 * max(1, terms) * 4 * torch.finfo(torch.float32).eps
    for table, (found, want) in enumerate(zip(got, expected, strict=True)):
        found, want = found.double(), want.to(found.device)
        if (off := found.isnan()).any():
            return f"table {table}, not written: {first_wrong(found, want, off)}"
        over = (found - want).abs() / (torch.finfo(case.table).eps * want.abs() + small)
        if (off := over > 1).any():
            most = f"{float(over.max()):.2f} times the bound"
            return f"table {table}, {most}: {first_wrong(found, want, off)}"
    return ""


def all_ways(rank: int, world: int, case: Case, number: int | None = None) -> dict[str, str]:
    """What is wrong with each way, or with some: against fp64, and two runs against each other, one of which
    keeps G."""
    inputs, grad, reference = on_device(case, rank), grad_on_device(case, rank), wanted(case, rank)
    exchanged, found = torch.cat(bag_gradients(case, rank), 1), {}
    for way in ways_of(case) if number is None else some_of(kernels_of(case), number):
        with about(way):
            call(way, case, inputs, grad)
            poison()
            first = call(way, case, inputs, grad)
            *second, kept = call(way, case, inputs, grad, keep=True)
        # torch may round every sum to the dtype of the tables.
        ours = not way.startswith("torch")
        wrong = check(first, case, reference) if ours or case.table is torch.float32 else ""
        if not torch.equal(kept.cpu(), exchanged):
            wrong = wrong or "the exchanged gradient is another one"
        if ours and not all(map(torch.equal, first, second)):
            wrong = wrong or "other bits in another run"
        found[way] = wrong
    return found


def many_calls(rank: int, world: int, cases: list[Case], calls: int) -> str:
    """Calls of changing shapes and ways, back to back, rank 0 late now and then; the first that is wrong."""
    draw = random.Random(7)
    ready = [
        (c, on_device(c, rank), grad_on_device(c, rank), wanted(c, rank), some_of(kernels_of(c), number))
        for number, c in enumerate(cases)
    ]
    outputs = []
    for number in range(calls):
        case, inputs, grad, reference, ways = draw.choice(ready)
        way = draw.choice(ways)
        if rank == 0 and number % 50 == 0:
            torch.cuda._sleep(2_000_000)
            time.sleep(0.01)
        outputs.append((way, case, call(way, case, inputs, grad), reference))
        if len(outputs) == 50:
            for each, of, got, expected in outputs:
                if wrong := check(got, of, expected):
                    return f"call {number}, {each}, {of}: {wrong}"
            outputs = []
    return ""


def replayed(rank: int, world: int, case: Case, replays: int) -> str:
    """A captured graph of all ways, replayed, with an eager call in between; what is wrong."""
    inputs, grad, reference = on_device(case, rank), grad_on_device(case, rank), wanted(case, rank)
    ways = capturable(kernels_of(case))
    for way in ways:
        call(way, case, inputs, grad)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(way, case, inputs, grad) for way in ways]
    for _ in range(replays):
        for out in outputs:
            for each in out:
                each.fill_(float("nan"))
        graph.replay()
        call(ways[0], case, inputs, grad)
        for way, out in zip(ways, outputs, strict=True):
            if wrong := check(out, case, reference):
                return f"{way}: {wrong}"
    return ""


def bad_index(rank: int, world: int, case: Case) -> str:
    """Rank 1 has an index that its table has not; what a later check tells all. Nobody hangs."""
    import autofuse

    group = fresh_group()
    inputs = on_device(case, rank)
    if rank == 1:
        inputs[1][1][0] = 1 << 40
    call("strips", case, inputs, grad_on_device(case, rank), group)
    torch.cuda.synchronize()
    dist.barrier()
    time.sleep(1.5)  # in which the ranks tell each other
    try:
        autofuse.check(group)
    except RuntimeError as error:
        return str(error)
    return ""


def add_fused_points(case: Case) -> None:
    """From now on the group runs calls like those of the case in kernels of ours, both ways."""
    from autofuse.lowering.gpu.choice.choose import add_points
    from autofuse.lowering.gpu.choice.points import Point
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    device = torch.device("cuda", torch.cuda.current_device())
    forward = Point.of(problem_of(case), {"bags": 1.0})
    backward = Point.of(backward_problem(case), {"strips": 1.0})
    add_points(workspace_for(group_of_all().group_name, device), (forward, backward))


def training_step(rank: int, world: int, case: Case) -> str:
    """Forward and backward of the op through autograd; what is wrong with the gradients."""
    add_fused_points(case)
    weights, *rest = on_device(case, rank)
    weights = [w.requires_grad_() for w in weights]
    y = torch.ops.autofuse.embedding_bag_all_to_all(
        weights, *rest, *case.options, case.wire, case.columns, case.layout, group_of_all().group_name,
        "direct", "test",
    )  # fmt: skip
    y.backward(grad_on_device(case, rank))
    return check([w.grad for w in weights if w.grad is not None], case, wanted(case, rank))


def compiled_step(rank: int, world: int, case: Case) -> tuple[str, list[str]]:
    """As `training_step`, of a compiled program that knows no autofuse; and the ops of its sites."""
    import torch.distributed._functional_collectives as funcol

    import autofuse

    torch._dynamo.reset()
    add_fused_points(case)
    weights, indices, offsets, _ = on_device(case, rank)
    weights = [w.requires_grad_() for w in weights]
    grad = grad_on_device(case, rank).view(case.b * world, -1)

    def step(weights: list[Tensor], indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        bags = [F.embedding_bag(*each, mode="sum") for each in zip(indices, weights, offsets, strict=True)]
        parts = [case.b] * world
        y = funcol.all_to_all_single_autograd(torch.cat(bags, 1), parts, parts, group_of_all())
        return (y.float() * grad.float()).sum()

    with autofuse.debug() as report:
        torch.compile(step, backend="autofuse")(weights, indices, offsets).backward()
    wrong = check([w.grad for w in weights if w.grad is not None], case, wanted(case, rank))
    return wrong, sorted(site.op or "" for site in report.fused)
