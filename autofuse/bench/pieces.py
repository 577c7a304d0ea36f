"""What `autofuse bench schedules` measures: modules, weights that take turns, and ways to compile them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from autofuse.bench.models.variants import VARIANTS, Variant
from autofuse.lowering.gpu.choice.timing import MOST_CALLS, copies_of
from autofuse.passes.schedules.schedule import AUTO, SCHEDULES

INDUCTOR = "inductor"
EPSILON = 1e-6


class Piece(nn.Module):
    """`residual`, `gamma` and the results are the same on all ranks."""

    def __init__(self, inner: int, hidden: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.randn(hidden, inner) / math.sqrt(inner))
        self.norm = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        product = F.linear(x, self.weight)
        return normed(funcol.wait_tensor(funcol.all_reduce(product, "sum", self.group)), residual, self.norm)


def normed(y: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """The RMSNorm of `h = residual + y`, and h."""
    h = residual + y
    wide = h.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return scaled.to(h.dtype) * gamma, h


class Layer(nn.Module):
    """A piece, the first matmul of an MLP, a piece, and the first matmul of the next layer."""

    def __init__(self, inner: int, hidden: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.first = Piece(inner, hidden, group)
        self.up = nn.Parameter(torch.randn(inner, hidden) / math.sqrt(hidden))
        self.second = Piece(inner, hidden, group)
        self.next = nn.Parameter(torch.randn(inner, hidden) / math.sqrt(hidden))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor]:
        first, h = self.first(x, residual)
        second, _ = self.second(F.silu(F.linear(first, self.up)), h)
        return (F.linear(second, self.next),)


class Sliced(nn.Module):
    """A piece, cut by hand: every rank normalises its part of the rows."""

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self.piece = piece

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        group = self.piece.group
        product = F.linear(x, self.piece.weight)
        part = funcol.wait_tensor(funcol.reduce_scatter_tensor(product, "sum", 0, group))
        rows = part.shape[0]
        own = normed(part, residual.narrow(0, group.rank() * rows, rows), self.piece.norm)
        every = [funcol.all_gather_tensor(t, 0, group) for t in own]
        return funcol.wait_tensor(every[0]), funcol.wait_tensor(every[1])


MODELS: dict[str, type[Piece | Layer]] = {"piece": Piece, "layer": Layer}


@dataclass(frozen=True)
class Way:
    """ours: what became of the collectives is asked for."""

    model: nn.Module
    variant: Variant
    ours: bool = False

    def compiled(self) -> Callable[[Tensor, Tensor], Any]:
        model = self.model

        def call(x: Tensor, residual: Tensor) -> Any:
            return model(x, residual)

        return self.variant.compile(call)


def ways(model: Piece | Layer, tokens: int, on_gpus: bool) -> dict[str, Way]:
    """All ways to compile a model that the ranks can run.

    On GPUs `auto` also decides whether anything is fused, which the other schedules do not ask.
    """
    found = {INDUCTOR: Way(model, VARIANTS[INDUCTOR])}
    if on_gpus:
        found |= {name: Way(model, VARIANTS[name]) for name in ("one-shot", "two-shot")}
    if isinstance(model, Piece) and tokens % model.group.size() == 0:
        found["sliced"] = Way(Sliced(model), VARIANTS[INDUCTOR])
        if on_gpus:
            found["sliced, async TP"] = Way(Sliced(model), VARIANTS["async TP"])
    for schedule in SCHEDULES:
        policy = "auto" if on_gpus and schedule == AUTO else "always"
        options = {"policy": policy, "schedule": schedule}
        found[schedule] = Way(model, Variant("autofuse", options), ours=True)
    return found


class Weights:
    """The matrices of a model; `cold`: so many copies that none is in the L2 of a GPU when its turn comes."""

    def __init__(self, model: nn.Module, cold: bool) -> None:
        self._own = [p for p in model.parameters() if p.dim() == 2]
        self.matrices = len(self._own)
        nbytes = sum(p.nbytes for p in self._own)
        count = min(MOST_CALLS, copies_of(nbytes)) if cold else 1
        self._copies = [[p.data.roll(i, 0) if i else p.data for p in self._own] for i in range(count)]

    def take(self, i: int) -> None:
        """The model has copy number `i` from now on."""
        for own, copy in zip(self._own, self._copies[i % len(self._copies)], strict=True):
            own.data = copy
