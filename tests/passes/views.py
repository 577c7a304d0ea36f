"""Movements of data between compute and collective, waits, and sizes that vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from .dense import AG, AR, RS, D, H, fuses, gathered, group, plain, reduced, scattered, stays
from .harness import Program

c10d = torch.ops._c10d_functional


def chain(x: Tensor, w: Tensor) -> Tensor:
    y = (x.flatten(0, 1) @ w.t().t().mT).view(1, 2, 8, D).squeeze(0).unsqueeze(2)
    return reduced(y.expand(2, 8, 1, D).detach().contiguous().flatten(1)).relu()


def into_buffer(x: Tensor, w: Tensor) -> Tensor:
    buffer = torch.empty(2, 8, D)
    buffer.copy_(F.linear(x, w))
    return reduced(buffer)


def two_waits(x: Tensor, w: Tensor) -> Tensor:
    y = c10d.all_reduce(F.linear(x, w), "sum", group().group_name)
    return c10d.wait_tensor(c10d.wait_tensor(y)) + c10d.wait_tensor(y)


def compute_before_wait(x: Tensor, w: Tensor) -> Tensor:
    y = c10d.reduce_scatter_tensor(F.linear(x, w), "sum", dist.get_world_size(), group().group_name)
    other = (x.sin() @ w.t()).sum()
    return c10d.wait_tensor(y) * other


def keyword_arguments(x: Tensor, w: Tensor) -> Tensor:
    y = c10d.all_reduce(F.linear(x, w), reduce_op="avg", group_name=group().group_name)
    return c10d.wait_tensor(y).relu()


def slices(x: Tensor, w: Tensor) -> Tensor:
    """A scatter along dim 1 by hand."""
    y, world = F.linear(x, w), dist.get_world_size()
    part = y.shape[1] // world
    parts = [y[:, r * part : (r + 1) * part] for r in range(world)]
    return scattered(torch.cat(parts), 0)


def stacked(x: Tensor, w: Tensor) -> Tensor:
    """A scatter along the last dim by hand."""
    parts = F.linear(x, w).chunk(dist.get_world_size(), -1)
    return scattered(torch.stack(parts), 0).squeeze(0)


def reversed_parts(x: Tensor, w: Tensor) -> Tensor:
    """No scatter along a dim: the parts are in another order."""
    parts = F.linear(x, w).chunk(dist.get_world_size(), 1)
    return scattered(torch.cat(parts[::-1]), 0)


def gathered_by_hand(x: Tensor, w: Tensor) -> Tensor:
    parts = gathered(x).unflatten(0, (dist.get_world_size(), -1)).unbind(0)
    return F.linear(torch.cat(parts, -1), w)


def scatter(dim: int) -> Callable[..., Tensor]:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return scattered(F.linear(x, w), dim)

    return fn


def scatter_transposed(x: Tensor, w: Tensor) -> Tensor:
    return scattered(F.linear(x, w).transpose(0, 1).contiguous())


def scatter_flat(x: Tensor, w: Tensor) -> Tensor:
    return scattered(F.linear(x, w).flatten(0, 1)) * 2


def sequence_block(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return scattered(F.linear(F.linear(gathered(x, 1), v).relu(), w), 1)


def trained(x: Tensor, w: Tensor) -> Tensor:
    """Of dynamic sizes, torch cuts dim 1 into slices here, and in the backward."""
    return funcol.reduce_scatter_tensor_autograd(F.linear(x, w), "sum", 1, group()).sin()


def varying(fn: Callable[..., Any], *shapes: Any, patterns: list[str]) -> Program:
    return Program(plain(fn, *shapes), {"inference": patterns}, dynamic=True)


X3, W2, WT = (2, 8, H), (D, H), (H, D)
PROGRAMS: dict[str, Program] = {
    "a chain of views": fuses(AR, chain, X3, W2),
    "copied into a buffer": fuses(AR, into_buffer, X3, W2),
    "two waits": fuses(AR, two_waits, X3, W2),
    "compute before the wait": fuses(RS, compute_before_wait, (8, H), W2),
    "keyword arguments": fuses(AR, keyword_arguments, X3, W2),
    "slices": fuses(RS, slices, (3, 8, H), W2, worlds=(2, 4)),
    "stacked": fuses(RS, stacked, (3, 8, H), W2),
    "parts in another order": stays("layout", reversed_parts, (3, 8, H), W2),
    "gathered by hand": fuses(AG, gathered_by_hand, (3, 5, 6), lambda world: (D, 6 * world)),
    "dynamic, scatter dim 0": varying(scatter(0), (8, 5, H), W2, patterns=[RS]),
    "dynamic, scatter dim 1": varying(scatter(1), (3, 8, H), W2, patterns=[RS]),
    "dynamic, scatter transposed": varying(scatter_transposed, (3, 8, H), W2, patterns=[RS]),
    "dynamic, scatter flat": varying(scatter_flat, (3, 8, H), W2, patterns=[RS]),
    "dynamic, sequence block": varying(sequence_block, (3, 4, H), W2, WT, patterns=[AG, RS]),
    "dynamic, trained": Program(
        plain(trained, (3, 8, H), W2, grad=True), {"forward": [RS], "backward": [AG]}, grad=True, dynamic=True
    ),
}
