"""What the tests of all_to_all_embedding_bag_update run on ranks with GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.gpu.backward_on_gpus import bag_gradients, grad_on_device, wanted
from tests.gpu.embedding_on_gpus import on_device, problem_of, some_of
from tests.gpu.expected import capturable, group_of_all
from tests.gpu.telling import about, first_wrong
from tests.ops.bags import Case

if TYPE_CHECKING:
    from autofuse.lowering.gpu.embedding.ways import ExchangeProblem

LR, EPS = 0.125, 1e-3


def update_problem(case: Case) -> ExchangeProblem:
    from autofuse.lowering.gpu.embedding.ways import UPDATE

    return replace(problem_of(case), op=UPDATE)


def ways_of(case: Case) -> list[str]:
    from autofuse.lowering.gpu.choice.kernel import ways_of

    return list(ways_of(update_problem(case)))


def kernels_of(case: Case) -> list[str]:
    return [way for way in ways_of(case) if way != "torch+nccl"]


@dataclass
class Tables:
    """Tables of this rank, with what they learn from."""

    weights: list[Tensor]
    states: list[Tensor]
    rates: list[Tensor]
    rest: list[list[Tensor]]

    @classmethod
    def of(cls, case: Case, rank: int, rowwise: bool) -> Tables:
        weights, *rest = on_device(case, rank)
        states = [torch.linspace(0, 2, len(w), device=w.device) for w in weights] if rowwise else []
        return cls(weights, states, [torch.tensor([LR, EPS], device="cuda") for _ in weights], rest)

    def copy(self) -> Tables:
        return replace(
            self, weights=[w.clone() for w in self.weights], states=[s.clone() for s in self.states]
        )

    def arguments(self, case: Case, grad: Tensor, keep: bool = False) -> tuple[Any, ...]:
        group = group_of_all().group_name
        return (
            self.weights, self.states, self.rates, grad, *self.rest, *case.options, case.columns, case.layout,
            keep, group, "direct", "test",
        )  # fmt: skip

    def call(self, way: str, case: Case, grad: Tensor, keep: bool = False) -> Tensor:
        from autofuse.lowering.gpu.by_name import run
        from autofuse.lowering.gpu.embedding.ways import UPDATE

        found: Tensor = run(way, UPDATE, self.arguments(case, grad, keep))
        return found

    @property
    def all(self) -> list[Tensor]:
        return [*self.weights, *self.states]


def check(got: Tables, before: Tables, case: Case, reference: tuple[list[Tensor], int]) -> str:
    """What is wrong with updated tables; empty if nothing is."""
    gradients, terms = reference
    small = 8 * max(1, terms) * 4 * torch.finfo(torch.float32).eps
    for t, grad in enumerate(gradients):
        indices = before.rest[0][t].long()
        touched = torch.zeros(len(grad), dtype=torch.bool, device=grad.device)
        touched[indices[indices != case.padding]] = True
        old, found = before.weights[t].double(), got.weights[t].double()
        if not torch.equal(found[~touched], old[~touched]):
            return f"table {t}: rows that no bag names have changed"
        lr, eps = before.rates[t].double()
        step = lr.expand(len(old))
        if before.states:
            state = before.states[t].double() + grad.square().sum(1) / max(1, grad.shape[1])
            step = lr / (state.sqrt() + eps)
            over = (got.states[t].double() - state).abs() / (1e-4 * state + small)
            over[~touched] = (got.states[t] - before.states[t])[~touched].double().abs() * 1e9
            if (off := ~(over <= 1)).any():  # NaN is off, too
                return f"the state of table {t}: {first_wrong(got.states[t].double(), state, off)}"
        want = torch.where(touched[:, None], old - step[:, None] * grad, old)
        # One rounding of the row, errors of sums, and of a root and a quotient.
        bound = torch.finfo(case.table).eps * want.abs() + step[:, None] * (small + 1e-4 * grad.abs())
        over = (found - want).abs() / (bound + 1e-7)
        if (off := ~(over <= 1)).any():
            most = f"{float(over.max()):.2f} times the bound"
            return f"table {t}, {most}: {first_wrong(found, want, off)}"
    return ""


def all_ways(rank: int, world: int, case: Case, rowwise: bool, number: int | None = None) -> dict[str, str]:
    """What is wrong with each way, or with some: against fp64, and two runs against each other."""
    before, grad, reference = Tables.of(case, rank, rowwise), grad_on_device(case, rank), wanted(case, rank)
    exchanged, found = torch.cat(bag_gradients(case, rank), 1), {}
    for way in ways_of(case) if number is None else some_of(kernels_of(case), number):
        first, second = before.copy(), before.copy()
        with about(way):
            first.call(way, case, grad)
            kept = second.call(way, case, grad, keep=True)
        wrong = check(first, before, case, reference)
        if not torch.equal(kept.cpu(), exchanged):
            wrong = wrong or "the exchanged gradient is another one"
        if not way.startswith("torch") and not all(map(torch.equal, first.all, second.all)):
            wrong = wrong or "other bits in another run"
        found[way] = wrong
    return found


def replayed(rank: int, world: int, case: Case, rowwise: bool, replays: int) -> str:
    """A captured graph of all ways: every replay is an update, at the rate of its time."""
    grad, ways = grad_on_device(case, rank), capturable(kernels_of(case))
    before = Tables.of(case, rank, rowwise)
    eager, graphed = ([before.copy() for _ in ways] for _ in range(2))
    for way, tables in zip(ways, graphed, strict=True):
        tables.copy().call(way, case, grad)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for way, tables in zip(ways, graphed, strict=True):
            tables.call(way, case, grad)
    if not all(torch.equal(a, b) for tables in graphed for a, b in zip(tables.all, before.all, strict=True)):
        return "capturing has updated"
    for number in range(replays):
        for rates in before.rates:  # all copies share them
            rates[0].fill_(LR / (1 + number))
        graph.replay()
        for way, tables in zip(ways, eager, strict=True):
            tables.call(way, case, grad)
    for way, a, b in zip(ways, eager, graphed, strict=True):
        if not all(map(torch.equal, a.all, b.all)):
            return f"{way}: replays have made something else of the tables than calls"
    return ""


def add_fused_points(case: Case) -> None:
    """From now on the group runs calls like those of the case in kernels of ours, both ways."""
    from autofuse.lowering.gpu.choice.choose import add_points
    from autofuse.lowering.gpu.choice.points import Point
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    device = torch.device("cuda", torch.cuda.current_device())
    forward = Point.of(problem_of(case), {"bags": 1.0})
    update = Point.of(update_problem(case), {"strips": 1.0})
    add_points(workspace_for(group_of_all().group_name, device), (forward, update))


def op(rank: int, world: int, case: Case, rowwise: bool) -> str:
    """The op by itself, where a table says that it is fused."""
    add_fused_points(case)
    before = Tables.of(case, rank, rowwise)
    tables = before.copy()
    torch.ops.autofuse.all_to_all_embedding_bag_update(*tables.arguments(case, grad_on_device(case, rank)))
    return check(tables, before, case, wanted(case, rank))


def compiled_steps(rank: int, world: int, case: Case, rowwise: bool) -> tuple[str, list[str]]:
    """Steps of a compiled program, fused and in eager; what differs, and the ops of the sites."""
    import torch.distributed._functional_collectives as funcol

    import autofuse

    torch._dynamo.reset()
    add_fused_points(case)
    weights, indices, offsets, _ = on_device(case, rank)
    grad = grad_on_device(case, rank).view(case.b * world, -1)

    def bags() -> nn.ModuleList:
        return nn.ModuleList(
            nn.EmbeddingBag(w.shape[0], w.shape[1], mode="sum", _weight=w.clone()) for w in weights
        )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = bags()

        def forward(self, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
            pooled = [bag(i, o) for bag, i, o in zip(self.bags, indices, offsets, strict=True)]
            parts = [case.b] * world
            y = funcol.all_to_all_single_autograd(torch.cat(pooled, 1), parts, parts, group_of_all())
            return (y.float() * grad.float()).sum()

    found = []
    with autofuse.config.patch(policy="always"), autofuse.debug() as report:
        for backend in (None, "autofuse"):
            model = Model()
            optimizer = autofuse.RowwiseAdagrad(LR, EPS) if rowwise else autofuse.SGD(LR)
            autofuse.optimizer_in_backward(model.bags, optimizer)
            step = torch.compile(model, backend=backend) if backend else model
            for number in range(3):
                optimizer.lr = LR / (1 + number)
                step(indices, offsets).backward()
            found.append(list(model.state_dict().values()))
    wrong = ""
    for t, (got, want) in enumerate(zip(found[1], found[0], strict=True)):
        if not torch.allclose(got.double(), want.double(), rtol=1e-4, atol=1e-4):
            wrong = wrong or f"tensor {t} differs by up to {(got - want).abs().max()}"
    return wrong, sorted(site.op or "" for site in report.fused)
