"""Small functions with collectives in forward and backward."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as funcol


class AllReduceBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return funcol.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return funcol.all_reduce(grad, "sum", ctx.group), None


def both_ways(x: Tensor, w: Tensor, group: str) -> Tensor:
    """One all_reduce in forward, one in backward."""
    return AllReduceBothWays.apply(x @ w, group)


def one_way(x: Tensor, w: Tensor, group: str) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", group).relu()


def operands(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(*shape, generator=generator, requires_grad=requires_grad) for shape in ((6, 16), (16, 8))
    )
