"""Chooses and applies the schedule of a joint graph, and tells what it did and what was refused."""

from __future__ import annotations

import sympy
from torch import fx
from torch.distributed import ProcessGroup

from autofuse.lowering.torch_internals import (
    fixed_symbols,
    group_ranks_of,
    group_world,
    guard_multiple,
    guarded_symbols,
)
from autofuse.passes.graph.anchors import Anchor, find_anchors
from autofuse.passes.report import Considered, Schedule

from .layouts import Layouts
from .schedule import SPLIT, UNCHANGED, Basis, Proof
from .search import SplitSearch
from .slices import Fit, shape_of
from .split import Stream, find_stream, split, stream_dim

_FIXED = (
    "mark_dynamic fixes the range of its rows, so that no graph may be for some of them: drop `min` and `max`"
)
_PRICED = 'it is priced for all that lies between the all_reduces: see "schedules"'


def reschedule(joint: fx.Graph, basis: Basis, search: SplitSearch | None = None) -> list[Schedule]:
    """Splits what can be split in a joint graph, in place; with a search, where that is predicted to pay.

    Without a search every group with an all_reduce has a proof, on every rank.
    """
    inputs = basis.inputs(joint)
    told: list[Schedule] = []
    for group, anchors in _all_reduces(joint).items():
        layouts = Layouts(joint, group, inputs)
        stream, schedule = _chosen(joint, anchors, layouts, search)
        told.append(schedule)
        if search is not None:
            basis.not_split[group_ranks_of(group)] = schedule.refused[0] if schedule.refused else _PRICED
        if stream is not None:
            rests_on = stream.rests_on
            names = {inputs[n].name for n in layouts.inputs_of(rests_on) if n in inputs}
            basis.proofs.append(Proof(group, layouts.proof(rests_on), tuple(sorted(names))))
            split(joint, stream)
        elif search is None:
            basis.proofs.append(Proof(group, "", ()))
    return told


def no_proofs(joint: fx.Graph) -> list[Proof]:
    """Of a graph that is left as it is: other ranks may have proofs, and must hear that this one has none."""
    return [Proof(group, "", ()) for group in _all_reduces(joint)]


def _all_reduces(joint: fx.Graph) -> dict[str | ProcessGroup, list[Anchor]]:
    """By group, of groups of several ranks."""
    found: dict[str | ProcessGroup, list[Anchor]] = {}
    for anchor in find_anchors(joint):
        group = anchor.known_group
        if anchor.kind == "all_reduce" and group is not None and (group_world(group) or 1) > 1:
            found.setdefault(group, []).append(anchor)
    return found


def _chosen(
    joint: fx.Graph, anchors: list[Anchor], layouts: Layouts, search: SplitSearch | None
) -> tuple[Stream | None, Schedule]:
    """What is split, if anything is."""
    world = group_world(layouts.group)
    assert world is not None
    if search is not None and (why := search.why_not(anchors[0])):
        return None, _unchanged(world, (why,))
    symbols = guarded_symbols(joint)
    for fit in (Fit(world, symbols), Fit(world, symbols, padded=True)):
        stream = find_stream(joint, anchors, fit, layouts.replicated)
        considered = () if stream is None or search is None else search(stream)
        if any(each.taken and each.name != SPLIT for each in considered):
            return None, _unchanged(world, (), considered)
        # Calls with other numbers of rows find another graph.
        if stream is not None and all(guard_multiple(joint, size, world) for size in fit.assumed):
            break
    done = {} if stream is None else {a.node: a for a in stream.reductions.values()}
    refused = dict.fromkeys(_why_not(anchor, layouts, fit) for anchor in anchors if anchor.node not in done)
    if stream is None:
        return None, _unchanged(world, tuple(refused))
    gathers, nbytes = len(stream.gathered), (stream.bytes_reduced, stream.bytes_gathered)
    return stream, Schedule(SPLIT, world, len(done), gathers, *nbytes, tuple(refused), considered)


def _unchanged(world: int, refused: tuple[str, ...], considered: tuple[Considered, ...] = ()) -> Schedule:
    return Schedule(UNCHANGED, world, 0, 0, 0, 0, refused, considered)


def _why_not(anchor: Anchor, layouts: Layouts, fit: Fit) -> str:
    """Why an all_reduce stays whole."""
    place = anchor.source or anchor.kind
    readers = [user for wait in anchor.waits for user in wait.users]
    for reader in readers:
        for read in reader.all_input_nodes:
            if read not in anchor.waits and not layouts.replicated(read):
                return f"{place}: {layouts.why(read)}"
    if stream_dim(anchor, fit) is None:
        fixed = fixed_symbols(layouts.graph)
        if any(
            isinstance(size, sympy.Expr) and size.free_symbols & fixed for size in shape_of(anchor.node) or ()
        ):
            return f"{place}: {_FIXED}"
        return f"{place}: its rows cannot be cut into {fit.world} parts"
    return f"{place}: too little of what reads it can be computed on slices"
