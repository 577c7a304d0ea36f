"""The rows: small functions as a user writes them, with inputs for every rank.

A case makes several sets of inputs, which a measurement uses in turn. Together they do not fit into a cache,
so that weights come from memory, as in a model of many layers. Parameters are arguments: one compilation
serves all sets.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as funcol

Inputs: TypeAlias = tuple[Tensor | list[Tensor], ...]

ROTATION_BYTES = 64 << 20
"""Bytes of all sets of inputs of one rank, unless that takes more than `MOST_SETS` sets."""
MOST_SETS = 16

TABLES, TABLE_ROWS, TABLE_DIM = 16, 100_000, 64
EXPERTS = 8


@dataclass(frozen=True)
class Case:
    """One row of the benchmark for one size of group. `inputs(generator)` makes this rank's next set."""

    name: str
    function: Callable[..., Tensor]
    inputs: Callable[[torch.Generator], Inputs]


def cases(rank: int, world: int, dtype: torch.dtype) -> Iterator[Case]:
    """All rows of a group of `world` ranks, for this rank. The default group must exist."""
    group = dist.group.WORLD
    assert group is not None
    for size in (2048, 4096):
        for tokens in (1, 16, 128, 1024):
            yield _matmul_all_reduce(tokens, size, world, dtype, group)
    for size in (2048, 4096):
        for tokens in (1, 16, 128, 1024):
            yield _matmul_reduce_scatter(tokens, size, world, dtype, group)
    for size in (2048, 4096):
        for tokens in (1, 16, 128, 1024):
            yield _all_gather_matmul(tokens, size, world, dtype, group)
    for size in (2048, 4096):
        for tokens in (1, 16, 128, 1024):
            yield _matmul_all_gather(tokens, size, world, dtype, group)
    for batch in (512, 2048):
        for pooling in (1, 10, 40):
            yield _embedding(batch, pooling, rank, world, dtype, group)
    for hidden in (512, 1024):
        for tokens in (128, 2048):
            yield _experts(tokens, hidden, world, dtype, group)


def _matmul_all_reduce(tokens: int, size: int, world: int, dtype: torch.dtype, group: ProcessGroup) -> Case:
    """Row-parallel linear: `AR(x @ weight^T)`, x: [tokens, K / W], weight: [N, K / W]."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return funcol.all_reduce(F.linear(x, weight), "sum", group)

    inputs = _dense((tokens, size // world), (size, size // world), dtype)
    return Case(f"matmul_all_reduce tokens={tokens} k=n={size}", function, inputs)


def _matmul_reduce_scatter(
    tokens: int, size: int, world: int, dtype: torch.dtype, group: ProcessGroup
) -> Case:
    """`RS(x @ weight^T)` by rows; by columns where there are fewer tokens than ranks."""
    dim = 0 if tokens % world == 0 else 1

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor(F.linear(x, weight), "sum", dim, group)

    inputs = _dense((tokens, size // world), (size, size // world), dtype)
    return Case(f"matmul_reduce_scatter tokens={tokens} k=n={size} dim={dim}", function, inputs)


def _all_gather_matmul(tokens: int, size: int, world: int, dtype: torch.dtype, group: ProcessGroup) -> Case:
    """Column-parallel linear: `AG(x) @ weight^T`, weight: [N / W, K]; gathers rows, or columns as above."""
    dim = 0 if tokens % world == 0 else 1
    part = (tokens // world, size) if dim == 0 else (tokens, size // world)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(funcol.all_gather_tensor(x, dim, group), weight)

    inputs = _dense(part, (size // world, size), dtype)
    return Case(f"all_gather_matmul tokens={tokens} k=n={size} dim={dim}", function, inputs)


def _matmul_all_gather(tokens: int, size: int, world: int, dtype: torch.dtype, group: ProcessGroup) -> Case:
    """The logits of an lm_head: `AG(x @ weight^T)` by columns, x: [tokens, K], weight: [N / W, K]."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return funcol.all_gather_tensor(F.linear(x, weight), 1, group)

    inputs = _dense((tokens, size), (size // world, size), dtype)
    return Case(f"matmul_all_gather tokens={tokens} k=n={size}", function, inputs)


def _dense(
    x: tuple[int, int], weight: tuple[int, int], dtype: torch.dtype
) -> Callable[[torch.Generator], Inputs]:
    def inputs(generator: torch.Generator) -> Inputs:
        return _normal(x, 1.0, generator, dtype), _normal(weight, weight[1] ** -0.5, generator, dtype)

    return inputs


def _embedding(
    batch: int, pooling: int, rank: int, world: int, dtype: torch.dtype, group: ProcessGroup
) -> Case:
    """Tables by model parallelism: pools T local tables over the global batch, `[batch / W, 16, dim]`."""
    local, part = TABLES // world, batch // world
    offsets = torch.arange(0, batch * pooling, pooling)

    def function(tables: list[Tensor], indices: list[Tensor], offsets: Tensor) -> Tensor:
        pooled = [F.embedding_bag(i, t, offsets, mode="sum") for i, t in zip(indices, tables, strict=True)]
        sent = torch.cat(pooled, 1).view(world, part, local, TABLE_DIM)
        received = funcol.all_to_all_single(sent, None, None, group)
        return received.transpose(0, 1).reshape(part, TABLES, TABLE_DIM)

    @cache
    def tables() -> list[Tensor]:
        """Far larger than a cache: one set for all inputs."""
        generator = torch.Generator().manual_seed(rank)
        return [_normal((TABLE_ROWS, TABLE_DIM), 1.0, generator, dtype) for _ in range(local)]

    def inputs(generator: torch.Generator) -> Inputs:
        indices = [
            torch.randint(0, TABLE_ROWS, (batch * pooling,), generator=generator) for _ in range(local)
        ]
        return tables(), indices, offsets

    return Case(f"embedding batch={batch} pooling={pooling}", function, inputs)


def _experts(tokens: int, hidden: int, world: int, dtype: torch.dtype, group: ProcessGroup) -> Case:
    """Fixed capacity, 8 experts in all: dispatch, two expert matmuls of hidden x hidden, combine."""
    local, capacity = EXPERTS // world, tokens // EXPERTS

    def function(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        x = funcol.all_to_all_single(x, None, None, group)
        rows = x.view(world, local, capacity, hidden).transpose(0, 1).reshape(local, -1, hidden)
        rows = torch.bmm(torch.bmm(rows, up).relu(), down)
        y = rows.view(local, world, capacity, hidden).transpose(0, 1).reshape(-1, hidden)
        return funcol.all_to_all_single(y, None, None, group)

    def inputs(generator: torch.Generator) -> Inputs:
        weight = (local, hidden, hidden)
        return (
            _normal((EXPERTS * capacity, hidden), 1.0, generator, dtype),
            _normal(weight, hidden**-0.5, generator, dtype),
            _normal(weight, hidden**-0.5, generator, dtype),
        )

    return Case(f"experts tokens={tokens} hidden={hidden}", function, inputs)


def _normal(shape: tuple[int, ...], scale: float, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=generator) * scale).to(dtype)
