"""Ranks that share one GPU, which NCCL refuses: their collectives run in the host's memory, over gloo."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

OPS = (
    "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "allreduce_",
    "allreduce_coalesced_", "alltoall_", "alltoall_base_", "broadcast_", "reduce_scatter_",
    "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
)  # fmt: skip
_library = torch.library.Library("c10d", "IMPL")


def share_gpu() -> str:
    """Call it before the process group is made. Returns the group's backend."""
    torch.cuda.set_device(0)
    workspace = "autofuse.lowering.gpu.memory.workspace"
    patch(f"{workspace}.check_links").start()
    # Copies within a GPU may be kernels, which find no room beside one that waits for them.
    patch(f"{workspace}.is_serial", lambda device: True).start()
    for name in OPS:
        _library.impl(name, _over_host(name), "CUDA", allow_override=True)
    return "gloo"


def _over_host(name: str) -> Callable[..., Any]:
    op = getattr(torch.ops.c10d, name)

    def run(*args: Any) -> Any:
        copies = tree_map_only(Tensor, lambda given: given.detach().cpu(), args)
        results = op(*copies)
        work = results[-1] if isinstance(results, tuple) else results
        work.wait()
        # All of these ops write to what they are given first, and return that.
        for given, copy in zip(tree_leaves(args[0]), tree_leaves(copies[0]), strict=True):
            given.copy_(copy)
        return (args[0], work) if isinstance(results, tuple) else work

    return run
