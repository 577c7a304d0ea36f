"""Programs of looped and batched experts in the spellings that people use, and what lies round them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .experts import COMBINE, DISPATCH, D, H, exchange
from .harness import Program

LOCAL, SLOTS = 2, 3


class Loop(nn.Module):
    """Fixed capacity: `[W, LOCAL, SLOTS, D]` is exchanged, every expert works on its chunk, and back."""

    def __init__(self, how: str, bias: bool = True) -> None:
        super().__init__()
        self.how = how
        self.up = nn.ModuleList(nn.Linear(D, H, bias) for _ in range(LOCAL))
        self.gate = nn.ModuleList(nn.Linear(D, H, bias) for _ in range(LOCAL))
        self.down = nn.ModuleList(nn.Linear(H, D, bias) for _ in range(LOCAL))
        self.offset = nn.ParameterList(torch.randn(D) for _ in range(LOCAL))

    def expert(self, i: int, x: Tensor) -> Tensor:
        if self.how == "gated":
            return self.down[i](F.silu(self.gate[i](x)) * self.up[i](x))
        h = F.gelu(self.up[i](x))
        if self.how == "mm + bias":
            return h @ self.down[i].weight.t() + self.offset[i]
        if self.how == "scaled":
            return self.down[i](h) * 0.5
        return self.down[i](h)

    def forward(self, x: Tensor) -> Any:
        world = dist.get_world_size()
        received = exchange(x).view(world, LOCAL, SLOTS, D)
        chunks: Any = received.chunk(LOCAL, dim=1)
        if self.how == "flat chunks":  # two-dimensional activations
            chunks = [c.reshape(-1, D) for c in chunks]
        if self.how == "indexed":
            chunks = [received[:, i] for i in range(LOCAL)]
        done = [self.expert(i, c) for i, c in enumerate(chunks)]
        if self.how == "flat chunks":
            done = [d.view(world, 1, SLOTS, D) for d in done]
        joined = torch.stack(done, 1) if self.how == "indexed" else torch.cat(done, 1)
        y = exchange(joined.view(world * LOCAL, SLOTS, D).contiguous())
        if self.how == "read outside":
            return y, done[0].sin()
        return y


class Batched(nn.Module):
    """Fixed capacity with `[LOCAL, D, H]` weights; `how` says what lies between bmm and exchange."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.w1 = nn.Parameter(torch.randn(LOCAL, D, H) * 0.1)
        self.w2 = nn.Parameter(torch.randn(LOCAL, H, D) * 0.1)
        self.b1 = nn.Parameter(torch.randn(LOCAL, 1, H))
        self.b2 = nn.Parameter(torch.randn(LOCAL, 1, D))

    def forward(self, x: Tensor, weights: Tensor) -> Any:
        world = dist.get_world_size()
        h = exchange(x).view(world, LOCAL, SLOTS, D).transpose(0, 1).reshape(LOCAL, -1, D)
        rows = weights.view(LOCAL, -1, 1)
        if self.how == "baddbmm":
            y = torch.baddbmm(self.b2, F.gelu(torch.baddbmm(self.b1, h, self.w1)), self.w2)
        else:
            y = torch.bmm(F.gelu(torch.bmm(h, self.w1)), self.w2)
        if self.how == "bias":
            y = y + self.b2
        if self.how == "weights":
            y = y * rows
        if self.how == "masked_fill":
            y = y.masked_fill(rows < 0.5, 0.0)
        if self.how == "where":
            y = torch.where(rows < 0.5, 0.0, y)
        if self.how == "cast":
            y = y.bfloat16()
        if self.how == "einsum":
            y = torch.einsum("eri,eio->ero", F.gelu(torch.bmm(h, self.w1)), self.w2)
        z = y.view(LOCAL, world, SLOTS, D).transpose(0, 1).contiguous().view(-1, SLOTS, D)
        back = exchange(z)
        if self.how == "weighted after":
            return back.view(-1, D) * weights.view(-1, 1)
        if self.how == "read outside":
            return back, y.sin()
        return back.float() if self.how == "cast" else back


def loop(how: str, bias: bool = True, grad: bool = False) -> Callable[[int, int], tuple]:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(rank)
        return Loop(how, bias), (torch.randn(world * LOCAL, SLOTS, D, requires_grad=grad),)

    return build


def batched(how: str, grad: bool = False) -> Callable[[int, int], tuple]:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(rank)
        x = torch.randn(world * LOCAL, SLOTS, D, requires_grad=grad)
        return Batched(how), (x, torch.rand(world * LOCAL * SLOTS))

    return build


BOTH = {"inference": [DISPATCH, COMBINE]}
TRAINED = {"forward": [DISPATCH, COMBINE], "backward": [DISPATCH, COMBINE]}

LOOPS = ("plain", "mm + bias", "gated", "flat chunks", "indexed", "scaled", "read outside")
BATCHES = (
    "plain",
    "baddbmm",
    "bias",
    "weights",
    "masked_fill",
    "where",
    "cast",
    "einsum",
    "weighted after",
    "read outside",
)

# Backward: what becomes of the gradient between the exchange and the matmuls is no part of a dispatch.
AFTER = ({**TRAINED, "backward": [COMBINE]}, {"backward": ["no_compute"]})
LONE = ({**TRAINED, "backward": [COMBINE]}, {"backward": ["uneven"]})
SUMS = ({**TRAINED, "backward": [DISPATCH]}, {"backward": ["no_compute"]})

LOOP_TRAINING = {
    "plain": (TRAINED,),
    "mm + bias": (TRAINED,),
    "gated": (TRAINED,),
    "indexed": SUMS,
    "scaled": AFTER,
    "read outside": LONE,
}
BATCHED_TRAINING = {
    "baddbmm": (TRAINED,),
    "bias": (TRAINED,),
    "weights": AFTER,
    "masked_fill": AFTER,
    "weighted after": (TRAINED,),
    "read outside": AFTER,
}

PROGRAMS: dict[str, Program] = {
    **{f"loop, {how}": Program(loop(how), BOTH) for how in LOOPS},
    **{
        f"loop, {how}, training": Program(loop(how, grad=True), *becomes, grad=True)
        for how, becomes in LOOP_TRAINING.items()
    },
    "loop, no bias": Program(loop("plain", bias=False), BOTH, worlds=(2, 4)),
    **{
        f"batched, {how}": Program(batched(how), BOTH, tolerance=0.01 if how == "cast" else 1e-5)
        for how in BATCHES
    },
    **{
        f"batched, {how}, training": Program(batched(how, grad=True), *becomes, grad=True)
        for how, becomes in BATCHED_TRAINING.items()
    },
}
