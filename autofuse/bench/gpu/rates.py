"""How fast this machine moves bytes: from GPU to GPU, and in the memory of one."""

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering.gpu.choice.timer import sample, slowest

TIMES = 8
"""One copy after another, so that the host is ahead of the GPU."""


def push_rate(mine: Tensor, views: list[Tensor]) -> float:
    """GB/s that a rank sends while the copy engines of all ranks store distinct parts to all peers at once.

    views[r]: the memory of rank r, of the size of `mine`, as this rank maps it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    part = mine.numel() // world
    streams = [torch.cuda.Stream() for _ in range(world)]

    def push() -> None:
        current = torch.cuda.current_stream()
        for i in range(1, world):
            p = (rank + i) % world
            streams[p].wait_stream(current)
            with torch.cuda.stream(streams[p]):
                views[p][rank * part : (rank + 1) * part].copy_(mine[p * part : (p + 1) * part])
            current.wait_stream(streams[p])

    push()
    us = min(slowest(sample(push, TIMES)) for _ in range(5)) / TIMES
    return (world - 1) * part * mine.element_size() / us / 1e3


def copy_rate(source: Tensor, target: Tensor) -> float:
    """GB/s that this GPU's memory is read and written, together, by a copy."""
    target.copy_(source)
    us = min(slowest(sample(lambda: target.copy_(source), TIMES)) for _ in range(5)) / TIMES
    return 2 * source.nbytes / us / 1e3
