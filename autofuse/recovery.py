"""After a failure: has a fused op failed, and its group becomes usable again."""

import json
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch.distributed import ProcessGroup

from autofuse import agreeing
from autofuse.groups import Group, group_name
from autofuse.lowering import watcher
from autofuse.lowering.cpu import workspaces as on_cpus
from autofuse.lowering.cpu.identities import known
from autofuse.lowering.cpu.rendezvous import (
    RESETS,
    VISITS,
    all_gather,
    reset_step,
    set_visits,
    visit,
    visits,
)
from autofuse.lowering.gpu.support import has_triton
from autofuse.lowering.limits import default_limit_s, limit_s
from autofuse.lowering.torch_internals import group_store, resolve_group
from autofuse.warm_up import has_gpus


def check(group: Group = None) -> None:
    """Raises RuntimeError if a fused op on GPUs has failed: of this group, or (None) of any.

    For programs that replay CUDA graphs of their own, for instance where they read the loss: fused ops and
    compiled functions look by themselves. Waits for no GPU.
    """
    watcher.check(None if group is None else {group_name(group, "check")})


def reset(group: Group = None) -> None:
    """Makes a group (None: that of all ranks) usable again after a fused op has failed.

    All its ranks call it together, not while a CUDA graph is captured. Ranks that wait for this one, to meet
    for the first time or in a fused op on CPUs, raise at once. Graphs that were captured before can be
    replayed afterwards. What the failed op and later ones have returned stays wrong. RuntimeError if a rank
    does not come; then all may call it again.
    """
    name = group_name(group, "reset")
    meeting = _Meeting(resolve_group(name), torch.device("cuda" if has_gpus(name) else "cpu"))
    try:
        _reset(meeting)
    except BaseException:
        meeting.take_back()
        raise
    visit(meeting.store, RESETS, meeting.rank)


class _Meeting:
    """Of all ranks that reset a group for the same time, in steps."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.store, self.rank = group, group_store(group), group.rank()
        self.number = visits(self.store, RESETS, self.rank) + 1
        self._limit = limit_s(default_limit_s(group, device))
        self._steps: list[str] = []

    def all_gather(self, value: str) -> list[str]:
        self._steps.append(reset_step(self.number, len(self._steps)))
        where, peers = self._steps[-1], known(self.group)
        return all_gather(
            self.store, where, self.rank, peers, value, self._limit, None, "to reset the group", resets=True
        )

    def take_back(self) -> None:
        """A rank that comes later must not find us."""
        for step in self._steps:
            with suppress(RuntimeError):
                self.store.delete_key(f"{step}/{self.rank}")


def _reset(meeting: _Meeting) -> None:
    group, store, rank = meeting.group, meeting.store, meeting.rank
    on_cpus.give_up(group, "autofuse.reset was called")
    gpus = _gpus() if has_triton() else None
    made = gpus is not None and gpus.made_of(group) is not None
    mine = [made, *(visits(store, key, rank) for key in VISITS)]
    told = [json.loads(each) for each in meeting.all_gather(json.dumps(mine))]
    made_by, *counts = zip(*told, strict=True)
    for key, of_ranks in zip(VISITS, counts, strict=True):
        # Ranks that gave up before the group had met have visited the store more often than others.
        set_visits(store, key, rank, max(of_ranks))
    on_cpus.forget(group)
    agreeing.forget(group.group_name)
    if gpus is not None:
        if all(made_by):
            gpus.reset(group, meeting.number, meeting.all_gather)
        else:
            gpus.forget(group)
    meeting.all_gather("")


def _gpus() -> Any:
    return import_module("autofuse.lowering.gpu.memory.workspace")  # it needs Triton
