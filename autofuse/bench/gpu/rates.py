"""How fast this machine moves bytes: from GPU to GPU, and in the memory of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering.gpu.choice.timer import sample, slowest

TIMES = 8
"""One copy after another, so that the host is ahead of the GPU."""
SAMPLES = 5
"""The best of them counts."""
LANES = (1, 2, 4)
"""Copies to one peer at a time. A copy engine alone is slower than a link."""

ALIGNED = 1024
"""Numbers; a piece has a multiple of them."""

Move: TypeAlias = Callable[[Tensor, Tensor], object]
"""From a source to a target of its size."""


def link_rates(mine: Tensor, views: Sequence[Tensor]) -> dict[str, float]:
    """GB/s of the links of a GPU, each the best of copy engines and of stores.

    `all`: out of every GPU while all store to all their peers. `out`: out of GPU 0 alone, to all its peers at
    once. `in`: into GPU 0 alone, from all peers at once. views[r]: the memory of rank r, of the size of
    `mine`, as this rank maps it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    peers = [(rank + i) % world for i in range(1, world)]
    first = rank == 0
    return {
        "all": max(_rates(mine, views, peers, world - 1)),
        "out": max(_rates(mine, views, peers if first else [], world - 1)),
        "in": max(_rates(mine, views, [] if first else [0], world - 1)),
    }


def _rates(mine: Tensor, views: Sequence[Tensor], dests: Sequence[int], parts: int) -> list[float]:
    """GB/s with each way to move, of so many parts."""
    ways: list[tuple[Move, int]] = [*((_copy, lanes) for lanes in LANES), (_store, 1)]
    found = []
    for move, lanes in ways:
        run, nbytes = pusher(mine, views, dests, move, lanes)
        run()
        us = min(slowest(sample(run, 1)) for _ in range(SAMPLES)) / TIMES
        found.append(parts * nbytes / us / 1e3)
    return found


def pusher(
    mine: Tensor, views: Sequence[Tensor], dests: Sequence[int], move: Move, lanes: int
) -> tuple[Callable[[], None], int]:
    """Moves this rank's part to every one of `dests`, `TIMES` times; and the bytes of a part.

    All streams start before any is waited for: else each copy would wait for the one before.
    """
    piece = mine.numel() // (dist.get_world_size() * lanes * ALIGNED) * ALIGNED
    begin = dist.get_rank() * lanes * piece
    moves = [
        (torch.cuda.Stream(), mine[start : start + piece], views[dest][start : start + piece])
        for dest in dests
        for start in range(begin, begin + lanes * piece, piece)
    ]

    def push() -> None:
        current = torch.cuda.current_stream()
        for stream, _, _ in moves:
            stream.wait_stream(current)
        for _ in range(TIMES):
            for stream, source, target in moves:
                with torch.cuda.stream(stream):
                    move(source, target)
        for stream, _, _ in moves:
            current.wait_stream(stream)

    return push, lanes * piece * mine.element_size()


def _copy(source: Tensor, target: Tensor) -> object:
    return target.copy_(source)


def _store(source: Tensor, target: Tensor) -> object:
    """By a kernel: nothing that copies takes this for a copy."""
    return torch.neg(source, out=target)


def copy_rate(source: Tensor, target: Tensor) -> float:
    """GB/s that this GPU's memory is read and written, together, by a copy."""
    target.copy_(source)
    us = min(slowest(sample(lambda: target.copy_(source), TIMES)) for _ in range(SAMPLES)) / TIMES
    return 2 * source.nbytes / us / 1e3
