"""Programs of embeddings whose vocabulary ranks share: each reads the rows that it has; all are summed."""

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
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from .dense import AR, RS, group
from .harness import Program

ROWS, D = 6, 16
SHAPE = (3, 8)
Build = Callable[[int, int], tuple[Callable[..., Any], tuple[Any, ...]]]


class Vocabulary(nn.Module):
    """The rows `[r * ROWS, (r + 1) * ROWS)` on rank r. dim: along which the sum is scattered, if it is.
    indexes: the weight is indexed (Megatron-LM), and some numbers count from the last row."""

    def __init__(self, dim: int | None, dtype: torch.dtype, puts: bool, indexes: bool) -> None:
        super().__init__()
        self.dim, self.puts, self.indexes, self.first = dim, puts, indexes, dist.get_rank() * ROWS
        self.weight = nn.Parameter(torch.randn(ROWS, D, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        elsewhere = (tokens < self.first) | (tokens >= self.first + ROWS)
        if self.puts:
            here = tokens - self.first
            here[elsewhere] = 0
            if self.indexes:
                rows = self.weight[torch.where(here % 2 == 1, here - ROWS, here)]
            else:
                rows = F.embedding(here, self.weight)
            rows[elsewhere, :] = 0.0
        else:
            here = (tokens - self.first).masked_fill(elsewhere, 0)
            rows = F.embedding(here, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.dim is None:
            return funcol.all_reduce(rows, "sum", group()).relu()
        if rows.requires_grad:
            return funcol.reduce_scatter_tensor_autograd(rows, "sum", self.dim, group()).relu()
        return funcol.reduce_scatter_tensor(rows, "sum", self.dim, group()).relu()


def vocabulary(
    dim: int | None = None, dtype: torch.dtype = torch.float32, puts: bool = False, indexes: bool = False
) -> Build:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        model = Vocabulary(dim, dtype, puts, indexes)
        torch.manual_seed(0)
        return model, (torch.randint(0, world * ROWS, SHAPE),)

    return build


def of_dtensors(scattered: bool) -> Build:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(0)
        output = Shard(1) if scattered else Replicate()
        plan = {"0": RowwiseParallel(input_layouts=Replicate(), output_layouts=output)}
        model = parallelize_module(
            nn.Sequential(nn.Embedding(world * ROWS, D), nn.ReLU()), init_device_mesh("cpu", (world,)), plan
        )
        return model, (torch.randint(0, world * ROWS, SHAPE),)

    return build


def scaled(tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The rows are read elsewhere, too."""
    rows = F.embedding(tokens, weight) * 2.0
    return funcol.all_reduce(rows, "avg", group()).relu(), rows.sin()


def two(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows of two tables, which no product adds."""
    rows = F.embedding(tokens, weight) + F.embedding(tokens + 1, weight)
    return funcol.all_reduce(rows, "sum", group()).relu()


def given(fn: Callable[[Tensor, Tensor], Any]) -> Build:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return fn, (torch.randint(0, ROWS - 1, SHAPE), torch.randn(ROWS, D))

    return build


PROGRAMS: dict[str, Program] = {
    "all_reduce": Program(vocabulary(), {"inference": [AR]}, worlds=(2, 4)),
    "all_reduce, bfloat16": Program(vocabulary(dtype=torch.bfloat16, puts=True), {"inference": [AR]}),
    "reduce_scatter": Program(vocabulary(1), {"inference": [RS]}, worlds=(2, 4)),
    "reduce_scatter, columns": Program(vocabulary(2, puts=True), {"inference": [RS]}),
    "dynamic": Program(vocabulary(puts=True), {"inference": [AR]}, dynamic=True),
    "indexed": Program(vocabulary(puts=True, indexes=True), {"inference": [AR]}),
    "indexed, training": Program(
        vocabulary(1, puts=True, indexes=True),
        {"forward": [RS]},
        {"backward": ["no_compute"]},
        grad=True,
    ),
    "training": Program(
        vocabulary(1), {"forward": [RS]}, {"backward": ["no_compute"]}, grad=True, worlds=(2, 4)
    ),
    "DTensor": Program(of_dtensors(False), {"inference": [AR]}),
    "DTensor, sequence parallel": Program(of_dtensors(True), {"inference": [RS]}),
    "also read": Program(given(scaled), {"inference": [AR]}),
    "two": Program(given(two), {"inference": [AR]}),
}
