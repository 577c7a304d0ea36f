"""What the tests of experts with any number of rows run on ranks with GPUs."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.expected import capturable, group_of_all, poison
from tests.gpu.experts_on_gpus import COMBINE, DISPATCH, nan_in_empty, workspace, wrong
from tests.gpu.telling import about
from tests.ranks import fresh_group

if TYPE_CHECKING:
    from autofuse.lowering.gpu.experts.kernels import Rows

Given = dict[str, Any]


@dataclass(frozen=True)
class Ragged:
    """About `rows` rows on every rank for `experts` experts, spread as `kind` says."""

    kind: str
    experts: int = 5
    rows: int = 900
    k: int = 264
    n: int = 520
    seed: int = 0
    shuffled: bool = False
    transposed: bool = False
    biased: bool = False
    dtype: torch.dtype = torch.bfloat16

    def counts(self, world: int) -> Tensor:
        """[source, expert, destination], the same on all ranks."""
        generator = torch.Generator().manual_seed(self.seed)
        most = max(1, 2 * self.rows // (self.experts * world))
        counts = torch.randint(0, most + 1, (world, self.experts, world), generator=generator)
        if self.kind == "empty experts":
            counts[:, ::2] = 0
        elif self.kind == "hot expert":
            hot = counts.sum(1, keepdim=True)
            counts[:] = 0
            counts[:, 2:3] = hot
        elif self.kind == "to one rank":
            counts[:, :, 0] += counts[:, :, 1:].sum(2)
            counts[:, :, 1:] = 0
        elif self.kind == "one rank has all":
            counts[1:] = 0
        elif self.kind == "nothing":
            counts[:] = 0
        return counts

    def randn(self, rank: int, salt: int, *shape: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(1000 * salt + rank + 17 * self.seed)
        return torch.randn(shape, generator=generator, device="cuda").to(self.dtype)

    def inputs(self, rank: int, world: int) -> Given:
        """Of a combine; `rows of none` has some behind the last expert."""
        counts = self.counts(world)[rank]
        rows, none = int(counts.sum()), 7 * (self.kind == "rows of none")
        sent = counts.sum(0)
        sent[-1] += none
        # Row (expert, destination, i) of P; in the send buffer (destination, expert, i).
        starts = (counts.t().flatten().cumsum(0) - counts.t().flatten()).view(world, -1).t().flatten()
        spans = zip(starts.tolist(), counts.flatten().tolist(), strict=True)
        positions = torch.tensor([p for first, length in spans for p in range(first, first + length)])
        positions = torch.cat([positions.long(), torch.arange(rows, rows + none)])
        if self.shuffled:
            positions = torch.randperm(rows + none, generator=torch.Generator().manual_seed(rank))
        w = self.randn(rank, 2, self.experts, *((self.n, self.k) if self.transposed else (self.k, self.n)))
        w = w / self.k**0.5
        received = self.counts(world)[:, :, rank].sum(1) + none * (rank == world - 1)
        return {
            "x": self.randn(rank, 1, rows + none, self.k),
            "w": w.transpose(1, 2) if self.transposed else w,
            "bias": self.randn(rank, 3, self.experts, self.n) if self.biased else None,
            "offsets": counts.sum(1).cumsum(0).to("cuda", torch.int32),
            "positions": positions.cuda(),
            "received": received.tolist(),
            "sent": sent.tolist(),
        }

    def up(self, rank: int, given: Given) -> Given:
        """The same with another weight and bias."""
        w, bias = given["w"], given["bias"]
        other = self.randn(rank, 5, *w.transpose(1, 2).shape if self.transposed else w.shape) / self.k**0.5
        return given | {
            "w": other.transpose(1, 2) if self.transposed else other,
            "bias": None if bias is None else self.randn(rank, 6, *bias.shape),
        }

    def product(self, x: Tensor, given: Given) -> Tensor:
        """In fp64, [rows, N]."""
        p = torch.zeros(x.shape[0], self.n, device="cuda", dtype=torch.float64)
        start = 0
        for e, end in enumerate(given["offsets"].tolist()):
            p[start:end] = x[start:end].double() @ given["w"][e].double()
            if given["bias"] is not None:
                p[start:end] += given["bias"][e].double()
            start = end
        return p

    def wanted(self, rank: int, world: int) -> Tensor:
        """Of a combine, in fp64."""
        parts = []
        for source in range(world):
            given = self.inputs(source, world)
            p = self.product(given["x"], given)
            buffer = torch.empty_like(p)
            buffer[given["positions"]] = p
            parts.append(buffer.split(given["sent"])[rank])
        return torch.cat(parts)

    def dispatched(self, rank: int, world: int) -> tuple[Given, Tensor, Tensor]:
        """Of the dispatch that goes the other way: what it is given, X, and its product in fp64."""
        given = self.inputs(rank, world)
        sends = [self.inputs(r, world)["received"] for r in range(world)]
        tokens = [self.randn(r, 4, sum(sends[r]), self.k) for r in range(world)]
        x = torch.cat([t.split(s)[rank] for t, s in zip(tokens, sends, strict=True)])[given["positions"]]
        given |= {"x": tokens[rank], "received": given["sent"], "sent": given["received"]}
        return given, x, self.product(x, given)


def ways() -> list[str]:
    from autofuse.lowering.gpu.choice.kernel import fused_ways
    from autofuse.lowering.gpu.experts.ways import DROPLESS, DroplessProblem

    world = dist.get_world_size()
    return fused_ways(DroplessProblem(COMBINE + DROPLESS, 5, 264, 520, world, torch.bfloat16))


def rows_of(given: Given) -> "Rows":
    from autofuse.lowering.gpu.experts.kernels import Rows

    return Rows(given["offsets"], given["positions"], given["received"], given["sent"])


def call(way: str, given: Given, group: str = "") -> Tensor:
    return add_up(way, [given], group)


def add_up(way: str, terms: Sequence[Given], group: str = "") -> Tensor:
    """The combine of a sum of products, whose rows go where those of the first go."""
    from autofuse.lowering.gpu.choice.kernel import ways_of
    from autofuse.lowering.gpu.experts.dropless import dropless_combine, dropless_problem_of
    from autofuse.lowering.gpu.experts.fixed import of_sum

    x, w = ([given[name] for given in terms] for name in ("x", "w"))
    problem = dropless_problem_of("expert_matmul_all_to_all", x[0], w[0], workspace(group))
    problem = of_sum(problem, x, w)
    bias, rows = terms[0]["bias"], rows_of(terms[0])
    found = ways_of(problem)[way]
    out = dropless_combine(workspace(group), found, problem, x, w, bias, rows, site="test")
    assert out is not None
    return out


def dispatch(
    way: str, given: Given, more: Sequence[Given] = (), weights: int = 1, keep: bool = False, group: str = ""
) -> list[Tensor]:
    """Also with weights and biases of `more`; the kernel multiplies so many, the others come afterwards."""
    from autofuse.lowering.gpu.choice.kernel import ways_of
    from autofuse.lowering.gpu.experts.dropless import dropless_dispatch, dropless_problem_of

    x, op = given["x"], "all_to_all_expert_matmul"
    problem = dropless_problem_of(op, x, given["w"], workspace(group), weights)
    w, bias = ([of[name] for of in (given, *more)] for name in ("w", "bias"))
    found = ways_of(problem)[way]
    out = dropless_dispatch(workspace(group), found, problem, x, w, bias, rows_of(given), keep, "test")
    assert out is not None
    return out


def _one(way: str, given: Given) -> Tensor:
    """The product of a dispatch of one weight."""
    return dispatch(way, given)[0]


def _both(way: str, given: Given, up: Given) -> Tensor:
    """Products of a dispatch of two weights, side by side."""
    return torch.cat(dispatch(way, given, [up], 2), 1)


def _wrong(found: Tensor, wanted: Tensor) -> str:
    return wrong(found, wanted) if wanted.numel() else ""


def all_ways(rank: int, world: int, case: Ragged) -> dict[str, str]:
    """What is wrong with each way: against fp64, and two runs against each other."""
    given, wanted, found = case.inputs(rank, world), case.wanted(rank, world), {}
    for way in ways():
        with about(way):
            call(way, given)
            poison()
            with nan_in_empty():
                first, second = call(way, given), call(way, given)
        same = "" if torch.equal(first, second) else "other bits in another run"
        found[way] = _wrong(first, wanted) or same
    return found


def sums(rank: int, world: int, case: Ragged) -> dict[str, str]:
    """A sum of two products, each of its own K, in all ways, and without a kernel."""
    from autofuse.lowering.gpu.experts.unfused import combine_unfused

    cases = [case, replace(case, k=case.k + 72, biased=False)]
    terms, found = [c.inputs(rank, world) for c in cases], {}
    wanted = cases[0].wanted(rank, world) + cases[1].wanted(rank, world)
    for way in ways():
        with about(way):
            add_up(way, terms)
            poison()
            with nan_in_empty():
                found[way] = _wrong(add_up(way, terms), wanted)
    if case.dtype is torch.bfloat16:
        x, w = ([term[name] for term in terms] for name in ("x", "w"))
        bias, rows = terms[0]["bias"], rows_of(terms[0])
        found["unfused"] = _wrong(combine_unfused(x, w, bias, rows, group_of_all().group_name), wanted)
    return found


def all_dispatches(rank: int, world: int, case: Ragged) -> dict[str, str]:
    """As `all_ways`, of one weight and of two; then with X, and weights that the kernel does not multiply."""
    (given, x, wanted), found = case.dispatched(rank, world), {}
    up = case.up(rank, given)
    both = torch.cat([wanted, case.product(x, up)], 1)
    for way, weights in product(ways(), (1, 2)):
        named, more = f"{way}, {weights} weights", [up][: weights - 1]
        with about(named):
            dispatch(way, given, more, weights)
            poison()
            with nan_in_empty():
                first, second = (torch.cat(dispatch(way, given, more, weights), 1) for _ in range(2))
        same = "" if torch.equal(first, second) else "other bits in another run"
        found[named] = _wrong(first, both if more else wanted) or same
        if not case.transposed:
            plain = given | {"bias": None}
            *products, exchanged = dispatch(way, given, [up, plain], weights, keep=True)
            wrongs = [_wrong(torch.cat(products[:2], 1), both), _wrong(products[2], case.product(x, plain))]
            wrongs += [] if torch.equal(exchanged, x) else ["another X"]
            found[named] = found[named] or next(filter(None, wrongs), "")
    return found


def unfused(rank: int, world: int, case: Ragged) -> dict[str, str]:
    """The ops by grouped_mm and NCCL, whatever `auto` takes; captured, too, for which the host must not wait
    for the GPU."""
    from autofuse.lowering.gpu import by_name
    from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL

    given, wanted = case.inputs(rank, world), case.wanted(rank, world)
    other, _, dispatched = case.dispatched(rank, world)
    site = (1, 1, False, group_of_all().group_name, "direct", "test")
    bias = [] if given["bias"] is None else [given["bias"]]

    def ragged(of: Given) -> tuple[Any, ...]:
        return 0, of["offsets"], of["positions"], of["received"], of["sent"]

    combining = ([given["x"]], [given["w"]], bias, [], "mm", *ragged(given), *site)
    dispatching = (other["x"], [other["w"]], bias, "", *ragged(other), *site)

    def both() -> tuple[Tensor, Tensor]:
        (y,) = by_name.run(CUBLAS_NCCL, COMBINE, combining)
        (p,) = by_name.run(CUBLAS_NCCL, DISPATCH, dispatching)
        return y, p

    with about("eager"):
        y, p = both()
    if capturable([CUBLAS_NCCL]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y, p = both()
        graph.replay()
    return {"combine": _wrong(y, wanted), "dispatch": _wrong(p, dispatched)}


def lost_peer(rank: int, world: int, case: Ragged, dispatches: bool, captured: bool) -> str:
    """The last rank stays away; what the others are told: by their kernels in a captured graph, else by their
    hosts."""
    import autofuse
    from autofuse import config

    group, way = fresh_group(), ways()[0]
    given = case.dispatched(rank, world)[0] if dispatches else case.inputs(rank, world)

    def run() -> None:
        if dispatches:
            dispatch(way, given, group=group)
        else:
            call(way, given, group)

    with config.patch(timeout_s=2.0):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        dist.barrier()
        if rank == world - 1:
            time.sleep(4)
            return ""
        try:
            graph.replay() if captured else run()
            torch.cuda.synchronize()
            autofuse.check(group)
        except RuntimeError as error:
            return str(error)
    return "no error"


def many_calls(rank: int, world: int, cases: list[Ragged], calls: int) -> str:
    """Calls of changing splits and ways, back to back, rank 0 late now and then; the first that is wrong."""
    draw = random.Random(7)
    every = [replace(case, seed=seed) for case in cases for seed in range(3)]
    ready: list[tuple[str, Callable[[str], Tensor], Tensor]] = []
    for case in every:
        given, wanted = case.inputs(rank, world), case.wanted(rank, world)
        ready.append((f"combine of {case}", partial(call, given=given), wanted))
        other, x, wanted = case.dispatched(rank, world)
        ready.append((f"dispatch of {case}", partial(_one, given=other), wanted))
        up = case.up(rank, other)
        wanted = torch.cat([wanted, case.product(x, up)], 1)
        ready.append((f"dispatch of two, {case}", partial(_both, given=other, up=up), wanted))
    outputs = []
    for number in range(calls):
        named, run, reference = draw.choice(ready)
        way = draw.choice(ways())
        if rank == 0 and number % 50 == 0:
            torch.cuda._sleep(2_000_000)
            time.sleep(0.01)
        outputs.append((f"call {number}, {way}, {named}", run(way), reference))
        if len(outputs) == 20:
            for what, out, expected in outputs:
                if problem := _wrong(out, expected):
                    return f"{what}: {problem}"
            outputs = []
    return ""


def replayed(rank: int, world: int, case: Ragged, replays: int) -> str:
    """A captured graph of all ways, replayed with other positions in the same memory; what is wrong."""
    given, found = case.inputs(rank, world), []
    for way in ways():
        call(way, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call(way, given) for way in ways()]
    shuffled = replace(case, shuffled=True)
    for number in range(replays):
        now = shuffled if number % 2 else case
        given["positions"].copy_(now.inputs(rank, world)["positions"])
        for out in found:
            out.fill_(float("nan"))
        graph.replay()
        wanted = now.wanted(rank, world)
        for way, out in zip(ways(), found, strict=True):
            if problem := _wrong(out, wanted):
                return f"replay {number}, {way}: {problem}"
    return ""


def replayed_dispatches(rank: int, world: int, case: Ragged, replays: int) -> str:
    """As `replayed`, of dispatches of two weights."""
    given, _, _ = case.dispatched(rank, world)
    up = case.up(rank, given)
    for way in ways():
        _both(way, given, up)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [_both(way, given, up) for way in ways()]
    shuffled = replace(case, shuffled=True)
    for number in range(replays):
        now, x, gate = (shuffled if number % 2 else case).dispatched(rank, world)
        given["positions"].copy_(now["positions"])
        for out in found:
            out.fill_(float("nan"))
        graph.replay()
        wanted = torch.cat([gate, case.product(x, up)], 1)
        for way, out in zip(ways(), found, strict=True):
            if problem := _wrong(out, wanted):
                return f"replay {number}, {way}: {problem}"
    return ""
