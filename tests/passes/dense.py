"""Programs of tensor and sequence parallelism, in the spellings that people use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .harness import Program, since

D, H = 16, 24
AR, RS, AG = "matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"
Build = Callable[[int, int], tuple[Callable[..., Any], tuple[Any, ...]]]


# --- DTensor ------------------------------------------------------------------------------------------


class FeedForward(nn.Module):
    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(D, hidden, bias=bias)
        self.gate = nn.Linear(D, hidden, bias=bias)
        self.down = nn.Linear(hidden, D, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)) * self.gate(x))


class Block(nn.Module):
    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.ff = FeedForward(hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ff(self.norm(x))


def tensor_parallel(
    bias: bool = False, shape: tuple[int, ...] = (2, 8, D), dtype: torch.dtype = torch.float32
) -> Build:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(0)  # replicated
        plan = {"ff.up": ColwiseParallel(), "ff.gate": ColwiseParallel(), "ff.down": RowwiseParallel()}
        model = parallelize_module(Block(8 * world, bias), init_device_mesh("cpu", (world,)), plan).to(dtype)
        return model, (torch.randn(*shape, dtype=dtype, requires_grad=True),)

    return build


def sequence_parallel(bias: bool = False) -> Build:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(0)
        plan = {
            "norm": SequenceParallel(),
            "ff": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "ff.up": ColwiseParallel(),
            "ff.gate": ColwiseParallel(),
            "ff.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        model = parallelize_module(Block(8 * world, bias), init_device_mesh("cpu", (world,)), plan)
        torch.manual_seed(rank)
        return model, (torch.randn(2, 4, D, requires_grad=True),)

    return build


def autocast(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    model, args = tensor_parallel()(world, rank)

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    return call, args


# --- plain collectives --------------------------------------------------------------------------------


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def plain(
    fn: Callable[..., Any], *shapes: Any, grad: bool = False, dtype: torch.dtype = torch.float32
) -> Build:
    """A program of random arguments; a shape may be a function of the world size."""

    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(rank)
        resolved = [s(world) if callable(s) else s for s in shapes]
        return fn, tuple(torch.randn(s, dtype=dtype, requires_grad=grad) for s in resolved)

    return build


def fuses(pattern: str, fn: Callable[..., Any], *shapes: Any, times: int = 1, **options: Any) -> Program:
    """An inference program whose collectives are all fused."""
    return Program(plain(fn, *shapes), {"inference": [pattern] * times}, **options)


def stays(reason: str, fn: Callable[..., Any], *shapes: Any, times: int = 1) -> Program:
    """An inference program whose collectives are all kept."""
    return Program(plain(fn, *shapes), kept={"inference": [reason] * times})


def reduced(y: Tensor, op: str = "sum") -> Tensor:
    return funcol.all_reduce(y, op, group())


def scattered(y: Tensor, dim: int = 0) -> Tensor:
    return funcol.reduce_scatter_tensor(y, "sum", dim, group())


def gathered(x: Tensor, dim: int = 0) -> Tensor:
    """all_gather_tensor, spelled so that torch traces other dims before 2.13, too."""
    whole = funcol.all_gather_tensor(x, 0, group())
    return torch.cat(whole.chunk(dist.get_world_size()), dim) if dim else whole


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    dist.all_reduce(y)
    return y.relu()


def in_place_avg(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    dist.all_reduce(y, op=dist.ReduceOp.AVG)
    return y


def in_place_max(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    dist.all_reduce(y, op=dist.ReduceOp.MAX)
    return y


def ranks_as_list(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(F.linear(x, w), "sum", list(range(dist.get_world_size()))).relu()


class Megatron(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x.contiguous())
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def megatron(x: Tensor, w: Tensor) -> Tensor:
    return Megatron.apply(F.linear(x, w)).relu()


def scatter_in_place(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    out = torch.empty(y.shape[0] // dist.get_world_size(), *y.shape[1:], dtype=y.dtype)
    dist.reduce_scatter_tensor(out, y)
    return out.relu()


def gather_in_place(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty(x.shape[0] * dist.get_world_size(), *x.shape[1:], dtype=x.dtype)
    dist.all_gather_into_tensor(out, x)
    return F.linear(out, w)


def gather_list(x: Tensor, w: Tensor) -> Tensor:
    outs = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, x)
    return F.linear(torch.cat(outs, 0), w)


def int8_weight(x: Tensor, scales: Tensor) -> Tensor:
    weight = (torch.arange(D * H) % 17 - 8).to(torch.int8).view(D, H)
    return funcol.all_reduce(F.linear(x, weight.to(x.dtype)) * scales, "sum", group())


def float8(x: Tensor, w: Tensor) -> Tensor:
    one = torch.tensor(0.5)
    x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    y = torch._scaled_mm(x8, w8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return funcol.all_reduce(y, "sum", group())


def attention_out(o: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    y = F.linear(o.transpose(1, 2).reshape(2, 8, H), w)
    return residual + funcol.all_reduce(y, "sum", group())


def einsum(o: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(torch.einsum("bhsd,hdo->bso", o, w), "sum", group())


# --- what may lie between -----------------------------------------------------------------------------


def bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return funcol.all_reduce(F.linear(x, w, b / dist.get_world_size()), "sum", group())


def cast_between(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(F.linear(x, w).bfloat16(), "sum", group())


def scaled_rows_and_columns(x: Tensor, w: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    return funcol.all_reduce(F.linear(x, w) * columns / rows[..., None] * 0.5, "sum", group())


def residual_before(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return funcol.all_reduce(F.linear(x, w) + residual, "sum", group())


def sum_of_two(x: Tensor, v: Tensor, z: Tensor, w: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(F.linear(x, v) + F.linear(z, w), "sum", 0, group())


def also_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w)
    return funcol.all_reduce(y, "sum", group()).relu(), y + 1


def also_returned_early(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w)
    early = y.relu().sum(-1)
    return funcol.reduce_scatter_tensor(y, "avg", 0, group()), early


def product_read_inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w)
    return funcol.all_reduce(y * 2, "sum", group()), y + 1


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(F.linear(x, w).transpose(0, 1).contiguous(), "sum", group())


# --- scatter and gather on any dim --------------------------------------------------------------------


def scatter(dim: int) -> Callable[..., Tensor]:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor(F.linear(x, w), "sum", dim, group())

    return fn


def scatter_transposed(x: Tensor, w: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(F.linear(x, w).permute(2, 0, 1).contiguous(), "avg", 1, group())


def gather(dim: int) -> Callable[..., Tensor]:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(funcol.all_gather_tensor(x, dim, group()), w)

    return fn


def gather_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(funcol.all_gather_tensor(x, 1, group()), w, b)


def gather_cast(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(funcol.all_gather_tensor(x, 0, group()).bfloat16(), w.bfloat16())


def gather_qkv(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    whole = funcol.all_gather_tensor(x, 1, group())
    return F.linear(whole, q), F.linear(whole, k).relu(), F.linear(whole, v) * 2


def gather_also_read(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    whole = funcol.all_gather_tensor(x, 1, group())
    return F.linear(whole, w), whole.sum(0)


def gather_only(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, group()).relu()


def gathers_elsewhere(program: Program) -> Program:
    """A program with all_gather_tensor on a dim other than 0, which torch traces from 2.13 on."""
    return since("2.13", program, fused={}, breaks="torch before 2.13 cannot trace all_gather_tensor")


X3, W2 = (2, 8, H), (D, H)
BF16 = torch.bfloat16

PROGRAMS: dict[str, Program] = {
    "tensor parallel": Program(
        tensor_parallel(), {"forward": [AR], "backward": [AR, AR]}, grad=True, worlds=(2, 4)
    ),
    "tensor parallel, bias": Program(
        tensor_parallel(True), {"forward": [AR], "backward": [AR, AR]}, grad=True
    ),
    "tensor parallel, 2-D": Program(
        tensor_parallel(shape=(8, D)), {"forward": [AR], "backward": [AR, AR]}, grad=True
    ),
    "tensor parallel, bf16": Program(
        tensor_parallel(dtype=BF16), {"forward": [AR], "backward": [AR, AR]}, grad=True, tolerance=0.05
    ),
    "tensor parallel, inference": Program(tensor_parallel(True), {"inference": [AR]}),
    "tensor parallel, dynamic": Program(tensor_parallel(), {"inference": [AR]}, dynamic=True),
    "autocast": Program(autocast, {"inference": [AR]}, tolerance=0.02),
    "sequence parallel": Program(
        sequence_parallel(), {"forward": [AG, RS], "backward": [AG, RS]}, grad=True, worlds=(2, 4)
    ),
    "sequence parallel, bias": Program(
        sequence_parallel(True), {"forward": [AG, RS], "backward": [AG, RS]}, grad=True
    ),
    "in place": Program(plain(in_place, X3, W2), {"inference": [AR]}),
    "in place, avg": Program(plain(in_place_avg, X3, W2), {"inference": [AR]}, worlds=(2, 4)),
    "in place, max": Program(plain(in_place_max, X3, W2), kept={"inference": ["reduce_op"]}),
    "in place, training": Program(
        plain(in_place, X3, W2, grad=True),
        {"forward": [AR]},
        {"backward": ["no_compute"]},
        grad=True,
        unfused=True,  # compiled, the collective has a backward; in eager it has none
    ),
    "ranks as list": Program(plain(ranks_as_list, X3, W2), {"inference": [AR]}),
    "Megatron's function": Program(plain(megatron, X3, W2, grad=True), {"forward": [AR]}, grad=True),
    "reduce_scatter in place": Program(
        plain(scatter_in_place, (8, 3, H), W2), {"inference": [RS]}, worlds=(2, 4)
    ),
    "all_gather in place": Program(plain(gather_in_place, (4, 3, H), W2), {"inference": [AG]}, worlds=(2, 4)),
    "all_gather into a list": Program(plain(gather_list, (4, 3, H), W2), {"inference": [AG]}),
    "int8 weight": Program(
        plain(int8_weight, (1, 1, H), (D,), dtype=BF16), {"inference": [AR]}, tolerance=0.02
    ),
    "float8": Program(plain(float8, (16, 32), (16, 32), dtype=BF16), {"inference": [AR]}, tolerance=0.02),
    "attention output": Program(plain(attention_out, (2, 4, 8, 6), W2, (2, 8, D)), {"inference": [AR]}),
    "einsum": Program(plain(einsum, (2, 4, 8, 6), (4, 6, D)), {"inference": [AR]}),
    "bias": Program(plain(bias, X3, W2, (D,)), {"inference": [AR]}),
    "cast between": Program(plain(cast_between, X3, W2), {"inference": [AR]}, tolerance=0.01),
    "scaled rows and columns": Program(
        plain(scaled_rows_and_columns, X3, W2, (D,), (2, 8)), {"inference": [AR]}, tolerance=1e-4
    ),
    "residual before": Program(plain(residual_before, X3, W2, (2, 8, D)), {"inference": [AR]}),
    "sum of two": Program(plain(sum_of_two, (8, 5, H), W2, (8, 5, 7), (D, 7)), {"inference": [RS]}),
    "also returned": Program(plain(also_returned, X3, W2), {"inference": [AR]}),
    "also returned, early": Program(plain(also_returned_early, (8, 3, H), W2), {"inference": [RS]}),
    "product read inside": Program(plain(product_read_inside, X3, W2), {"inference": [AR]}),
    "transposed": Program(plain(transposed, X3, W2), {"inference": [AR]}),
    "reduce_scatter dim 0": Program(plain(scatter(0), (8, 3, H), W2), {"inference": [RS]}),
    "reduce_scatter dim 1": Program(plain(scatter(1), (3, 8, H), W2), {"inference": [RS]}, worlds=(2, 4)),
    "reduce_scatter last dim": Program(plain(scatter(-1), (3, 5, H), W2), {"inference": [RS]}, worlds=(2, 4)),
    "reduce_scatter, transposed": Program(plain(scatter_transposed, (4, 3, H), W2), {"inference": [RS]}),
    "all_gather dim 0": Program(plain(gather(0), (3, 5, H), W2), {"inference": [AG]}),
    "all_gather dim 1": gathers_elsewhere(
        Program(plain(gather(1), (3, 5, H), W2), {"inference": [AG]}, worlds=(2, 4))
    ),
    "all_gather last dim": gathers_elsewhere(
        Program(
            plain(gather(-1), (3, 5, 6), lambda world: (D, 6 * world)), {"inference": [AG]}, worlds=(2, 4)
        )
    ),
    "all_gather, bias": gathers_elsewhere(
        Program(plain(gather_bias, (3, 5, H), W2, (D,)), {"inference": [AG]})
    ),
    "all_gather, cast": Program(plain(gather_cast, (3, 5, H), W2), {"inference": [AG]}, tolerance=0.02),
    "all_gather, q k v": gathers_elsewhere(
        Program(plain(gather_qkv, (3, 5, H), W2, (8, H), (7, H)), {"inference": [AG]})
    ),
    "all_gather, also read": gathers_elsewhere(
        Program(plain(gather_also_read, (3, 5, H), W2), {"inference": [AG]})
    ),
    "all_gather alone": Program(plain(gather_only, (3, 5)), kept={"inference": ["no_compute"]}),
}
