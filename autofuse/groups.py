"""Process groups as arguments: a ProcessGroup, a DeviceMesh, a name, or None for all ranks."""

from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autofuse.lowering.torch_internals import group_size

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | str | None


def group_name(group: Group, op: str) -> str:
    """The name of `group`; raises for a group without this rank."""
    if not dist.is_initialized():
        raise RuntimeError(
            f"{op}: there is no process group; call torch.distributed.init_process_group first"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{op}: expected a DeviceMesh of one dim, got {group.ndim}; pass mesh['name']")
        group = group.get_group()
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        name: str = group.group_name
        return name
    if isinstance(group, str):
        try:
            group_size(group)
        except (RuntimeError, LookupError) as error:
            raise ValueError(f"{op}: there is no process group called {group!r} on this rank") from error
        return group
    raise ValueError(
        f"{op}: this rank is not in the group, or {group!r} is none; "
        "pass a ProcessGroup, a DeviceMesh, a group name or None, and call the op on ranks of the group only"
    )
