"""The hosts of a group tell each other numbers before a call."""

from __future__ import annotations

import json
from collections.abc import Sequence

from autofuse.lowering.cpu.rendezvous import NotShared
from autofuse.lowering.cpu.told import exchange_all
from autofuse.lowering.cpu.workspaces import workspace_for

from .workspace import GpuWorkspace

SPIN_US = 3000
"""A host that sleeps takes up to a millisecond to wake, and its GPU has nothing to do meanwhile."""


def values_of_all(
    workspace: GpuWorkspace, op: str, site: str, what: str, values: Sequence[int]
) -> list[list[int]]:
    """The values of each rank; any number of integers of 64 bits. All ranks call it together.

    The hosts use memory that they share, or else the store of the group, which takes longer.
    """
    try:
        with workspace_for(workspace.group).call(op, site, what, 0, SPIN_US) as call:
            return exchange_all(call, values)
    except NotShared:
        return [json.loads(each) for each in workspace.meet(json.dumps(list(values)))]
