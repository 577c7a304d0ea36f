"""The names of schedules, and the proofs that schedules rest on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.distributed import ProcessGroup

from autofuse.lowering.proofs import UNPROVEN
from autofuse.lowering.torch_internals import group_ranks_of
from autofuse.passes.graph.anchors import group_of
from autofuse.passes.tails import Candidate, Decide, Decision

from .layouts import Input, Layouts

AUTO, UNCHANGED, EVERY, OWNER, SPLIT = "auto", "unchanged", "every", "owner", "split"
SCHEDULES = (AUTO, UNCHANGED, EVERY, OWNER, SPLIT)
"""The values of the option `schedule`."""

WITH_TAILS = (EVERY, OWNER, SPLIT)
"""The schedules under which fused ops take every tail that they can. With `auto`, `search.py` chooses."""


_UNDECLARED = "no values are declared to be the same on all ranks: autofuse.replicated(model, ...)"


@dataclass(frozen=True)
class Proof:
    """A condition on all ranks of a group. If it does not hold, the scheduled graph must not run.

    Attributes:
        group: the group.
        digest: a digest of all that the proof rests on, equal on all ranks. Empty if there is no proof.
        inputs: names of the inputs of the graph that must have the same values.
    """

    group: str | ProcessGroup
    digest: str
    inputs: tuple[str, ...]


@dataclass
class Basis:
    """All that the schedules of a graph rest on.

    Attributes:
        inputs: returns what is known of the inputs of a graph.
        proofs: the proofs that the schedules until now rest on.
        compared: whether the ranks compare proofs before the graph runs.
        not_split: by the ranks of a group, why `auto` has not split the stream between their all_reduces.
    """

    inputs: Callable[[fx.Graph], Mapping[fx.Node, Input]] = lambda graph: {}
    proofs: list[Proof] = field(default_factory=list)
    compared: bool = False
    not_split: dict[frozenset[int], str] = field(default_factory=dict)

    def prove(self, layouts: Layouts, nodes: Sequence[fx.Node], more: str, checked: bool) -> str:
        """A digest of the proofs that these values are replicated, and of `more`; empty if they are not.

        checked: whether the ranks compare the bits of declared values before the graph runs. If not, a proof
        may rest only on values that were compared for an earlier graph.
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
        """The proof by which owners may apply the tail; empty if there is none."""
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

    def not_split(self, candidate: Candidate) -> str:
        """Why the reduction has not become a reduce_scatter."""
        group = group_of(candidate.group)
        known = None if group is None else self._basis.not_split.get(group_ranks_of(group))
        return known or _UNDECLARED

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
