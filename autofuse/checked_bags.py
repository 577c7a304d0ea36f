"""Eager calls of embedding bags whose tensors are laid out like those of a call that has been checked.

To check three tensors a table takes longer than all else that the host does in a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.direct import PLAIN, is_plain
from autofuse.lowering.gpu.embedding.again import distinct
from autofuse.lowering.torch_internals import alike

MOST_LISTS = 64
"""Lists of tables that are remembered."""

MOST_TRIES = 64
"""How many calls of one list of tables are remembered: to check and remember a call takes longer than to
check it."""


class Checked(NamedTuple):
    """What was checked. tables, indices, offsets: whether other tensors are laid out alike; distinct: offsets
    that are compared; dims: of the tables; plain: whether the call may go past the dispatcher without
    gradients; trains: whether a tensor needs one; tries: how many calls of these tables were remembered."""

    tables: Callable[..., bool]
    indices: Callable[..., bool]
    offsets: Callable[..., bool]
    distinct: int
    dims: list[int]
    plain: bool
    trains: bool
    tries: int

    @property
    def is_plain(self) -> bool:
        """Whether the call may go past the dispatcher now."""
        return self.plain and not (self.trains and torch.is_grad_enabled())


_checked: dict[tuple[int, int], Checked] = {}
"""By the id of the first table and the number of tables. It only finds an entry: the layouts are compared
whatever has this id now."""


def checked(tables: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> Checked | None:
    """What was checked of a call of tensors that are laid out like these; None if they have to be checked."""
    found = _checked.get((id(tables[0]), len(tables))) if tables else None
    if found is None or not len(tables) == len(indices) == len(offsets):
        return None
    starts = distinct(offsets)
    if len(starts) != found.distinct or not found.offsets(*starts):
        return None
    return found if found.tables(*tables) and found.indices(*indices) else None


def remember(
    tables: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor]
) -> Checked | None:
    """Remember that these have been checked; None if no later call is to be compared with them."""
    starts, kind = distinct(offsets), (id(tables[0]), len(tables))
    before = _checked.get(kind)
    tries = 0 if before is None else before.tries
    if tries == MOST_TRIES or not {*map(type, tables), *map(type, indices), *map(type, starts)} <= {*PLAIN}:
        return None
    if before is None and len(_checked) == MOST_LISTS:
        _checked.clear()
    every = (*tables, *indices, *starts)
    with torch.no_grad():
        plain = is_plain(every)
    found = Checked(
        alike(tables), alike(indices, lengths=False), alike(starts, lengths=len(starts) > 1), len(starts),
        [w.shape[1] for w in tables], plain, any(t.requires_grad for t in every), tries + 1,
    )  # fmt: skip
    _checked[kind] = found
    return found
