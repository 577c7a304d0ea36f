"""What the groups of this process hold of shared memory, and for which calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autofuse.groups import Group, group_name
from autofuse.lowering.cpu import workspaces as of_cpus
from autofuse.lowering.cpu.scratch import scratch_bytes
from autofuse.lowering.cpu.workspace import Workspace
from autofuse.lowering.notes import place

if TYPE_CHECKING:
    from autofuse.lowering.gpu.memory.workspace import GpuWorkspace

_ON_GPUS = "autofuse.lowering.gpu.memory.workspace"


def memory_summary(group: Group = None) -> str:
    """A table of the memory that this rank holds for fused ops, of every group that has met, or of one.

    Capacity is what there is, needed is the most that a call has used of it. Memory of a group is kept until
    the group is destroyed; on GPUs, what CUDA graphs were captured with, as long as they live.
    """
    found = group_summaries(None if group is None else group_name(group, "memory_summary"))
    return "\n\n".join(found) or "no group holds memory: none has run a fused op yet"


def group_summaries(wanted: str | None = None) -> list[str]:
    """A table for each group, or for the one of that name."""
    return ["\n".join(lines) for name, lines in _groups() if wanted in (None, name)]


def _groups() -> Iterator[tuple[str, list[str]]]:
    for found in of_cpus.in_use():
        yield found.group_name, _of_cpus(found)
    if _ON_GPUS not in sys.modules:  # then no group has met on GPUs
        return
    from autofuse.lowering.gpu.memory.workspace import workspaces

    for workspace in workspaces():
        yield workspace.group_name, _of_gpus(workspace)


def _of_cpus(workspace: Workspace) -> list[str]:
    needed, call = 0, ""
    for op, site, _, nbytes in list(workspace._keys):
        if nbytes > needed:
            needed, call = nbytes, f"{op} at {place(site)}"
    head = (
        f"group {workspace.group_name}, rank {workspace.rank} of {workspace.world}, shared memory of the host"
    )
    rows, private = [("2 buffers", 2 * workspace.capacity, 2 * needed, call)], scratch_bytes(workspace)
    if private:
        rows.append(("private", private, private, "steps of optimizers that clip, and of LAMB"))
    return [head, *_table(rows)]


def _of_gpus(workspace: GpuWorkspace) -> list[str]:
    head = f"group {workspace.group_name}, rank {workspace.rank} of {workspace.world}, {workspace.device}"
    from autofuse.lowering.gpu.memory.allocation import itemsize_of, sizes_of

    rows = []
    for name, capacity in sizes_of(workspace.memory).items():
        needed, call = workspace.needs.get(name, (0, ""))
        rows.append((name, capacity, needed * itemsize_of(name), call))
    older = sum(workspace._held.outgrown().values())
    return [head, *_table(rows), *([f"  {_mib(older)} more that CUDA graphs may use"] if older else [])]


def _table(rows: list[tuple[str, int, int, str]]) -> list[str]:
    total = sum(capacity for _, capacity, _, _ in rows)
    cells = [("", "capacity", "needed", "by")]
    cells += [(name, _mib(capacity), _mib(needed), call) for name, capacity, needed, call in rows]
    cells += [("in all", _mib(total), "", "")]
    width = [max(len(row[i]) for row in cells) for i in range(3)]
    return [f"  {a:<{width[0]}}  {b:>{width[1]}}  {c:>{width[2]}}  {by}".rstrip() for a, b, c, by in cells]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
