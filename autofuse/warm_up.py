"""Does the work of the first call ahead of time: the ranks of a group meet and share their memory."""

import logging

import torch
import torch.distributed as dist

from autofuse.groups import Group, group_name
from autofuse.lowering.cpu.rendezvous import NotShared
from autofuse.lowering.cpu.workspace import SharedMemoryFull
from autofuse.lowering.cpu.workspaces import workspace_for as cpu_workspace_for
from autofuse.lowering.gpu.support import has_triton
from autofuse.lowering.torch_internals import resolve_group

log = logging.getLogger(__name__)


def warmup(group: Group = None) -> None:
    """Makes the workspace of a group (None: of all ranks), which the first fused op would otherwise make.

    All ranks of the group call it together, on GPUs after `torch.cuda.set_device`. Ranks cannot meet while a
    CUDA graph is captured: without a workspace the calls in it run unfused. Kernels are still compiled when
    they are first called, so run every call once at its sizes before you capture it.

    Warns if the group shares no memory; its fused ops then run unfused. Raises ValueError without an
    initialised group, RuntimeError when a rank does not come or fails.
    """
    if not dist.is_initialized():
        raise ValueError("warmup: there is no process group; call torch.distributed.init_process_group first")
    name = group_name(group, "warmup")
    try:
        if has_gpus(name):
            _make_on_gpu(name)
        else:
            cpu_workspace_for(name)
    except (NotShared, SharedMemoryFull) as error:
        log.warning("fused ops of group %s run unfused: %s", name, error)


def has_gpus(name: str) -> bool:
    """Whether the group has a backend for GPU memory. gloo copies through CPU memory."""
    backends = dict(part.split(":") for part in dist.get_backend_config(resolve_group(name)).split(","))
    return torch.cuda.is_available() and backends.get("cuda", "gloo") != "gloo"


def _make_on_gpu(name: str) -> None:
    if not has_triton():
        log.warning("fused ops of group %s run unfused: Triton is not installed", name)
        return
    from autofuse.lowering.gpu.choice.choose import points_of
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    points_of(workspace_for(name, torch.device("cuda", torch.cuda.current_device())))
