"""Process groups: names, ranks, stores, limits; tensors whose parts lie on their ranks."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, Store
from torch.distributed.distributed_c10d import _resolve_process_group


def group_size(group: str | ProcessGroup) -> int:
    """Number of ranks of a process group, given by itself or by its name."""
    return resolve_group(group).size()


def group_rank(group: str | ProcessGroup) -> int:
    """This process's number in a process group, given by itself or by its name."""
    return resolve_group(group).rank()


# As `torch.compiler.assume_constant_result` does, which imports dynamo: it takes the results for constants.
for _function in (group_size, group_rank):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def resolve_group(group: str | ProcessGroup) -> ProcessGroup:
    """The group of this name, or the group itself. RuntimeError if there is no such group."""
    return group if isinstance(group, ProcessGroup) else _resolve_process_group(group)  # type: ignore[arg-type]


def is_destroyed(group: ProcessGroup) -> bool:
    """Whether torch no longer knows a group by its name."""
    try:
        return resolve_group(group.group_name) is not group
    except RuntimeError:
        return True


def group_store(group: ProcessGroup) -> Store:
    """The key-value store that all ranks of `group` share, with a prefix of its own."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    return _get_process_group_store(group)


def group_timeout_s(group: ProcessGroup, device: torch.device) -> float | None:
    """After how many seconds collectives of the group on such devices fail; None where that is not known."""
    try:
        seconds: float = group._get_backend(device).options._timeout.total_seconds()
    except (RuntimeError, AttributeError):
        return None
    return seconds


def fake_store() -> Store:
    """A store that holds no values, for groups of the backend `fake`, whose collectives move no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

    return FakeStore()


def finished_work(result: Any) -> Any:
    """A finished `c10d::Work`, as operators return it. Its future holds `result`, which DDP reads."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future).boxed()


def group_world(group: str | ProcessGroup) -> int | None:
    """Number of ranks of the group; None if there is no group of that name."""
    try:
        return group_size(group)
    except (RuntimeError, ValueError, KeyError):
        return None


def group_ranks_of(group: str | ProcessGroup) -> frozenset[int]:
    """The ranks of a group, as numbers of the whole job; none if there is no group of that name."""
    try:
        return frozenset(torch.distributed.get_process_group_ranks(resolve_group(group)))
    except (RuntimeError, ValueError, KeyError):
        return frozenset()


def group_ranks() -> dict[str, list[int]]:
    """The ranks of every group of this process, by the group's name."""
    from torch.distributed.distributed_c10d import _world

    ranks = {str(name): sorted(_world.pg_group_ranks[group]) for group, name in _world.pg_names.items()}
    return dict(sorted(ranks.items()))


def traced_group(value: object) -> ProcessGroup | None:
    """The process group that a value in the metadata of a graph is, or stands for as a fake object."""
    value = getattr(value, "real_obj", value)
    return value if isinstance(value, ProcessGroup) else None


def group_spans_hosts(group: str | ProcessGroup) -> bool:
    """Whether the group has ranks on several hosts, by the environment that the launcher sets.

    All ranks must agree at compile time, without communication. If the launcher does not set
    `LOCAL_WORLD_SIZE`, the first call finds out, and runs the plain collectives.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local <= 0:
        return False
    ranks = torch.distributed.get_process_group_ranks(resolve_group(group))
    return len({rank // local for rank in ranks}) > 1


def sharded_vector(
    mine: torch.Tensor, parts: Sequence[tuple[int, int]], length: int, group: ProcessGroup
) -> Any:
    """A vector of which rank r holds elements `[start, stop)` = `parts[r]`, this rank `mine`; as
    torch.distributed.checkpoint takes it. No communication."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    device = mine.device.type if mine.device.type == "cpu" else f"{mine.device.type}:{mine.device.index}"
    shards = {
        rank: ShardMetadata([start], [stop - start], f"rank:{rank}/{device}")
        for rank, (start, stop) in enumerate(parts)
        if start < stop
    }
    properties = TensorProperties(dtype=mine.dtype)
    whole = ShardedTensorMetadata(list(shards.values()), torch.Size([length]), properties)
    own = [Shard(mine, shards[group.rank()])] if group.rank() in shards else []
    return ShardedTensor._init_from_local_shards_and_global_metadata(own, whole, process_group=group)


def local_shards(value: Any) -> list[torch.Tensor] | None:
    """What this rank holds of a `sharded_vector`; None for anything else."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else None
