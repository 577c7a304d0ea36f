"""Forward and backward of tensor- and sequence-parallel layers as frameworks write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from .dense import AG, AR, BF16, RS, D, H, gathered, plain, reduced, scattered
from .gathered_products import MG
from .harness import Program, since


class Copy(torch.autograd.Function):
    """Identity; the gradient is reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return reduced(grad)


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return reduced(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Gather(torch.autograd.Function):
    """Gather along the sequence; the gradient is reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return gathered(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scattered(grad.contiguous(), ctx.dim), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return scattered(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.dim), None


class SplitColumns(torch.autograd.Function):
    """Keep this rank's columns; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gathered(grad, -1)


class ColumnParallel(torch.autograd.Function):
    """Megatron's LinearWithGradAccumulationAndAsyncCommunication under sequence parallelism.

    x: [s / W, b, K], weight: [N / W, K]. The backward gathers x again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.matmul(gathered(x), weight.t()) + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        total = gathered(x)
        grad_x = scattered(grad.matmul(weight))
        grad, total = grad.reshape(-1, grad.shape[-1]), total.reshape(-1, total.shape[-1])
        return grad_x, grad.t().matmul(total), grad.sum(0)


class ColumnParallelInPlace(torch.autograd.Function):
    """The same with buffers and in-place collectives, as in the original."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        total = torch.empty(x.shape[0] * dist.get_world_size(), *x.shape[1:], dtype=x.dtype)
        dist.all_gather_into_tensor(total, x)
        return torch.matmul(total, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        total = torch.empty(x.shape[0] * dist.get_world_size(), *x.shape[1:], dtype=x.dtype)
        dist.all_gather_into_tensor(total, x)
        grad_total = grad.matmul(weight)
        grad_x = torch.empty(x.shape, dtype=x.dtype)
        dist.reduce_scatter_tensor(grad_x, grad_total)
        grad, total = grad.reshape(-1, grad.shape[-1]), total.reshape(-1, total.shape[-1])
        return grad_x, grad.t().matmul(total)


def copy_reduce(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return Reduce.apply(F.linear(F.linear(Copy.apply(x), up).relu(), down))


def gather_scatter(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return Scatter.apply(F.linear(F.linear(Gather.apply(x, 1), up).relu(), down), 1)


def gather_scatter_bias(x: Tensor, up: Tensor, b: Tensor, down: Tensor) -> Tensor:
    return Scatter.apply(F.linear(F.linear(Gather.apply(x, 0), up, b).relu(), down, b), 0)


def column_parallel(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return ColumnParallel.apply(x, w, b).relu()


def column_parallel_in_place(x: Tensor, w: Tensor) -> Tensor:
    return ColumnParallelInPlace.apply(x, w).relu()


def split_columns(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return Reduce.apply(F.linear(SplitColumns.apply(F.linear(x, v)), w))


def checkpointed(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return checkpoint(gather_scatter, x, up, down, use_reentrant=False)


def checkpointed_inside(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    inner = checkpoint(lambda h: F.linear(h, up).relu(), Gather.apply(x, 1), use_reentrant=False)
    return Scatter.apply(F.linear(inner, down), 1)


def checkpointed_reduce(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return checkpoint(copy_reduce, x, up, down, use_reentrant=False) + x


def autocast_sequence(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        return gather_scatter(x, up, down)


def autocast_tensor(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        return copy_reduce(x, up, down)


def apart(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    """Each weight has a gradient of x of its own, which is reduced and added to the others."""
    a, b, c = (F.linear(Copy.apply(x), w) for w in (q, k, v))
    return Reduce.apply(F.linear((a * b).sigmoid() + c, o)) + x


def autocast_apart(*args: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        return apart(*args)


def one_weight_twice(x: Tensor, w: Tensor) -> Tensor:
    h = Reduce.apply(F.linear(Copy.apply(x), w)).relu()
    return Reduce.apply(F.linear(Copy.apply(h), w))


def tied_embedding(x: Tensor, table: Tensor, w: Tensor) -> Tensor:
    tokens = (x.abs() * 7).long() % table.shape[0]
    h = Reduce.apply(F.linear(F.embedding(tokens, table), w))
    return F.linear(Copy.apply(h), table)


def parallel_block(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Attention and MLP in parallel: one reduction."""
    x = Copy.apply(x)
    return Reduce.apply(F.linear(F.linear(x, a).relu(), b) + F.linear(F.silu(F.linear(x, c)), d))


def qkv_colwise(world: int, rank: int) -> tuple[Any, tuple[Any, ...]]:
    """q, k and v gather the same input, each for itself."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))

    torch.manual_seed(0)
    plan: dict[str, Any] = {n: ColwiseParallel(input_layouts=Shard(1)) for n in "qkv"}
    plan["o"] = RowwiseParallel(output_layouts=Shard(1))
    model = parallelize_module(Attention(), init_device_mesh("cpu", (world,)), plan)
    torch.manual_seed(rank)
    return model, (torch.randn(2, 4, D, requires_grad=True),)


def gated(x: Tensor, gate: Tensor, h: Tensor, down: Tensor) -> Tensor:
    """The shared expert of Qwen2-MoE: its output is scaled by a trained number a row."""
    return Reduce.apply(F.linear(x, gate).sigmoid() * F.linear(h, down))


def gated_scattered(x: Tensor, gate: Tensor, h: Tensor, down: Tensor) -> Tensor:
    return Scatter.apply(F.linear(x, gate).sigmoid() * F.linear(h, down), 1)


def gated_summand(x: Tensor, gate: Tensor, h: Tensor, down: Tensor, routed: Tensor) -> Tensor:
    return Reduce.apply(routed + F.linear(x, gate).sigmoid() * F.linear(h, down))


def gated_read(x: Tensor, gate: Tensor, h: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The matmul, a stage and the whole product are read, too."""
    first = F.linear(h, down)
    second = first * F.linear(x, gate).sigmoid()
    whole = second * 0.5
    return Reduce.apply(whole), first.sin() + second.cos(), whole.tanh()


def gathered_loss(x: Tensor, w: Tensor) -> Tensor:
    return Gather.apply(F.linear(Copy.apply(x), w), -1).logsumexp(-1)


def trained(
    fn: Any, *shapes: Any, forward: list[str], backward: list[str], tolerance: float = 1e-5,
    dtype: torch.dtype = torch.float32, dynamic: bool | None = None,
) -> Program:  # fmt: skip
    fused = {"forward": forward, "backward": backward}
    build = plain(fn, *shapes, grad=True, dtype=dtype)
    return Program(build, fused, grad=True, tolerance=tolerance, dynamic=dynamic)


X3, UP, DOWN = (2, 4, H), (D, H), (H, D)
SQUARE = (H, H)
GATED = (X3, (1, H), (2, 4, D), (H, D))
SEQUENCE = {"forward": [AG, RS], "backward": [AG, RS]}
TENSOR = {"forward": [AR], "backward": [AR]}
APART = {"forward": [AR], "backward": [AR, AR, AR]}

PROGRAMS: dict[str, Program] = {
    "copy and reduce": trained(copy_reduce, X3, UP, DOWN, **TENSOR),
    "gather and scatter": trained(gather_scatter, X3, UP, DOWN, **SEQUENCE),
    "gather and scatter, 2-D, bias": trained(gather_scatter_bias, (4, H), SQUARE, (H,), SQUARE, **SEQUENCE),
    # Autograd's partitioner lets the backward read the x that the forward has gathered.
    "column parallel": trained(column_parallel, X3, UP, (D,), forward=[AG], backward=[RS]),
    "column parallel, in place": trained(column_parallel_in_place, X3, UP, forward=[AG], backward=[RS]),
    "split columns": trained(
        split_columns, X3, lambda world: (H * world, H), UP, forward=[AR], backward=[AG]
    ),
    "checkpointed": since(
        "2.13",
        trained(checkpointed, X3, UP, DOWN, forward=[AG, RS], backward=[AG, AG, RS]),
        # Torch 2.11 gathers once in the backward.
        fused=SEQUENCE,
    ),
    "checkpointed inside": trained(checkpointed_inside, X3, UP, DOWN, **SEQUENCE),
    "checkpointed reduce": trained(checkpointed_reduce, X3, SQUARE, SQUARE, **TENSOR),
    "autocast, sequence": trained(autocast_sequence, X3, UP, DOWN, **SEQUENCE, tolerance=0.03),
    "autocast, tensor": trained(autocast_tensor, X3, UP, DOWN, **TENSOR, tolerance=0.03),
    "q k v apart": trained(apart, X3, UP, UP, UP, DOWN, **APART, tolerance=0.05, dtype=BF16),
    "q k v apart, autocast": trained(autocast_apart, X3, UP, UP, UP, DOWN, **APART, tolerance=0.05),
    "one weight twice": trained(one_weight_twice, X3, SQUARE, forward=[AR, AR], backward=[AR, AR]),
    "tied embedding": trained(tied_embedding, (2, 8), (10, H), SQUARE, **TENSOR),
    "parallel block": trained(parallel_block, X3, UP, DOWN, UP, DOWN, **TENSOR),
    "q k v gather apart": Program(
        qkv_colwise, {"forward": [AG, RS], "backward": [AG, RS, RS, RS]}, grad=True, worlds=(2, 4)
    ),
    "gated": trained(gated, *GATED, forward=[AR], backward=[]),
    "gated, bf16": trained(gated, *GATED, forward=[AR], backward=[], tolerance=0.05, dtype=BF16),
    "gated, dynamic": trained(gated, *GATED, forward=[AR], backward=[], dynamic=True),
    "gated, scattered": Program(
        plain(gated_scattered, X3, (H, H), (2, 4, D), (H, D), grad=True),
        {"forward": [RS]},
        {"backward": ["no_compute"]},
        grad=True,
    ),
    "gated, scattered, dynamic": Program(
        plain(gated_scattered, X3, (1, H), (2, 4, D), (H, D), grad=True),
        {"forward": [RS]},
        {"backward": ["no_compute"]},
        grad=True,
        dynamic=True,
    ),
    "gated summand": trained(gated_summand, *GATED, X3, forward=[AR], backward=[]),
    "gated, read thrice": trained(gated_read, *GATED, forward=[AR], backward=[]),
    "loss of gathered logits": Program(
        plain(gathered_loss, X3, UP, grad=True),
        {"forward": [MG], "backward": [AR]},
        {"backward": ["no_compute"]},
        grad=True,
    ),
}
