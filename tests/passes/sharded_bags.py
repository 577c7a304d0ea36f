"""Embedding bags of which each rank has rows: it pools those that it has, and the ranks add them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from .dense import AR, BF16, RS, group, plain
from .harness import Program

ROWS, BAGS = 6, 8
Build = Callable[[int, int], tuple[Callable[..., Any], tuple[Any, ...]]]


class Masked(nn.Module):
    """All ranks have all indices. Those of other ranks weigh nothing, or read a row of zeros."""

    def __init__(self, dtype: torch.dtype, weighs: bool, sparse: bool) -> None:
        super().__init__()
        self.weighs, self.sparse = weighs, sparse
        self.weight = nn.Parameter(torch.randn(ROWS + 1, 5, dtype=dtype))

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        here = indices - dist.get_rank() * ROWS
        elsewhere = (here < 0) | (here >= ROWS)
        here = here.masked_fill(elsewhere, ROWS)
        weights = (~elsewhere).to(self.weight.dtype) if self.weighs else None
        pooled = F.embedding_bag(
            here, self.weight, offsets, mode="sum", per_sample_weights=weights, sparse=self.sparse,
            padding_idx=None if self.weighs else ROWS,
        )  # fmt: skip
        if pooled.requires_grad:
            return funcol.reduce_scatter_tensor_autograd(pooled, "sum", 0, group()).sin()
        return funcol.reduce_scatter_tensor(pooled, "sum", 0, group()).sin()


def masked(dtype: torch.dtype = torch.float32, weighs: bool = False, sparse: bool = False) -> Build:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        model = Masked(dtype, weighs, sparse)
        torch.manual_seed(0)
        return model, (torch.randint(0, world * ROWS, (3 * BAGS,)), torch.arange(0, 3 * BAGS, 3))

    return build


def bucketed(fn: Callable[..., Any], *widths: int, last: bool = False, dtype: Any = torch.float32) -> Build:
    """Each rank gets the indices of its rows alone, as torchrec sends them; rank 0 none of the first."""

    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        args: list[Tensor] = []
        for t, width in enumerate(widths):
            lengths = torch.randint(0, 4, (BAGS,)) if rank or t else torch.zeros(BAGS, dtype=torch.int64)
            ends = lengths.cumsum(0)
            offsets = torch.cat([ends.new_zeros(1), ends])
            indices = torch.randint(0, ROWS, (int(ends[-1]),), dtype=torch.int64)
            args += [torch.randn(ROWS, width, dtype=dtype), indices, offsets if last else offsets[:-1]]
        return fn, tuple(args)

    return build


def pool(mode: str, *args: Tensor, last: bool = False) -> list[Tensor]:
    """Of table, indices and offsets, one after the other."""
    return [
        F.embedding_bag(args[t + 1], args[t], args[t + 2], mode=mode, include_last_offset=last)
        for t in range(0, len(args), 3)
    ]


def several(*args: Tensor) -> Tensor:
    pooled = torch.cat(pool("sum", *args), 1)
    return funcol.reduce_scatter_tensor(pooled, "sum", 0, group()).sin()


def several_summed(*args: Tensor) -> Tensor:
    return funcol.all_reduce(torch.cat(pool("mean", *args, last=True), -1), "avg", group()).sin()


def summed(*args: Tensor) -> Tensor:
    return funcol.all_reduce(torch.cat(pool("sum", *args), 1), "sum", group()).sin()


def cast(*args: Tensor) -> Tensor:
    rows = torch.cat(pool("sum", *args), 1).bfloat16()
    return funcol.reduce_scatter_tensor(rows, "sum", 0, group()).sin()


def along_columns(*args: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(torch.cat(pool("max", *args), 1), "sum", 1, group()).sin()


def in_the_middle(*args: Tensor) -> Tensor:
    """Bags of two samples, each of which is cut."""
    pooled = torch.cat(pool("sum", *args), 1).view(2, BAGS // 2, -1)
    return funcol.reduce_scatter_tensor(pooled, "sum", 1, group()).sin()


def scaled(*args: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled by bag, sent in bfloat16; the scaled rows are read elsewhere, too."""
    rows = (pool("sum", *args)[0] * args[1].new_ones(BAGS, 1).float().cumsum(0)).bfloat16()
    return funcol.reduce_scatter_tensor(rows, "sum", 0, group()).sin(), rows.float().sum()


def read_alone(*args: Tensor) -> tuple[Tensor, Tensor]:
    pooled = pool("sum", *args)
    return funcol.all_reduce(torch.cat(pooled, 1), "sum", group()), pooled[0].sin()


def joined(*rows: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(torch.cat(rows, 1), "sum", 0, group())


def mixed_modes(*args: Tensor) -> Tensor:
    pooled = torch.cat([*pool("sum", *args[:3]), *pool("mean", *args[3:])], 1)
    return funcol.all_reduce(pooled, "sum", group()).sin()


def stays(reason: str, build: Build) -> Program:
    return Program(build, kept={"inference": [reason]})


PROGRAMS: dict[str, Program] = {
    "masked": Program(masked(), {"inference": [RS]}, worlds=(2, 4)),
    "weighted, bfloat16": Program(masked(BF16, weighs=True), {"inference": [RS]}, tolerance=0.02),
    "training": Program(masked(), {"forward": [RS]}, {"backward": ["no_compute"]}, grad=True, worlds=(2, 4)),
    "training, sparse": Program(
        masked(sparse=True), {"forward": [RS]}, {"backward": ["no_compute"]}, grad=True
    ),
    "several tables": Program(bucketed(several, 5, 3, 8), {"inference": [RS]}, worlds=(2, 4)),
    "several tables, dynamic": Program(bucketed(several, 5, 3), {"inference": [RS]}, dynamic=True),
    "all_reduce": Program(bucketed(several_summed, 4, 4, last=True), {"inference": [AR]}, worlds=(2, 4)),
    "columns": Program(bucketed(along_columns, 6, 2), {"inference": [RS]}),
    "cast": Program(bucketed(cast, 6, 2), {"inference": [RS]}, tolerance=0.02),
    "in the middle": Program(bucketed(in_the_middle, 6, 2), {"inference": [RS]}),
    "scaled": Program(bucketed(scaled, 6), {"inference": [RS]}, tolerance=0.02),
    "no bags": stays("no_compute", plain(joined, (BAGS, 2), (BAGS, 3))),
    "one is read alone": stays("extra_users", bucketed(read_alone, 6, 2)),
    "two modes": stays("unsupported_variant", bucketed(mixed_modes, 6, 2)),
}
