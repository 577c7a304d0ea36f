"""A compiled graph whose schedule rests on proofs: the ranks agree on them before it runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from autofuse.declarations import Given, plain
from autofuse.lowering.proofs import exchange
from autofuse.passes.schedules.layouts import bits
from autofuse.passes.schedules.schedule import Proof

log = logging.getLogger(__name__)


class Agreed:
    """Calls `compiled` once all ranks have the same proofs, and `plainly` if they do not.

    `plainly`: the same graph as the program has it. Both take the same arguments.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        plainly: Callable[..., Any],
        proofs: Sequence[Proof],
        inputs: Given,
    ) -> None:
        self._compiled, self._plainly, self._proofs = compiled, plainly, proofs
        self._inputs = inputs
        self._every = inputs.check_every
        self._calls = 0
        self._chosen: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._chosen is None or (self._every and self._calls % self._every == 0):
            self._chosen = self._choose(args)
        self._calls += 1
        return self._chosen(*args)

    def _choose(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        agreed = [self._agree(proof, args) for proof in self._proofs]  # no rank leaves out an exchange
        if all(agreed):
            return self._compiled
        log.warning(
            "autofuse: a graph runs uncompiled, as the program has it: its ranks have different constants, "
            'so that slices cannot be proven equal; compile it with options={"schedule": "unchanged"}'
        )
        return self._plainly

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
