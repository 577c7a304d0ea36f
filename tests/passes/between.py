"""Matmuls between an all_gather and a reduction: both are fused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from .dense import AG, AR, BF16, RS, D, H, gathered, group, plain, reduced, scattered
from .harness import Program

X = (8, D)
BOTH, SUM = [AG, RS], [AG, AR]


def one(x: Tensor, w: Tensor) -> Tensor:
    return scattered(F.linear(gathered(x), w))


def one_summed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """3-D, gathered along the sequence."""
    return reduced(F.linear(gathered(x, 1), w, b)).relu()


def columns(x: Tensor, w: Tensor) -> Tensor:
    """What is gathered is contracted."""
    return scattered(F.linear(gathered(x, 1), w))


def two(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The gather keeps a matmul."""
    whole = gathered(x)
    return F.linear(whole, v).relu(), scattered(F.linear(whole, w))


def both_reduced(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    whole = gathered(x)
    return reduced(F.linear(whole, v)), scattered(F.linear(whole, w))


def weight(x: Tensor, w: Tensor) -> Tensor:
    """A weight that is gathered, from flat parts."""
    return reduced(F.linear(x, gathered(w).view(H, D)))


def gradient(x: Tensor, g: Tensor) -> Tensor:
    """Of a weight: what is gathered is contracted, and read elsewhere, too."""
    whole = gathered(x)
    return scattered(g.t() @ whole) + whole.sum()


def a_sum(x: Tensor, z: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return scattered(F.linear(gathered(x), v) + F.linear(z, w))


def wide(x: Tensor, w: Tensor) -> Tensor:
    """Narrowed behind the gather; the product is widened."""
    return reduced(F.linear(gathered(x.sin()).bfloat16(), w.bfloat16()).float())


def trained(x: Tensor, w: Tensor) -> Tensor:
    whole = funcol.all_gather_tensor_autograd(x, 0, group())
    return funcol.reduce_scatter_tensor_autograd(F.linear(whole, w), "sum", 0, group()).sin()


class Whole(torch.autograd.Function):
    """Of a sequence that is cut on dim 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 1, group())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor(grad.contiguous(), "sum", 1, group())


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor(x, "sum", 1, group())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return funcol.all_gather_tensor(grad.contiguous(), 1, group())


def block(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """In the backward a size is computed behind what is fused."""
    return Cut.apply(F.linear(F.silu(F.linear(Whole.apply(x), v)), w))


def twice(x: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One tensor that is gathered for dgrad and for wgrad, in bfloat16 each time."""
    x = x.sin()
    return F.linear(gathered(x).bfloat16(), v.bfloat16()), g.bfloat16().t() @ gathered(x).bfloat16()


def twice_reduced(x: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(gathered(x), v), scattered(g.t() @ gathered(x))


def far_apart(x: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Between the gathers of one tensor there are others, so that it is not held meanwhile."""
    first = F.linear(gathered(x), v)
    others = [gathered(x + i).sum(0) for i in (1, 2)]
    return first, *others, g.t() @ gathered(x)


class Megatron(torch.autograd.Function):
    """Gathers in the backward again, for the gradient of the weight; autograd's partitioner gathers once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(gathered(x), w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return scattered(grad @ w), grad.t() @ gathered(x)


def megatron(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """q and k of one input."""
    x = x.sin()
    return Megatron.apply(x, v).relu(), Megatron.apply(x, w).relu()


def same(*patterns: str) -> dict[str, list[str]]:
    return {"inference": list(patterns)}


PROGRAMS: dict[str, Program] = {
    "one": Program(plain(one, X, (H, D)), same(*BOTH), worlds=(2, 4)),
    "one, bf16": Program(plain(one, X, (H, D), dtype=BF16), same(*BOTH), tolerance=0.02),
    "one, dynamic": Program(plain(one, X, (H, D)), same(*BOTH), dynamic=True),
    "one, summed": Program(plain(one_summed, (2, 3, D), (H, D), (H,)), same(*SUM), worlds=(2, 4)),
    "columns": Program(plain(columns, X, lambda world: (H, D * world)), same(*BOTH), worlds=(2, 4)),
    "two": Program(plain(two, X, (5, D), (H, D)), same(*BOTH)),
    "both reduced": Program(plain(both_reduced, X, (5, D), (H, D)), same(AG, AR, RS), worlds=(2, 4)),
    "weight": Program(plain(weight, X, lambda world: (H * D // world,)), same(*SUM), worlds=(2, 4)),
    "gradient": Program(plain(gradient, X, lambda world: (8 * world, H)), same(*BOTH)),
    "a sum": Program(plain(a_sum, X, lambda world: (8 * world, 5), (H, D), (H, 5)), same(*BOTH)),
    "narrowed": Program(plain(wide, X, (H, D)), same(*SUM), tolerance=0.02),
    "gathered twice": Program(
        plain(twice, X, (H, D), lambda world: (8 * world, 5)), same(AG, AG), worlds=(2, 4), tolerance=0.02
    ),
    "gathered twice, reduced": Program(
        plain(twice_reduced, X, (H, D), lambda world: (8 * world, 4)), same(AG, AG, RS)
    ),
    "a block, dynamic": Program(
        plain(block, (2, 4, D), (H, D), (D, H), dtype=BF16, grad=True),
        {"forward": BOTH, "backward": BOTH},
        grad=True,
        dynamic=True,
        tolerance=0.03,
    ),
    "gathered again in the backward": Program(
        plain(megatron, X, (H, D), (5, D), grad=True), {"forward": [AG], "backward": [RS, RS]}, grad=True
    ),
    "training": Program(
        plain(trained, X, (H, D), grad=True), {"forward": BOTH, "backward": BOTH}, grad=True, worlds=(2, 4)
    ),
}
