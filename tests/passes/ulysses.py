"""Programs of sequence-parallel attention (Ulysses): scatter heads, gather the sequence, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .experts import COMBINE, DISPATCH, exchange
from .harness import Program

BATCH, LENGTH, HEADS, DIM = 2, 3, 4, 4
HIDDEN = HEADS * DIM


def scatter_heads(x: Tensor) -> Tensor:
    """`[B, S / W, H, D]` to `[B, S, H / W, D]`."""
    world = dist.get_world_size()
    b, s, h, d = x.shape
    x = x.view(b, s, world, h // world, d).permute(2, 1, 0, 3, 4).contiguous()
    x = exchange(x)
    return x.view(world * s, b, h // world, d).transpose(0, 1)


def gather_heads(x: Tensor) -> Tensor:
    """`[B, S, H / W, D]` to `[B, S / W, H, D]`."""
    world = dist.get_world_size()
    b, s, h, d = x.shape
    x = x.view(b, world, s // world, h, d).permute(1, 3, 2, 0, 4).contiguous()
    x = exchange(x)
    return x.view(world * h, s // world, b, d).permute(2, 1, 0, 3)


class Attention(nn.Module):
    def __init__(self, how: str, bias: bool) -> None:
        super().__init__()
        self.how = how
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias) for _ in range(4))
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        if self.how == "packed":
            world = dist.get_world_size()
            packed = self.qkv(x).view(b, s, 3, world, HEADS // world, DIM).permute(3, 1, 0, 2, 4, 5)
            whole = exchange(packed.contiguous()).reshape(world * s, b, 3, HEADS // world, DIM)
            q, k, v = whole.transpose(0, 1).unbind(2)
        elif self.how == "split":
            q, k, v = (scatter_heads(t.view(b, s, HEADS, DIM)) for t in self.qkv(x).chunk(3, -1))
        else:
            q, k, v = (scatter_heads(f(x).view(b, s, HEADS, DIM)) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.how == "matmul":
            y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.o(gather_heads(y.transpose(1, 2)).reshape(b, s, HIDDEN))


def attention(how: str, bias: bool = True, grad: bool = False) -> Callable[[int, int], tuple]:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(rank)
        return Attention(how, bias), (torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=grad),)

    return build


FOUR = {"inference": [COMBINE] * 3 + [DISPATCH]}
TRAINED = {"forward": [COMBINE] * 3 + [DISPATCH], "backward": [COMBINE] + [DISPATCH] * 3}

PROGRAMS: dict[str, Program] = {
    "three linears": Program(attention("separate", bias=False), FOUR, worlds=(2, 4)),
    "three linears, bias": Program(attention("separate"), FOUR),
    "three linears, training": Program(attention("separate", grad=True), TRAINED, grad=True),
    "packed, then split": Program(attention("split"), FOUR, worlds=(2, 4)),
    "packed, then split, training": Program(
        attention("split", grad=True),
        {"forward": [COMBINE] * 3 + [DISPATCH], "backward": [COMBINE]},
        {"backward": ["no_compute"] * 3},
        grad=True,
    ),
    "packed": Program(attention("packed"), {"inference": [COMBINE, DISPATCH]}),
    "packed, training": Program(
        attention("packed", grad=True),
        {"forward": [COMBINE, DISPATCH], "backward": [COMBINE, DISPATCH]},
        grad=True,
    ),
    "matmul attention": Program(attention("matmul"), FOUR),
}
