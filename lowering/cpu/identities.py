"""The processes behind ranks, as the meetings of other groups have told: a rank that has died is named by a
group that has not met yet, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from .rendezvous import Peer


def known(group: ProcessGroup) -> list[Peer | None]:
    """The process of each rank of the group; None where no group with that rank has met in this process."""
    found = _found()
    return [found.get(rank) for rank in dist.get_process_group_ranks(group)]


def remember(group: ProcessGroup, peers: Sequence[Peer]) -> None:
    """Keep the processes of a group that has met."""
    _found().update(zip(dist.get_process_group_ranks(group), peers, strict=True))


def _found() -> dict[int, Peer]:
    """By rank of the group of all ranks: another one, later, may consist of other processes."""
    everybody = dist.group.WORLD
    return {} if everybody is None else _identities.setdefault(everybody, {})


_identities: WeakKeyDictionary[ProcessGroup, dict[int, Peer]] = WeakKeyDictionary()
