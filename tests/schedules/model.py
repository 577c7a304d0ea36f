"""A small tensor-parallel transformer of plain tensors, as Megatron-LM writes it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

WORDS, WIDTH, INNER, LAYERS = 24, 16, 24, 2


class Copy(torch.autograd.Function):
    """Into the parallel region: the gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grad, "sum", ctx.group), None


class Sum(torch.autograd.Function):
    """Out of it: the values are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class Block(nn.Module):
    def __init__(self, world: int, group: dist.ProcessGroup, norm: type[nn.Module]) -> None:
        super().__init__()
        self.group = group
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.values = nn.Linear(WIDTH, WIDTH // world, bias=False)
        self.out = nn.Linear(WIDTH // world, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, INNER // world, bias=False)
        self.down = nn.Linear(INNER // world, WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        values = self.values(Copy.apply(self.norm1(h), self.group))
        mixed = values.softmax(1) * values.cumsum(1)
        h = h + Sum.apply(self.out(mixed), self.group)
        up = self.up(Copy.apply(self.norm2(h), self.group))
        return h + Sum.apply(self.down(F.silu(up)), self.group)


class Transformer(nn.Module):
    """Its matrices `values`, `out`, `up` and `down` differ between ranks."""

    SAME = ("words.*", "*norm*", "head.*")

    def __init__(self, world: int, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        group = dist.group.WORLD
        assert group is not None
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(world, group, norm) for _ in range(LAYERS))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def transformer(rank: int, world: int, norm: type[nn.Module] = nn.RMSNorm) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(world, norm)
    torch.manual_seed(1 + rank)
    for block in model.blocks:
        for name in ("values", "out", "up", "down"):
            nn.init.normal_(getattr(block, name).weight, std=0.3)
    return model


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
