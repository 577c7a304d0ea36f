"""Memory that the GPUs of a group map from each other, and what torch computes in it."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed import ProcessGroup


def symmetric_memory(device_type: str) -> str | None:
    """Name of the allocator of torch's symmetric memory on devices of this type; None if there is none."""
    try:
        from torch.distributed import _symmetric_memory

        return _symmetric_memory.get_backend(torch.device(device_type)) or None
    except (ImportError, RuntimeError, AttributeError):
        return None


def symmetric_empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that the other ranks of a group can map, `size` elements of `dtype`."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(size, dtype=dtype, device=device)


def symmetric_views(own: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor]:
    """`own`, from `symmetric_empty`, as mapped from every rank of the group. All ranks call it together.

    torch takes GPUs of one index for one GPU, unless it is told not to: where each process sees but one of
    them, all are number 0. Whether they are one GPU is for the caller to ask.
    """
    from torch.distributed import _symmetric_memory

    with _environment("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1"):
        handle = _symmetric_memory.rendezvous(own, group.group_name)
    views = [handle.get_buffer(r, own.shape, own.dtype) for r in range(group.size())]
    views[group.rank()] = own
    return views


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def symmetric_barrier(own: torch.Tensor, group: ProcessGroup) -> None:
    """Of the streams of all ranks of the group; `own`: from `symmetric_empty`."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.rendezvous(own, group.group_name).barrier()


def symmetric_all_reduce(x: torch.Tensor, group_name: str, once: bool) -> torch.Tensor:
    """Sum over the ranks of `x`, which is symmetric memory.

    `once`: every rank reads all of x from all ranks, and the sum is in ordinary memory. Else: every rank
    reduces its share and stores the sum in the x of all ranks.
    """
    if once:
        return torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group_name)
    return torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group_name)


def symmetric_all_reduce_into(out: torch.Tensor, x: torch.Tensor, group_name: str) -> None:
    """The sum over the ranks of `x`, which is symmetric memory, in two steps; `out` is ordinary memory."""
    torch.ops.symm_mem.two_shot_all_reduce_out(x, "sum", group_name, out)


def enable_symmetric_memory(group: ProcessGroup) -> None:
    """Let Inductor's async tensor parallelism use symmetric memory for the group; newer torch always does."""
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)


def async_tp_matmul_reduce_scatter(x: torch.Tensor, w: torch.Tensor, group_name: str) -> torch.Tensor:
    """This rank's rows of the sum over the ranks of `x @ w`, by torch's async tensor parallelism."""
    result: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group_name)
    return result


def async_tp_all_gather_matmul(
    part: torch.Tensor, w: Sequence[torch.Tensor], group_name: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gathered rows X, and X times every weight, by torch's async tensor parallelism."""
    gathered, outputs = torch.ops.symm_mem.fused_all_gather_matmul(part, list(w), 0, group_name)
    return gathered, list(outputs)


def symmetric_all_to_all_2d(
    rows: torch.Tensor, out: torch.Tensor, splits: torch.Tensor, found: torch.Tensor, group_name: str
) -> None:
    """Send rows, by rank and expert with counts `splits`, to the ranks of their experts, by expert and rank.

    All tensors are symmetric memory of NVSHMEM. The call writes counts and offsets to `found`: [2, W * E].
    """
    torch.ops.symm_mem.all_to_all_vdev_2d(rows, out, splits, found, group_name)


def symmetric_all_to_all_2d_back(
    rows: torch.Tensor, out: torch.Tensor, given: torch.Tensor, found: torch.Tensor, group_name: str
) -> None:
    """The reverse. `given`: [2, W * E], counts and offsets of `rows`, by expert and rank."""
    torch.ops.symm_mem.all_to_all_vdev_2d_offset(rows, out, given, found, group_name)
