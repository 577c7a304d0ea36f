"""Chooses and applies the schedule of a joint graph, and tells what it did and what was refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.distributed import ProcessGroup

from autofuse.lowering.proofs import UNPROVEN
from autofuse.lowering.torch_internals import group_ranks_of, group_world, guard_multiple, seen_symbols
from autofuse.passes.graph.anchors import Anchor, find_anchors, group_of
from autofuse.passes.report import Schedule
from autofuse.passes.tails import Candidate, Decide, Decision

from .layouts import Input, Layouts
from .slices import Fit
from .split import Stream, find_stream, split, stream_dim

AUTO, UNCHANGED, EVERY, OWNER, SPLIT = "auto", "unchanged", "every", "owner", "split"
SCHEDULES = (AUTO, UNCHANGED, EVERY, OWNER, SPLIT)
"""What the option `schedule` may be."""

WITH_TAILS = (EVERY, OWNER, SPLIT)
"""Those under which fused ops apply every tail that they can; with `auto` those that `search.py` chooses."""


@dataclass(frozen=True)
class Proof:
    """What must hold on all ranks of a group, or a graph may not run as it was scheduled.

    Attributes:
        group: the group.
        digest: of all that the proof rests on; equal on all ranks. Empty if there is no proof.
        inputs: names of the inputs of the graph that must have the same values.
    """

    group: str | ProcessGroup
    digest: str
    inputs: tuple[str, ...]


@dataclass
class Basis:
    """What schedules of a graph rest on.

    Attributes:
        inputs: what is known of the inputs of a graph.
        proofs: those that schedules rest on until now.
    """

    inputs: Callable[[fx.Graph], Mapping[fx.Node, Input]] = lambda graph: {}
    proofs: list[Proof] = field(default_factory=list)

    def prove(self, layouts: Layouts, nodes: Sequence[fx.Node], more: str, checked: bool) -> str:
        """A digest of the proofs that these values are replicated, and of `more`; empty if they are not.

        checked: the ranks will compare the bits of declared values before the graph runs. If they will not,
        a proof may rest on values alone that were compared with an earlier graph.
        """
        if self.why_not(layouts, nodes, checked):
            return ""
        names, digest = self._declared(layouts, nodes), layouts.proof(nodes, more)
        if names and checked:
            self.proofs.append(Proof(layouts.group, digest, tuple(sorted(names))))
        return digest

    def why_not(self, layouts: Layouts, nodes: Sequence[fx.Node], checked: bool) -> str:
        """Why there is no such proof; empty if there is one."""
        for node in nodes:
            if not layouts.replicated(node):
                return layouts.why(node)
        compared = {name for proof in self.proofs for name in proof.inputs}
        new = () if checked else sorted(self._declared(layouts, nodes) - compared)
        return f"no earlier graph compares {new[0]}, and a backward cannot" if new else ""

    def _declared(self, layouts: Layouts, nodes: Sequence[fx.Node]) -> set[str]:
        known = self.inputs(layouts.graph)
        return {known[n].name for n in layouts.inputs_of(nodes) if n in known and known[n].declared}


class Prover:
    """Proves that owners may apply the tails of a graph."""

    def __init__(self, graph: fx.Graph, kind: str, basis: Basis) -> None:
        self._graph, self._basis = graph, basis
        self._checked = kind != "backward"
        self._layouts: dict[frozenset[int], Layouts] = {}

    def prove(self, candidate: Candidate) -> str:
        """The proof by which owners apply the tail; empty if every rank does."""
        layouts = None if self._not_by_owners(candidate) else self._over(candidate.group)
        if layouts is None:
            return ""
        return self._basis.prove(layouts, candidate.operands, candidate.text, self._checked)

    def why_not(self, candidate: Candidate) -> str:
        """Why there is no proof; empty if there is one."""
        layouts = self._over(candidate.group)
        if self._not_by_owners(candidate) or layouts is None:
            return self._not_by_owners(candidate) or "its group is not known"
        return self._basis.why_not(layouts, candidate.operands, self._checked)

    @staticmethod
    def _not_by_owners(candidate: Candidate) -> str:
        if not candidate.whole:
            return "every rank has the rows that it owns alone"
        return "owners apply no tails in the order ring" if candidate.given["order"] == "ring" else ""

    def _over(self, named: object) -> Layouts | None:
        group = group_of(named)
        if group is None:
            return None
        ranks = group_ranks_of(group)
        if ranks not in self._layouts:
            self._layouts[ranks] = Layouts(self._graph, group, self._basis.inputs(self._graph))
        return self._layouts[ranks]


def fixed(schedule: str, prover: Prover) -> Decide:
    """Decides about tails as a schedule of `WITH_TAILS` does."""

    def decide(candidate: Candidate) -> Decision:
        if schedule != OWNER or not candidate.whole:
            return Decision(True)
        return Decision(True, prover.prove(candidate) or UNPROVEN)

    return decide


def reschedule(joint: fx.Graph, basis: Basis) -> list[Schedule]:
    """Splits what can be split in a joint graph, in place. Every group with an all_reduce has a proof, on
    every rank."""
    inputs = basis.inputs(joint)
    told: list[Schedule] = []
    for group, anchors in _all_reduces(joint).items():
        world = group_world(group)
        assert world is not None
        layouts = Layouts(joint, group, inputs)
        fit = Fit(world, seen_symbols(joint))
        stream = find_stream(joint, anchors, fit, layouts.replicated)
        if stream is not None and not all(guard_multiple(joint, s, world) for s in fit.assumed):
            # Calls with other numbers of rows find another graph.
            fit = Fit(world)
            stream = find_stream(joint, anchors, fit, layouts.replicated)
        told.append(_told(stream, anchors, layouts, fit))
        if stream is None:
            basis.proofs.append(Proof(group, "", ()))
            continue
        rests_on = stream.rests_on
        names = {inputs[n].name for n in layouts.inputs_of(rests_on) if n in inputs}
        basis.proofs.append(Proof(group, layouts.proof(rests_on), tuple(sorted(names))))
        split(joint, stream)
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


def _told(stream: Stream | None, anchors: list[Anchor], layouts: Layouts, fit: Fit) -> Schedule:
    done = {} if stream is None else {a.node: a for a in stream.reductions.values()}
    refused = dict.fromkeys(_why_not(anchor, layouts, fit) for anchor in anchors if anchor.node not in done)
    gathered = [] if stream is None else stream.gathered
    return Schedule(
        name=UNCHANGED if stream is None else SPLIT,
        world=fit.world,
        reductions=len(done),
        gathers=len(gathered),
        bytes_reduced=0 if stream is None else stream.bytes_reduced,
        bytes_gathered=0 if stream is None else stream.bytes_gathered,
        refused=tuple(refused),
    )


def _why_not(anchor: Anchor, layouts: Layouts, fit: Fit) -> str:
    """Why an all_reduce stays whole."""
    place = anchor.source or anchor.kind
    readers = [user for wait in anchor.waits for user in wait.users]
    for reader in readers:
        for read in reader.all_input_nodes:
            if read not in anchor.waits and not layouts.replicated(read):
                return f"{place}: {layouts.why(read)}"
    if stream_dim(anchor, fit) is None:
        return f"{place}: its rows cannot be cut into {fit.world} equal parts"
    return f"{place}: too little of what reads it can be computed on slices"
