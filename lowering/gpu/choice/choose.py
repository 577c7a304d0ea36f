"""Which way a call takes: the one that is predicted to be the fastest.

`correction.py` predicts: formulas, corrected by measured points. All inputs are equal on all ranks: when the
group first asks, rank 0 sends its points and the properties of its GPU to all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, agreements
from autofuse.lowering.runs import MEASURED, PREDICTED, Timed

from .correction import Predicted, Predictor
from .gpu import Gpu
from .kernel import Problem, Way, ways_of
from .model import gpu_of, measured, model_of
from .points import Point, Points, known, own_file, write
from .work import Tiles

CAUTION = 1.03
"""The predicted time of a way that was not measured at the problem is multiplied by this factor. The smallest
of many predictions tends to be too low."""

STREAMS_US = 300.0
"""Time of the host for a call of torch's async TP. It was measured as 160 to 300 us on machines with 2 and 4
H200."""

COPY_US = 12.0
"""Time of the host for one copy of a copy engine with its flags: two copies, with all else of a prepared
call, took 31 us on 2 H100."""

HOST_SHARE = 1 / 3
"""The host may be busy with the copies of a call for this part of the call's time on the GPU. A copy that
starts late holds up the kernels of all ranks."""

MOST_PROBLEMS = 4096
"""A group keeps the ways of at most this many problems."""


def choose(problem: Problem, predictor: Predictor, serial: bool = False, launched: bool = False) -> Predicted:
    """The way that takes least time on the GPUs. serial: see `_possible`.

    launched: the host launches the call, since it is in no CUDA graph. A way then counts as at least
    `_least_us`.
    """
    ways = ways_of(problem)

    def lasts(each: Predicted) -> tuple[float, float]:
        us = _us(each)
        return (max(us, _least_us(ways[each.way], problem)) if launched else us), us

    return min(_possible(problem, predictor, serial), key=lasts)


def _least_us(way: Way, problem: Problem) -> float:
    """Lower bound of the time of a call that the host launches. It is 0 for ways of one launch, which keep
    the host busy for less time than the computation that the op replaces."""
    if way.by_streams:
        return STREAMS_US
    copies = sum(work.copies for work in way.work(problem) if isinstance(work, Tiles))
    return copies * COPY_US / HOST_SHARE


def _us(each: Predicted) -> float:
    return each.us if each.measured else each.us * CAUTION


def _possible(problem: Problem, predictor: Predictor, serial: bool) -> Sequence[Predicted]:
    """The ways that may be chosen, the fastest first.

    If the user asks for ways that add tiles as they arrive, only these. serial: leave out ways that use copy
    engines, see `GpuWorkspace.serial`.
    """
    ways = ways_of(problem)
    here = [each for each in predictor.times(problem) if not (serial and ways[each.way].is_copied)]
    return [each for each in here if ways[each.way].is_update] or here


def predictor_of(points: Points) -> Predictor:
    """A predictor without a group, for the kind of GPU that was measured most."""
    return Predictor(measured(), points)


def chosen(problem: Problem, workspace: GpuWorkspace) -> Way:
    """The way that takes least time on the GPUs, the same on all ranks."""
    agreed = _agreement(workspace)
    if problem not in agreed.chosen:
        if len(agreed.chosen) == MOST_PROBLEMS:  # sizes may change without end; all ranks forget at once
            agreed = _decide_by(workspace, agreed.predictor)
        found = choose(problem, agreed.predictor, workspace.serial)
        agreed.chosen[problem] = ways_of(problem)[found.way]
    return agreed.chosen[problem]


def configuration(way: Way, problem: Problem, workspace: GpuWorkspace) -> Way:
    """The fastest configuration of the way's kernel for a problem, the same on all ranks. It is asked for
    once the ranks know all sizes of the problem; the way was chosen before."""
    ways = ways_of(problem)
    found = [each for each in predictor_for(workspace).times(problem) if ways[each.way].kernel is way.kernel]
    return ways[min(found, key=_us).way] if found else way


def times_of(problem: Problem, workspace: GpuWorkspace) -> list[Timed]:
    """The ways of a problem with their times, the fastest first; without times if these depend on sizes that
    the problem does not have."""
    found = predictor_for(workspace).times(problem)
    if not problem.is_whole:
        return [Timed(each.way) for each in found]
    return [Timed(each.way, each.us, MEASURED if each.measured else PREDICTED) for each in found]


def way_of(problem: Problem, workspace: GpuWorkspace, variant: Hashable, capturing: bool) -> tuple[Way, bool]:
    """The way of a call, the same on all ranks, and whether the next call like it takes it, too.

    The time of the host counts only outside of CUDA graphs (see `choose`). The first call of a variant takes
    the way of a captured call, so that its kernels are compiled if a graph is captured later.
    """
    if is_first(problem, workspace, variant) or capturing:
        return chosen(problem, workspace), capturing
    agreed = _agreement(workspace)
    if problem not in agreed.launched:
        found = choose(problem, agreed.predictor, workspace.serial, launched=True)
        agreed.launched[problem] = ways_of(problem)[found.way]
    return agreed.launched[problem], True


def is_first(problem: Problem, workspace: GpuWorkspace, variant: Hashable) -> bool:
    """Whether this is the first call of the variant in the group; the same on all ranks. The call is
    noted."""
    chosen(problem, workspace)  # this may clear what was seen
    seen = _agreement(workspace).seen
    if (problem, variant) in seen:
        return False
    seen.add((problem, variant))
    return True


def predictor_for(workspace: GpuWorkspace) -> Predictor:
    """The predictor of the group. It knows the points that rank 0 had when the group first asked for it, and
    the points that were measured since. All ranks make the first call together.
    """
    return _agreement(workspace).predictor


def points_of(workspace: GpuWorkspace) -> Points:
    """The measured points that the group decides by."""
    return predictor_for(workspace).points


def add_points(workspace: GpuWorkspace, points: Points) -> None:
    """Adds points that the ranks have measured together. They precede the points that were known."""
    known = predictor_for(workspace)
    _decide_by(workspace, Predictor(known.model, (*points, *known.points)))


def keep(workspace: GpuWorkspace, point: Point) -> Path:
    """Let the group decide by a point from now on; rank 0 adds it to the user's own file, that path."""
    add_points(workspace, (point,))
    path = own_file(workspace.device)
    if workspace.rank == 0:
        write(path, (point,))
    return path


@dataclass
class _Agreement:
    predictor: Predictor
    chosen: dict[Problem, Way] = field(default_factory=dict)
    launched: dict[Problem, Way] = field(default_factory=dict)
    seen: set[Hashable] = field(default_factory=set)


def _agreement(workspace: GpuWorkspace) -> _Agreement:
    """What the ranks of a group have agreed on. ValueError on all ranks if rank 0 cannot read its points."""
    found = _agreed.get(workspace)
    if found is None:
        mine = _told(workspace) if workspace.rank == 0 else ""
        told = json.loads(workspace.meet(mine)[0])
        if "failed" in told:
            raise ValueError(f"rank 0: {told['failed']}")
        points = tuple(map(Point.parsed, told["points"]))
        found = _Agreement(Predictor(model_of(Gpu(**told["gpu"])), points))
        _agreed[workspace] = found
    return found


def _decide_by(workspace: GpuWorkspace, predictor: Predictor) -> _Agreement:
    """Drops all decisions of the group; the next ones follow from `predictor`. All ranks do so at the same
    call. Prepared calls are dropped, too, since a rank may have prepared calls that others have not."""
    found = _agreed[workspace] = _Agreement(predictor)
    workspace.calls.clear()
    return found


def _told(workspace: GpuWorkspace) -> str:
    """The points and the GPU's properties that rank 0 sends to all ranks. If they cannot be read, the reason,
    since the other ranks wait for an answer."""
    try:
        points = [point.values for point in known(workspace.device)]
        return json.dumps({"gpu": asdict(gpu_of(workspace.device)), "points": points})
    except (ValueError, OSError, RuntimeError) as error:
        return json.dumps({"failed": str(error)})


_agreed: WeakKeyDictionary[GpuWorkspace, _Agreement] = WeakKeyDictionary()
agreements.append(_agreed)
