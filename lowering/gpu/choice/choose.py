"""Which way a call takes: what was measured for it or for its nearest neighbour; else what it replaces.

Tables are JSON: a list of points, each with the problem and the microseconds of every way. They come from
`~/.cache/autofuse/ways/<gpu>.json`, which `autofuse bench dense --tune` and `AUTOFUSE_MEASURE` write, and
from those shipped. Rank 0's tables count for all ranks: it hands them round when the group first asks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from autofuse.lowering.gpu.dense.ways import CUBLAS_NCCL, Problem, host_us, is_update, ways
from autofuse.lowering.gpu.embedding.ways import TORCH_NCCL, ExchangeProblem, exchange_ways
from autofuse.lowering.gpu.experts.ways import (
    DroplessProblem,
    ExpertProblem,
    dropless_ways,
    expert_ways,
)
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace

FAR = 2.0
"""A point measured at sizes that differ by more than this many doublings, all told, says nothing."""

_SHIPPED = Path(__file__).with_name("tables")


AnyProblem = Problem | ExchangeProblem | ExpertProblem | DroplessProblem

ALWAYS_NEAR = ExchangeProblem, DroplessProblem
"""Of bags and of dropless experts any point will do: their kernels have won wherever they were measured."""


@dataclass(frozen=True)
class Point:
    """What was measured: microseconds by way, on the slowest rank."""

    op: str
    m: int
    k: int
    n: int
    world: int
    times: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, problem: AnyProblem, times: dict[str, float]) -> Point:
        found = tuple((way, round(us, 2)) for way, us in sorted(times.items(), key=lambda item: item[1]))
        return cls(problem.op, problem.m, problem.k, problem.n, problem.world, found)

    def distance(self, problem: AnyProblem) -> float:
        """In doublings of the sizes; tokens count in full, since ways change with them."""
        if self.op != problem.op:
            return math.inf
        apart = sum(
            abs(math.log2(a / b))
            for a, b in zip((self.m, self.k, self.n), (problem.m, problem.k, problem.n), strict=True)
        )
        return apart + 0.5 * abs(math.log2(self.world / problem.world))


Points = tuple[Point, ...]


def gpu_name(device: torch.device) -> str:
    """`h200` of NVIDIA H200."""
    return torch.cuda.get_device_name(device).lower().removeprefix("nvidia ").replace(" ", "-")


def own_table(device: torch.device) -> Path:
    """Where rank 0 writes what was measured on this kind of GPU."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
        / "autofuse"
        / "ways"
        / f"{gpu_name(device)}.json"
    )


def read(path: Path) -> Points:
    """The points of a table; none if there is no such file. ValueError if it is no table."""
    if not path.exists():
        return ()
    try:
        return tuple(
            Point(**{**point, "times": tuple((w, float(t)) for w, t in point["times"])})
            for point in json.loads(path.read_text())
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is no table of ways ({error}); delete it, and run `autofuse bench dense --tune` again"
        ) from error


def write(path: Path, points: Sequence[Point]) -> None:
    """Adds points to a table; those of the same problem are replaced."""
    problems = {(p.op, p.m, p.k, p.n, p.world) for p in points}
    old = [p for p in read(path) if (p.op, p.m, p.k, p.n, p.world) not in problems]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    rows = [
        json.dumps(vars(p)) for p in sorted((*old, *points), key=lambda p: (p.op, p.world, p.k, p.n, p.m))
    ]
    draft.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    draft.replace(path)


def known(device: torch.device) -> Points:
    """The points of this machine's own table and of those shipped, nearest kin first."""
    shipped = [_SHIPPED / f"{gpu_name(device)}.json", *sorted(_SHIPPED.glob("*.json"))]
    return (*read(own_table(device)), *(p for path in dict.fromkeys(shipped) for p in read(path)))


def ways_of(problem: AnyProblem) -> Mapping[str, Any]:
    """Names of all ways that can run it, with the configurations of the fused ones."""
    if isinstance(problem, Problem):
        return ways(problem)
    if isinstance(problem, DroplessProblem):
        return dropless_ways(problem)
    return expert_ways(problem) if isinstance(problem, ExpertProblem) else exchange_ways(problem)


def _times(problem: AnyProblem, points: Points) -> list[tuple[str, float]]:
    """Microseconds at the nearest point of the ways that this problem can take, too, the fastest first."""
    if isinstance(problem, Problem):
        updates = [(way, 0.0) for way, config in ways(problem).items() if is_update(config)]
        if updates:  # whoever asks for it gets it
            return updates
    here = ways_of(problem)
    far = math.inf if isinstance(problem, ALWAYS_NEAR) else FAR
    near = sorted((p for p in points if p.op == problem.op), key=lambda p: p.distance(problem))
    found = ([(w, us) for w, us in p.times if w in here] for p in near if p.distance(problem) <= far)
    return next(filter(None, found), [])


def choose(problem: AnyProblem, points: Points) -> str:
    """The way that takes the GPUs least; what the op replaces where nothing was measured nearby."""
    times = _times(problem, points)
    if times:
        return times[0][0]
    return TORCH_NCCL if isinstance(problem, ExchangeProblem) else CUBLAS_NCCL


def choose_uncaptured(problem: AnyProblem, points: Points) -> str:
    """As `choose`, of calls that the host launches one by one: what it takes to launch a way counts, too.

    A call then lasts as long as the slower of host and GPU.
    """
    here = ways_of(problem)
    lasts = [(max(us, host_us(way, here[way])), us, way) for way, us in _times(problem, points)]
    return min(lasts)[2] if lasts else CUBLAS_NCCL


def chosen(problem: AnyProblem, workspace: GpuWorkspace) -> str:
    """The way that takes the GPUs least, the same on all ranks."""
    agreed = _agreement(workspace)
    if problem not in agreed.chosen:
        agreed.chosen[problem] = choose(problem, agreed.points)
    return agreed.chosen[problem]


def way_of(
    problem: AnyProblem, workspace: GpuWorkspace, variant: Hashable, capturing: bool
) -> tuple[str, bool]:
    """The way of a call, the same on all ranks, and whether the next call like it takes it, too.

    In a CUDA graph the host costs nothing. Its first call is made as if in one: for a graph that is captured
    later everything has then been compiled.
    """
    agreed = _agreement(workspace)
    if capturing or (problem, variant) not in agreed.seen:
        agreed.seen.add((problem, variant))
        return chosen(problem, workspace), capturing
    if problem not in agreed.uncaptured:
        agreed.uncaptured[problem] = choose_uncaptured(problem, agreed.points)
    return agreed.uncaptured[problem], True


def points_of(workspace: GpuWorkspace) -> Points:
    """What rank 0 knew when the group first asked, and what was measured since. All ask together at first."""
    return _agreement(workspace).points


def add_points(workspace: GpuWorkspace, points: Points) -> None:
    """What the ranks have measured together; it counts before what was known."""
    _agreed[workspace] = _Agreement((*points, *points_of(workspace)))
    workspace.calls.clear()


def keep(workspace: GpuWorkspace, point: Point) -> Path:
    """Let the group decide by a point from now on; rank 0 adds it to the user's own table, that path."""
    add_points(workspace, (point,))
    path = own_table(workspace.device)
    if workspace.rank == 0:
        write(path, (point,))
    return path


@dataclass
class _Agreement:
    points: Points
    chosen: dict[AnyProblem, str] = field(default_factory=dict)
    uncaptured: dict[AnyProblem, str] = field(default_factory=dict)
    seen: set[Hashable] = field(default_factory=set)


def _agreement(workspace: GpuWorkspace) -> _Agreement:
    found = _agreed.get(workspace)
    if found is None:
        mine = json.dumps([vars(p) for p in known(workspace.device)]) if workspace.rank == 0 else ""
        theirs = json.loads(workspace.meet(mine)[0])
        found = _Agreement(tuple(Point(**{**p, "times": tuple(map(tuple, p["times"]))}) for p in theirs))
        _agreed[workspace] = found
    return found


_agreed: WeakKeyDictionary[GpuWorkspace, _Agreement] = WeakKeyDictionary()
