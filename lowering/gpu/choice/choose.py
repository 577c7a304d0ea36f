"""Which way a call takes: the fastest at the nearest measured point; else what the op replaces.

Rank 0's points count for all ranks: it hands them round when the group first asks.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, agreements
from autofuse.lowering.runs import MEASURED, PREDICTED, Timed

from .kernel import Problem, Way, replaced, ways_of
from .points import Point, Points, known, own_file, write


def _times(problem: Problem, points: Points, serial: bool) -> list[tuple[str, float]]:
    """Microseconds at the nearest point of the ways that this problem can take, too, the fastest first."""
    here = {name: way for name, way in ways_of(problem).items() if not (serial and way.is_copied)}
    asked = [(way.name, 0.0) for way in here.values() if way.is_update]
    return asked or [(time.name, time.us or 0.0) for time in _nearest(problem, points, here)]


def _nearest(problem: Problem, points: Points, here: Mapping[str, Way]) -> list[Timed]:
    """The times of these ways at the nearest point that has some, the fastest first."""
    near = sorted((p for p in points if p.op == problem.op), key=lambda p: p.distance(problem))
    for p in near:
        apart = p.distance(problem)
        known = PREDICTED if apart else MEASURED
        found = [Timed(way, us, known) for way, us in p.times if way in here]
        if found and apart <= problem.reach:
            return found
    return []


def choose(problem: Problem, points: Points, serial: bool = False) -> str:
    """The way that takes the GPUs least; what the op replaces where nothing was measured nearby.

    serial: no way in which the host has work beside a kernel, see `GpuWorkspace.serial`.
    """
    times = _times(problem, points, serial)
    return times[0][0] if times else replaced(problem).name


def choose_uncaptured(problem: Problem, points: Points, serial: bool = False) -> str:
    """As `choose`, of calls that the host launches one by one: the time to launch a way counts, too.

    A call then lasts as long as the slower of host and GPU.
    """
    if not problem.host_counts:
        return choose(problem, points, serial)
    here = ways_of(problem)
    lasts = [(max(us, here[way].host_us), us, way) for way, us in _times(problem, points, serial)]
    return min(lasts)[2] if lasts else replaced(problem).name


def chosen(problem: Problem, workspace: GpuWorkspace) -> Way:
    """The way that takes the GPUs least, the same on all ranks."""
    agreed = _agreement(workspace)
    if problem not in agreed.chosen:
        agreed.chosen[problem] = ways_of(problem)[choose(problem, agreed.points, workspace.serial)]
    return agreed.chosen[problem]


def times_of(problem: Problem, workspace: GpuWorkspace) -> list[Timed]:
    """What the choice knows of the ways of a problem, the fastest first."""
    return _nearest(problem, _agreement(workspace).points, ways_of(problem))


def way_of(problem: Problem, workspace: GpuWorkspace, variant: Hashable, capturing: bool) -> tuple[Way, bool]:
    """The way of a call, the same on all ranks, and whether the next call like it takes it, too.

    In a CUDA graph the host costs nothing. The first call of a variant is made as if in a graph, so that its
    kernels are compiled for a graph that is captured later.
    """
    agreed = _agreement(workspace)
    if capturing or (problem, variant) not in agreed.seen:
        agreed.seen.add((problem, variant))
        return chosen(problem, workspace), capturing
    way = agreed.uncaptured.get(problem)
    if way is None:
        name = choose_uncaptured(problem, agreed.points, workspace.serial)
        way = agreed.uncaptured[problem] = ways_of(problem)[name]
    return way, True


def points_of(workspace: GpuWorkspace) -> Points:
    """What rank 0 knew when the group first asked, and what was measured since. All ask together at first."""
    return _agreement(workspace).points


def add_points(workspace: GpuWorkspace, points: Points) -> None:
    """What the ranks have measured together; it counts before what was known."""
    _agreed[workspace] = _Agreement((*points, *points_of(workspace)))
    workspace.calls.clear()


def keep(workspace: GpuWorkspace, point: Point) -> Path:
    """Let the group decide by a point from now on; rank 0 adds it to the user's own file, that path."""
    add_points(workspace, (point,))
    path = own_file(workspace.device)
    if workspace.rank == 0:
        write(path, (point,))
    return path


@dataclass
class _Agreement:
    points: Points
    chosen: dict[Problem, Way] = field(default_factory=dict)
    uncaptured: dict[Problem, Way] = field(default_factory=dict)
    seen: set[Hashable] = field(default_factory=set)


def _agreement(workspace: GpuWorkspace) -> _Agreement:
    found = _agreed.get(workspace)
    if found is None:
        mine = json.dumps([vars(p) for p in known(workspace.device)]) if workspace.rank == 0 else ""
        theirs = json.loads(workspace.meet(mine)[0])
        found = _Agreement(tuple(map(Point.parsed, theirs)))
        _agreed[workspace] = found
    return found


_agreed: WeakKeyDictionary[GpuWorkspace, _Agreement] = WeakKeyDictionary()
agreements.append(_agreed)
