"""What the tests of experts with any number of rows run on ranks with GPUs."""

import random
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.experts_on_gpus import nan_in_empty, workspace, wrong
from tests.gpu.on_gpus import poison


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

    def inputs(self, rank: int, world: int) -> dict[str, object]:
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

    def wanted(self, rank: int, world: int) -> Tensor:
        """In fp64."""
        parts = []
        for source in range(world):
            given = self.inputs(source, world)
            x, w, bias, ends = (given[name] for name in ("x", "w", "bias", "offsets"))
            p = torch.zeros(x.shape[0], self.n, device="cuda", dtype=torch.float64)  # type: ignore[attr-defined]
            start = 0
            for e, end in enumerate(ends.tolist()):  # type: ignore[attr-defined]
                p[start:end] = x[start:end].double() @ w[e].double()  # type: ignore[index]
                if bias is not None:
                    p[start:end] += bias[e].double()  # type: ignore[index]
                start = end
            buffer = torch.empty_like(p)
            buffer[given["positions"]] = p  # type: ignore[index]
            parts.append(buffer.split(given["sent"])[rank])  # type: ignore[arg-type]
        return torch.cat(parts)


def ways() -> list[str]:
    from autofuse.lowering.gpu.expert_ways import COMBINE, DROPLESS, DroplessProblem, dropless_ways

    world = dist.get_world_size()
    found = dropless_ways(DroplessProblem(COMBINE + DROPLESS, 5, 264, 520, world, torch.bfloat16))
    return [way for way, config in found.items() if config is not None]


def call(way: str, given: dict[str, object]) -> Tensor:
    from autofuse.lowering.gpu.dropless import dropless_combine, dropless_problem_of

    problem = dropless_problem_of(given["x"], given["w"], workspace())  # type: ignore[arg-type]
    out = dropless_combine(workspace(), way, problem, **given, site="test")  # type: ignore[arg-type]
    assert out is not None
    return out


def _wrong(found: Tensor, wanted: Tensor) -> str:
    return wrong(found, wanted) if wanted.numel() else ""


def all_ways(rank: int, world: int, case: Ragged) -> dict[str, str]:
    """What is wrong with each way: against fp64, and two runs against each other."""
    given, wanted, found = case.inputs(rank, world), case.wanted(rank, world), {}
    for way in ways():
        call(way, given)
        poison()
        with nan_in_empty():
            first, second = call(way, given), call(way, given)
        same = "" if torch.equal(first, second) else "other bits in another run"
        found[way] = _wrong(first, wanted) or same
    return found


def many_calls(rank: int, world: int, cases: list[Ragged], calls: int) -> str:
    """Calls of changing splits and ways, back to back, rank 0 late now and then; the first that is wrong."""
    draw = random.Random(7)
    every = [replace(case, seed=seed) for case in cases for seed in range(3)]
    ready = [(case, case.inputs(rank, world), case.wanted(rank, world)) for case in every]
    outputs = []
    for number in range(calls):
        case, given, wanted = draw.choice(ready)
        way = draw.choice(ways())
        if rank == 0 and number % 50 == 0:
            torch.cuda._sleep(2_000_000)
            time.sleep(0.01)
        outputs.append((f"call {number}, {way}, {case}", call(way, given), wanted))
        if len(outputs) == 20:
            for named, out, reference in outputs:
                if problem := _wrong(out, reference):
                    return f"{named}: {problem}"
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
        given["positions"].copy_(now.inputs(rank, world)["positions"])  # type: ignore[attr-defined]
        for out in found:
            out.fill_(float("nan"))
        graph.replay()
        wanted = now.wanted(rank, world)
        for way, out in zip(ways(), found, strict=True):
            if problem := _wrong(out, wanted):
                return f"replay {number}, {way}: {problem}"
    return ""
