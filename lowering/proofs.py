"""What the ranks of a group tell each other before a graph runs whose schedule rests on a proof."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autofuse.lowering.cpu.rendezvous import all_gather, visit
from autofuse.lowering.limits import default_limit_s, limit_s
from autofuse.lowering.torch_internals import group_store, resolve_group

VISITS = "autofuse/proofs"


def exchange(group: str | ProcessGroup, text: str) -> list[str]:
    """The texts of all ranks of the group, which all call this. RuntimeError for ranks that do not come in
    time."""
    group = resolve_group(group)
    if dist.get_backend(group) == "fake":
        return [text] * group.size()
    store, rank = group_store(group), group.rank()
    limit = limit_s(default_limit_s(group, torch.device("cpu")))
    prefix = f"{VISITS}/{visit(store, VISITS, rank)}"
    purpose = "to compare what the schedules of their graphs rest on"
    return all_gather(store, prefix, rank, [None] * group.size(), text, limit, None, purpose)
