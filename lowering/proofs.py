"""What the ranks of a group tell each other before a graph or a call runs whose schedule rests on a proof."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autofuse.lowering.cpu.rendezvous import VISITS, all_gather, visit
from autofuse.lowering.cpu.workspace import Workspace
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.limits import default_limit_s, limit_s
from autofuse.lowering.torch_internals import group_store, resolve_group

UNPROVEN = "unproven"
"""Stands for a proof on a rank that has none, but compares proofs with the other ranks."""

_agreed: WeakKeyDictionary[Workspace, dict[tuple[str, str], bool]] = WeakKeyDictionary()


def exchange(group: str | ProcessGroup, text: str) -> list[str]:
    """The texts of all ranks of the group. All ranks call this together.

    RuntimeError if a rank does not come in time. This rank's text is then removed, so that a rank that comes
    later fails as well."""
    group = resolve_group(group)
    if dist.get_backend(group) == "fake":
        return [text] * group.size()
    store, rank = group_store(group), group.rank()
    limit = limit_s(default_limit_s(group, torch.device("cpu")))
    prefix = f"{VISITS[2]}/{visit(store, VISITS[2], rank)}"
    purpose = "to compare what the schedules of their graphs rest on"
    try:
        return all_gather(store, prefix, rank, [None] * group.size(), text, limit, None, purpose)
    except BaseException:
        with suppress(RuntimeError):
            store.delete_key(f"{prefix}/{rank}")
        raise


def agreed(group_name: str, call: str, proof: str) -> bool:
    """Whether all ranks have this proof for calls of this kind on CPU ranks, and none is `UNPROVEN`.

    All ranks call this before the first call of the kind; they meet in their shared memory.
    """
    workspace = workspace_for(group_name)
    known = _agreed.setdefault(workspace, {})
    found = known.get((call, proof))
    if found is None:
        digest = int.from_bytes(hashlib.blake2b(proof.encode(), digest_size=8).digest(), "little") >> 1
        with workspace.call("agree on a proof", "", call, 0) as meeting:
            of_ranks = meeting.exchange([digest])
        alike = all(value == of_ranks[0] for value in of_ranks)
        found = known[call, proof] = alike and proof != UNPROVEN
    return found
