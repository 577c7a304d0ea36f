"""The parameters of launches, which none of them carries out, and the memory of a group."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from autofuse.native_kernels.cuda.host import gemm
from autofuse.native_kernels.cuda.kernels import (
    dropless_combine,
    dropless_dispatch,
    expert_combine,
    expert_dispatch,
    gather_words,
    matmul_words,
)
from autofuse.native_kernels.cuda.kernels import gather_matmul as cuda_gather
from autofuse.native_kernels.cuda.kernels import matmul_reduce as cuda_reduce
from autofuse.native_kernels.gpu.memory import Need, PeerMemory, Region, grown
from autofuse.native_kernels.gpu.state import RECORD_WORDS, STATE_LENGTH
from autofuse.native_kernels.triton import (
    embedding_backward,
    embedding_exchange,
    exchange_bags,
    exchange_row_packets,
    exchange_rows,
    exchange_sums,
    exchange_tokens,
    gather_matmul,
    gather_matmul_few,
    matmul_gather,
    matmul_gather_packets,
    matmul_packets,
    matmul_reduce,
)

TRITON = (
    matmul_reduce,
    matmul_packets,
    matmul_gather,
    matmul_gather_packets,
    gather_matmul,
    gather_matmul_few,
    embedding_exchange,
    embedding_backward,
    exchange_bags,
    exchange_row_packets,
    exchange_rows,
    exchange_sums,
    exchange_tokens,
)
CUDA = (
    cuda_reduce,
    matmul_words,
    cuda_gather,
    gather_words,
    expert_combine,
    expert_dispatch,
    dropless_combine,
    dropless_dispatch,
)


def peer_memory(world: int, need: Need) -> PeerMemory:
    """Regions as they grow for `need`; nobody touches them, so that they take no memory."""
    found = grown(need)

    def region(name: str) -> Region:
        mine = torch.empty(max(getattr(found, name), 16), dtype=torch.uint8)
        return Region.of([mine] * world)

    names = (
        "inbox", "finished", "packets", "words", "gathers", "copies", "products", "signals", "copy_signals",
    )  # fmt: skip
    return PeerMemory(
        0, world, 132, *map(region, names), torch.zeros(STATE_LENGTH, dtype=torch.int64),
        torch.zeros(RECORD_WORDS, dtype=torch.int32), torch.empty(found.pieces), torch.empty(found.done),
        torch.empty(found.outbox, dtype=torch.uint8), (132, 66, 33, 16),
    )  # fmt: skip


@contextmanager
def captured() -> Iterator[list[dict[str, Any]]]:
    """The parameters of launches, by their names, instead of launches."""
    found: list[dict[str, Any]] = []

    def launch_triton(kernel: Any, programs: int, compile_only: bool, *args: Any, **settings: Any) -> None:
        found.append(dict(zip(kernel.arg_names, args, strict=False)) | settings)

    def launch_cuda(kernel: Any, params: ctypes.Structure, *rest: Any) -> None:
        found.append({name: getattr(params, name) for name, *_ in params._fields_})

    with ExitStack() as stack:
        for module in TRITON:
            stack.enter_context(patch.object(module, "launch", launch_triton))
        for module in CUDA:
            stack.enter_context(patch.object(module, "kernel", lambda *args: None))
            stack.enter_context(patch.object(module, "launch", launch_cuda))
        for module in (gemm, cuda_gather, expert_dispatch, dropless_dispatch):
            stack.enter_context(patch.object(module, "tensor_map", lambda *args: bytes(128)))
        yield found


def launched(call: Callable[..., Any], *args: Any, **more: Any) -> dict[str, Any]:
    with captured() as found:
        call(*args, **more)
    return found[-1]
