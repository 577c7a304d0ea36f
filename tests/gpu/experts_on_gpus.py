"""What the tests of the expert ops run on ranks with GPUs."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.gpu.expected import MOST_ERROR, error_of, group_of_all, poison
from tests.gpu.telling import about, first_wrong

if TYPE_CHECKING:
    from autofuse.lowering.gpu.experts.ways import ExpertProblem
    from autofuse.lowering.gpu.memory.workspace import GpuWorkspace

COMBINE, DISPATCH = "expert_matmul_all_to_all", "all_to_all_expert_matmul"


@dataclass(frozen=True)
class Case:
    """`[experts, (outer, W, run), k] @ [experts, k, n]` on every rank; of a dispatch with so many weights."""

    op: str
    experts: int
    run: int
    k: int
    n: int
    outer: int = 1
    transposed: bool = False
    biased: bool = False
    dtype: torch.dtype = torch.bfloat16
    weights: int = 1

    def randn(self, rank: int, salt: int, *shape: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(1000 * salt + rank)
        return torch.randn(shape, generator=generator, device="cuda").to(self.dtype)

    def x(self, rank: int, world: int) -> Tensor:
        if self.op == COMBINE:
            return self.randn(rank, 1, self.experts, self.outer * world * self.run, self.k)
        return self.randn(rank, 1, world, self.experts, self.outer * self.run, self.k)

    def w(self, rank: int) -> list[Tensor]:
        shape = (self.n, self.k) if self.transposed else (self.k, self.n)
        found = [
            self.randn(rank, 2 + 10 * i, self.experts, *shape) / self.k**0.5 for i in range(self.weights)
        ]
        return [w.transpose(1, 2) if self.transposed else w for w in found]

    def bias(self, rank: int) -> list[Tensor | None]:
        return [
            self.randn(rank, 3 + 10 * i, self.experts, self.n) if self.biased else None
            for i in range(self.weights)
        ]

    def product(self, rank: int, x: Tensor) -> Tensor:
        """With all weights, side by side."""
        found = []
        for w, bias in zip(self.w(rank), self.bias(rank), strict=True):
            p = x.double() @ w.double()
            found.append(p if bias is None else p + bias.double()[:, None])
        return torch.cat(found, -1)

    def exchanged(self, rank: int, world: int) -> Tensor:
        """X of a dispatch."""
        parts = torch.stack([self.x(source, world)[rank] for source in range(world)])
        runs = parts.view(world, self.experts, self.outer, self.run, self.k)
        return runs.permute(1, 2, 0, 3, 4).reshape(self.experts, -1, self.k)

    def wanted(self, rank: int, world: int) -> Tensor:
        """In fp64."""
        if self.op == DISPATCH:
            return self.product(rank, self.exchanged(rank, world))
        parts = []
        for source in range(world):
            p = self.product(source, self.x(source, world))
            runs = p.view(self.experts, self.outer, world, self.run, self.n)[:, :, rank]
            parts.append(runs.reshape(self.experts, -1, self.n))
        return torch.stack(parts)


def workspace(group: str = "") -> "GpuWorkspace":
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    device = torch.device("cuda", torch.cuda.current_device())
    return workspace_for(group or group_of_all().group_name, device)


def problem_of(case: Case, x: Tensor, w: list[Tensor]) -> "ExpertProblem":
    """All weights of the case are for the kernel."""
    from autofuse.lowering.gpu.experts.fixed import problem_of

    return problem_of(case.op, x, w[0], workspace(), case.outer, case.weights)


def fused_ways(case: Case, rank: int, world: int) -> list[str]:
    """Without those of copy engines where ranks share a GPU."""
    from autofuse.lowering.gpu.choice.kernel import ways_of

    ways = ways_of(problem_of(case, case.x(rank, world), case.w(rank))).values()
    return [way.name for way in ways if way.fused and not (workspace().serial and way.is_copied)]


def call(
    way: str, case: Case, x: Tensor, w: list[Tensor], bias: list[Tensor | None], order: str = "direct"
) -> Tensor:
    """What `wanted` says."""
    from autofuse.lowering.gpu.choice.kernel import ways_of
    from autofuse.lowering.gpu.experts.fixed import combine, dispatch

    problem = problem_of(case, x, w)
    found = ways_of(problem)[way]
    if case.op == COMBINE:
        out = combine(workspace(), found, problem, [x], w, bias[0], order, "test")
        assert out is not None
        return out
    outputs = dispatch(workspace(), found, problem, x, w, bias, False, "test")
    assert outputs is not None
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


@contextmanager
def nan_in_empty() -> Iterator[None]:
    """New tensors are full of NaN: else they may have what an earlier call has left there."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def wrong(found: Tensor, wanted: Tensor) -> str:
    """What is wrong with a result; empty if nothing is."""
    if found.shape != wanted.shape:
        return f"{list(found.shape)} instead of {list(wanted.shape)}"
    if (off := found.isnan()).any():
        return f"not written: {first_wrong(found, wanted, off)}"
    error = error_of(found, wanted)
    if error < MOST_ERROR:
        return ""
    apart = (found.double() - wanted).abs()
    far = 0.05 * wanted.abs().max()
    return (
        f"error {error:.1e}, far off: {first_wrong(found, wanted, apart >= torch.minimum(far, apart.max()))}"
    )


def all_ways(rank: int, world: int, case: Case) -> dict[str, str]:
    """What is wrong with each way: against fp64, and two runs against each other."""
    x, w, bias, wanted = case.x(rank, world), case.w(rank), case.bias(rank), case.wanted(rank, world)
    found = {}
    for way in fused_ways(case, rank, world):
        with about(way):
            call(way, case, x, w, bias)  # grows the workspace if need be
            poison()
            with nan_in_empty():
                first, second = call(way, case, x, w, bias), call(way, case, x, w, bias)
        same = "" if torch.equal(first, second) else "other bits in another run"
        found[way] = wrong(first, wanted) or same
    return found


def sums(rank: int, world: int, case: Case) -> dict[str, str]:
    """A sum of two products, each of its own K, in all ways."""
    from autofuse.lowering.gpu.choice.kernel import ways_of
    from autofuse.lowering.gpu.experts.fixed import combine, of_sum

    cases = [case, replace(case, k=case.k + 72, biased=False)]
    x, w = [c.x(rank, world) for c in cases], [c.w(rank)[0] for c in cases]
    bias, wanted = case.bias(rank)[0], cases[0].wanted(rank, world) + cases[1].wanted(rank, world)
    problem, found = of_sum(problem_of(case, x[0], w[:1]), x, w), {}
    for name, way in ways_of(problem).items():
        if not way.fused:
            continue
        with about(name), nan_in_empty():
            for _ in range(3):
                out = combine(workspace(), way, problem, x, w, bias, "direct", "test")
                assert out is not None
                found[name] = wrong(out, wanted)
                if found[name]:
                    break
    return found


def orders(rank: int, world: int, case: Case) -> dict[str, str]:
    x, w, wanted = case.x(rank, world), case.w(rank), case.wanted(rank, world)
    way = fused_ways(case, rank, world)[0]
    return {
        order: wrong(call(way, case, x, w, [None], order), wanted)
        for order in ("direct", "ring", "oblivious")
    }


def weights_afterwards(rank: int, world: int, case: Case) -> dict[str, str]:
    """The kernel multiplies one weight, or two; another one is multiplied by X, which is returned, too."""
    from autofuse.lowering.gpu.choice.kernel import ways_of
    from autofuse.lowering.gpu.experts.fixed import dispatch

    case = replace(case, weights=2, biased=False)
    x, w, exchanged = case.x(rank, world), case.w(rank), case.exchanged(rank, world)
    w.append(w[0][..., : case.n // 2])
    found = {}
    for way, weights in product(fused_ways(case, rank, world), (1, 2)):
        problem = problem_of(replace(case, weights=weights), x, w)
        for _ in range(3):
            outputs = dispatch(workspace(), ways_of(problem)[way], problem, x, w, [None] * 3, True, "test")
            assert outputs is not None
            *products, kept = outputs
            problems = [wrong(p, exchanged.double() @ wi.double()) for p, wi in zip(products, w, strict=True)]
            problems += [] if torch.equal(kept, exchanged) else ["another X"]
            found[f"{way}, {weights} weights"] = next(filter(None, problems), "")
    return found


def many_calls(rank: int, world: int, cases: list[Case], calls: int) -> str:
    """Calls of changing shapes and ways, back to back, rank 0 late now and then; the first that is wrong."""
    draw = random.Random(7)
    ready = [
        (case, way, partial(call, way, case, case.x(rank, world), case.w(rank), case.bias(rank)), wanted)
        for case in cases
        for wanted in [case.wanted(rank, world)]
        for way in fused_ways(case, rank, world)
    ]
    outputs = []
    for number in range(calls):
        case, way, run, wanted = draw.choice(ready)
        if rank == 0 and number % 50 == 0:
            torch.cuda._sleep(2_000_000)
            time.sleep(0.01)
        outputs.append((f"call {number}, {way}, {case}", run(), wanted))
        if len(outputs) == 20:
            for named, out, reference in outputs:
                if problem := wrong(out, reference):
                    return f"{named}: {problem}"
            outputs = []
    return ""


def replayed(rank: int, world: int, cases: list[Case], replays: int) -> str:
    """A captured graph of all ways, replayed, with eager calls in between; what is wrong."""
    ready = [
        (
            f"{way}, {case}",
            partial(call, way, case, case.x(rank, world), case.w(rank), case.bias(rank)),
            wanted,
        )
        for case in cases
        for wanted in [case.wanted(rank, world)]
        for way in fused_ways(case, rank, world)
    ]
    for _, run, _ in ready:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [run() for _, run, _ in ready]
    for _ in range(replays):
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        ready[0][1]()
        for out, (named, _, wanted) in zip(outputs, ready, strict=True):
            if problem := wrong(out, wanted):
                return f"{named}: {problem}"
    return ""


def trained(rank: int, world: int, case: Case) -> str:
    """Gradients through the op, and through the op that its backward calls, both fused."""
    from autofuse.lowering.gpu.choice.choose import add_points
    from autofuse.lowering.gpu.choice.kernel import fused_ways
    from autofuse.lowering.gpu.choice.points import Point
    from autofuse.lowering.gpu.experts.ways import ExpertProblem

    rows = case.outer * world * case.run
    for op, k, n in ((COMBINE, case.k, case.n), (DISPATCH, case.n, case.k)):
        problem = ExpertProblem(op, case.experts, rows, k, n, world, case.dtype)
        add_points(workspace(), (Point.of(problem, {fused_ways(problem)[0]: 1.0}),))
    x, w = case.x(rank, world).requires_grad_(), case.w(rank)[0].requires_grad_()
    (y,) = torch.ops.autofuse.expert_matmul_all_to_all(
        [x], [w], [], [], "mm", 0, None, None, [], [], 1, case.outer, False,
        group_of_all().group_name, "direct", "test",
    )  # fmt: skip
    seed = [case.randn(r, 9, *y.shape) for r in range(world)]
    y.backward(seed[rank])
    # Row by row: what this rank's product became on every rank has that rank's gradient.
    runs = torch.stack([s[rank] for s in seed], 1).view(case.experts, world, case.outer, case.run, case.n)
    grad = runs.transpose(1, 2).reshape(case.experts, rows, case.n).double()
    assert x.grad is not None
    assert w.grad is not None
    return (
        wrong(y.detach(), case.wanted(rank, world))
        or wrong(x.grad, grad @ w.detach().double().transpose(1, 2))
        or wrong(w.grad, x.detach().double().transpose(1, 2) @ grad)
    )


def trained_dispatch(rank: int, world: int, case: Case) -> str:
    """Gradients through a dispatch of gate and up, for which X is kept."""
    from autofuse.lowering.gpu.choice.choose import add_points
    from autofuse.lowering.gpu.choice.points import Point

    x, w = case.x(rank, world).requires_grad_(), [wi.requires_grad_() for wi in case.w(rank)]
    fastest = {fused_ways(case, rank, world)[0]: 1.0}
    add_points(workspace(), (Point.of(problem_of(case, x, w), fastest),))
    outputs = torch.ops.autofuse.all_to_all_expert_matmul(
        x,
        w,
        [],
        "",
        0,
        None,
        None,
        [],
        [],
        1,
        case.outer,
        False,
        group_of_all().group_name,
        "direct",
        "test",
    )
    seeds = [
        [case.randn(r, 9 + 10 * i, *outputs[0].shape) for i in range(case.weights)] for r in range(world)
    ]
    torch.autograd.backward(outputs, seeds[rank])
    assert x.grad is not None
    for r in range(world):
        grad = sum(
            s.double() @ wi.double().transpose(1, 2) for s, wi in zip(seeds[r], case.w(r), strict=True)
        )
        assert isinstance(grad, Tensor)
        runs = grad.view(case.experts, case.outer, world, case.run, case.k)[:, :, rank]
        if problem := wrong(x.grad[r], runs.reshape(case.experts, -1, case.k)):
            return f"gradient of x for rank {r}: {problem}"
    exchanged = case.exchanged(rank, world).double().transpose(1, 2)
    problems = [wrong(torch.cat([y.detach() for y in outputs], -1), case.wanted(rank, world))]
    for wi, s in zip(w, seeds[rank], strict=True):
        assert wi.grad is not None
        problems.append(wrong(wi.grad, exchanged @ s.double()))
    return next(filter(None, problems), "")
