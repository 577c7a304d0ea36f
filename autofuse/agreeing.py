"""A compiled graph whose schedule rests on proofs: the ranks agree on them before it runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdRef

from autofuse.declarations import Given, plain
from autofuse.lowering.proofs import exchange
from autofuse.lowering.torch_internals import compiled_frame
from autofuse.passes.schedules.layouts import bits
from autofuse.passes.schedules.schedule import Proof

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Outcome:
    """Whether the ranks had the same proofs for the graphs of one frame; kept over all calls of these graphs.

    groups: the groups whose ranks compare the proofs; calls: how often a graph ran; chosen: None before the
    ranks have compared.
    """

    groups: frozenset[str] = frozenset()
    calls: int = 0
    chosen: bool | None = None

    def __post_init__(self) -> None:
        _of_all_frames.add(self)


_of_all_frames: WeakSet[Outcome] = WeakSet()


def forget(group_name: str) -> None:
    """The ranks of this group compare the proofs of all graphs again: some may have given up where others
    remember an outcome."""
    for outcome in list(_of_all_frames):
        if group_name in outcome.groups:
            outcome.calls, outcome.chosen = 0, None


Outcomes: TypeAlias = dict[Hashable, Outcome]

_of_frames: dict[int, Outcomes] = {}


def outcomes_of_frame() -> Outcomes:
    """The outcomes of the frame of Python code that is compiled now: none if this is for the first time.

    A rank may compile a frame again where its peers do not, as for a contracted dim that changes there alone.
    It must not wait for them then, so that graphs of one frame share what their ranks have compared.
    """
    known = compiled_frame()
    if known is None:
        return {}
    frame, times = known
    if not times:
        _of_frames[frame] = {}
    return _of_frames.setdefault(frame, {})


class Agreed:
    """Calls `compiled` once all ranks have the same proofs, and `plainly` if they do not.

    `plainly`: the same graph as the program has it. Both take the same arguments. `outcomes`: of the frame.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        plainly: Callable[..., Any],
        proofs: Sequence[Proof],
        inputs: Given,
        outcomes: Outcomes,
    ) -> None:
        self._compiled, self._plainly, self._proofs = compiled, plainly, proofs
        self._inputs = inputs
        self._every = inputs.check_every
        self._outcomes = outcomes
        self._outcome: Outcome | None = None

    def __call__(self, *args: Any) -> Any:
        if self._outcome is None:
            groups = frozenset(_name(proof.group) for proof in self._proofs)
            self._outcome = self._outcomes.setdefault(self._rests_on(args), Outcome(groups))
        known = self._outcome
        if known.chosen is None or (self._every and known.calls % self._every == 0):
            known.chosen = self._choose(args)
        known.calls += 1
        return self._compiled(*args) if known.chosen else self._plainly(*args)

    def _rests_on(self, args: tuple[Any, ...]) -> Hashable:
        """The proofs, and the parameters that they are about: of one frame there may be many models."""
        names = {name for proof in self._proofs for name in proof.inputs}
        given = zip(self._inputs.inputs, args, strict=False)
        parameters = (arg for each, arg in given if each.name in names and isinstance(arg, nn.Parameter))
        proofs = tuple((_name(proof.group), proof.digest) for proof in self._proofs)
        return proofs, frozenset(map(WeakIdRef, parameters))

    def _choose(self, args: tuple[Any, ...]) -> bool:
        agreed = [self._agree(proof, args) for proof in self._proofs]  # no rank leaves out an exchange
        if all(agreed):
            return True
        log.warning(
            "autofuse: a graph runs uncompiled, as the program has it: its ranks have different constants, "
            'so that slices cannot be proven equal; compile it with options={"schedule": "unchanged"}'
        )
        return False

    def _agree(self, proof: Proof, args: tuple[Any, ...]) -> bool:
        """Whether all ranks have this proof. RuntimeError on all ranks where a declared value differs."""
        names = [known.name for known in self._inputs.inputs]
        values = {name: plain(args[names.index(name)]) for name in proof.inputs if name in names}
        found = {name: bits(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        of_ranks = [json.loads(text) for text in exchange(proof.group, json.dumps([proof.digest, found]))]
        if any(digest != proof.digest for digest, _ in of_ranks):
            return False
        for name, mine in of_ranks[0][1].items():
            other = [rank for rank, (_, theirs) in enumerate(of_ranks) if theirs.get(name) != mine]
            if other:
                raise RuntimeError(
                    f"{name} was declared to be the same on all ranks of group {_name(proof.group)}, but "
                    f"rank {other[0]} of the group has other values than rank 0: make them equal, or do not "
                    f"declare it (autofuse.replicated)"
                )
        return True


def _name(group: str | ProcessGroup) -> str:
    return group if isinstance(group, str) else group.group_name
