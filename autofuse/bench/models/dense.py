"""Llama-shaped layers, tensor parallel.

Serving: plain tensors, this rank's part of every weight, an all_reduce behind `wo` and `down`. Training:
torch's own API; `tp` has the same all_reduces, `sp` (sequence parallel) an all_gather before the attention
and the MLP and a reduce_scatter behind each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse.bench.models.rows import NO_TAILS
from autofuse.bench.models.work import Cell, Work, dtype_on, serving_work, training_work, wider, world_group
from autofuse.lowering.torch_internals import enable_symmetric_memory

CACHED = 512
"""Tokens of a sequence in the cache of a decoding step."""


@dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int


MODELS = {
    "llama70b": Sizes(8192, 28672, 64, 8),
    "llama8b": Sizes(4096, 14336, 32, 8),
    "qwen32b": Sizes(5120, 27648, 40, 8),
    "tiny": Sizes(64, 128, 8, 4),
}


class Attention(nn.Module):
    """`parts`: among how many ranks heads are shared out here already. With `sequences`, each of them has one
    new token, behind a cache of others."""

    keys: Tensor
    values: Tensor

    def __init__(self, sizes: Sizes, parts: int, total: Callable[[Tensor], Tensor], sequences: int) -> None:
        super().__init__()
        self.dim, self.total = sizes.hidden // sizes.heads, total
        heads, kv_heads = sizes.heads // parts, sizes.kv_heads // parts
        self.wq = nn.Linear(sizes.hidden, heads * self.dim, bias=False)
        self.wk = nn.Linear(sizes.hidden, kv_heads * self.dim, bias=False)
        self.wv = nn.Linear(sizes.hidden, kv_heads * self.dim, bias=False)
        self.wo = nn.Linear(heads * self.dim, sizes.hidden, bias=False)
        self.decodes = sequences > 0
        if self.decodes:
            for name in ("keys", "values"):
                self.register_buffer(name, torch.randn(sequences, kv_heads, CACHED, self.dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            w(x).view(batch, tokens, -1, self.dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        if self.decodes:  # the new token is the last one of its sequence
            self.keys[:, :, -1:] = k
            self.values[:, :, -1:] = v
            k, v = self.keys, self.values
        y = F.scaled_dot_product_attention(q, k, v, is_causal=not self.decodes, enable_gqa=True)
        return self.total(self.wo(y.transpose(1, 2).reshape(batch, tokens, -1)))


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes, parts: int, total: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        width, self.total = sizes.intermediate // parts, total
        self.gate = nn.Linear(sizes.hidden, width, bias=False)
        self.up = nn.Linear(sizes.hidden, width, bias=False)
        self.down = nn.Linear(width, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.total(self.down(F.silu(self.gate(x)) * self.up(x)))


class Layer(nn.Module):
    def __init__(
        self, sizes: Sizes, parts: int, total: Callable[[Tensor], Tensor], sequences: int = 0
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention = Attention(sizes, parts, total, sequences)
        self.mlp = Mlp(sizes, parts, total)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Checkpointed(nn.Sequential):
    """Layers that compute their forward again in the backward: wide attention over all tokens is large."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def all_reduced(x: Tensor) -> Tensor:
    total: Tensor = funcol.all_reduce(x, "sum", world_group())
    return total


def as_it_is(x: Tensor) -> Tensor:
    return x


def serving(sizes: Sizes, layers: int, sequences: int, tokens: int, device: torch.device) -> Work:
    """`sequences`: a decoding step of so many; else the prefill of one sequence of `tokens`."""
    dtype, world = dtype_on(device), dist.get_world_size()
    with device:
        torch.manual_seed(dist.get_rank())
        # A layer at a time is float32 before it is cast.
        made = [Layer(sizes, world, all_reduced, sequences).to(dtype) for _ in range(layers)]
        torch.manual_seed(0)
        x = torch.randn(sequences or 1, 1 if sequences else tokens, sizes.hidden).to(dtype)
    model = nn.Sequential(*made).requires_grad_(False)

    def exact() -> Sequence[Tensor]:
        y = x.to(wider(dtype))
        for layer in model:
            y = copy.deepcopy(layer).to(y.dtype)(y)
        return [y]

    return serving_work(model, [x], exact, declared(model))


def training(sizes: Sizes, layers: int, sequence_parallel: bool, tokens: int, device: torch.device) -> Work:
    dtype, world, rank = dtype_on(device), dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device.type, (world,))
    if device.type == "cuda":  # for async TP
        enable_symmetric_memory(mesh.get_group())
    with device:
        torch.manual_seed(0)
        made = [Layer(sizes, 1, as_it_is).to(dtype) for _ in range(layers)]
        x, target = torch.randn(1, tokens, sizes.hidden).to(dtype), torch.randn(1, tokens, sizes.hidden)
    for layer in made:
        parallelize_module(layer, mesh, _plan(sequence_parallel))
    model = nn.Sequential(*made)
    if sequence_parallel:
        x, target = (each.chunk(world, 1)[rank].contiguous() for each in (x, target))

    def exact() -> tuple[nn.Module, Sequence[Tensor]]:
        return Checkpointed(*copy.deepcopy(model).to(wider(dtype))), [x.to(wider(dtype))]

    declare = None if sequence_parallel else declared(model)
    return training_work(model, [x], target, exact, declare)


def declared(model: nn.Sequential) -> Callable[[], None]:
    """Declares that all ranks have the same norms, the same input, and the same gradients of the output."""
    return lambda: autofuse.replicated(model, parameters=["*norm*"], inputs=["input"], gradients=True)


def _plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    columns = ("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up")
    rows = ("attention.wo", "mlp.down")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    if not sequence_parallel:
        return plan | {name: RowwiseParallel() for name in rows}
    gathers = {
        name: PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        for name in ("attention", "mlp")
    }
    norms = {name: SequenceParallel() for name in ("norm1", "norm2")}
    return plan | gathers | norms | {name: RowwiseParallel(output_layouts=Shard(1)) for name in rows}


def cells(
    names: Sequence[str],
    layers: tuple[int, int],
    prefill: Sequence[int],
    decode: Sequence[int],
    train: Sequence[int],
) -> list[Cell]:
    """`layers`: of serving and of training."""
    shots = ("one-shot", "two-shot", NO_TAILS)
    found = []
    for name in names:
        sizes, (served, trained) = MODELS[name], layers
        for count in decode:
            make = partial(serving, sizes, served, count, 1)
            row = f"{name} x {served} decode {count}"
            found.append(Cell(row, make, shots, captured=True, declares=True))
        for count in prefill:
            make = partial(serving, sizes, served, 0, count)
            found.append(
                Cell(f"{name} x {served} prefill {count}", make, shots, captured=True, declares=True)
            )
        for count in train:
            for plan, others in (("sp", ("async TP",)), ("tp", shots)):
                make = partial(training, sizes, trained, plan == "sp", count)
                row = f"{name} x {trained} train {plan} {count}"
                found.append(Cell(row, make, others, declares=plan == "tp"))
    return found
