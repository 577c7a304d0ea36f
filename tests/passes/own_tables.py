"""Ranks whose embedding tables differ in more than number and size: all of them must fuse the exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Program
from .recommendation import DIM, INFER, LOCAL_BATCH, POOLING, ROWS, TRAIN, Tables, exchange

ALIKE = ("sum", "sum", "sum")
"""The tables of all ranks but the last one."""


class OwnTables(nn.Module):
    """A rank has a table for each word of `kinds`, which says how its rows become columns of the exchange."""

    def __init__(self, kinds: Sequence[str], of_last: int, wire: torch.dtype) -> None:
        super().__init__()
        self.kinds, self.of_last, self.wire = kinds, of_last, wire
        self.weights = nn.ParameterList(
            torch.randn(ROWS, DIM, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
            for kind in kinds
        )

    def forward(self, indices: list[Tensor], offsets: Tensor, samples: Tensor) -> Tensor:
        pooled = [
            self.columns(kind, w, i, offsets, samples)
            for kind, w, i in zip(self.kinds, self.weights, indices, strict=True)
        ]
        world, sent = dist.get_world_size(), torch.cat(pooled, 1).to(self.wire)
        if self.of_last != len(ALIKE):
            columns = [DIM * (len(ALIKE) if r < world - 1 else self.of_last) for r in range(world)]
            sizes = [LOCAL_BATCH * c for c in columns]
            out = exchange(sent.view(-1), sizes, [LOCAL_BATCH * columns[dist.get_rank()]] * world)
            return Tables.per_source(out, sizes).float().sin()
        out = exchange(sent).float().view(world, LOCAL_BATCH, -1)
        return out.permute(1, 0, 2).reshape(LOCAL_BATCH, -1).sin()

    @staticmethod
    def columns(kind: str, w: Tensor, indices: Tensor, offsets: Tensor, samples: Tensor) -> Tensor:
        if kind in ("sum", "mean", "max", "bfloat16"):
            return F.embedding_bag(indices, w, offsets, mode="sum" if kind == "bfloat16" else kind)
        if kind == "padding":
            return F.embedding_bag(indices, w, offsets, mode="sum", padding_idx=3)
        if kind == "last offset":
            ends = torch.cat([offsets, offsets.new_full((1,), indices.shape[0])])
            return F.embedding_bag(indices, w, ends, mode="sum", include_last_offset=True)
        if kind == "weighted":
            return F.embedding_bag(indices, w, offsets, mode="sum", per_sample_weights=samples)
        if kind == "frequency":
            return F.embedding_bag(indices, w, offsets, mode="sum", scale_grad_by_freq=True)
        if kind == "int32":
            return F.embedding_bag(indices.int(), w, offsets.int(), mode="sum")
        if kind == "scaled":
            return F.embedding_bag(indices, w, offsets, mode="sum") * 0.5
        return F.embedding(indices.view(-1, POOLING), w).sum(1)


def own(
    *kinds: str, wire: torch.dtype = torch.float32
) -> Callable[[int, int], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The last rank has tables of these kinds."""

    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(rank)
        mine, batch = kinds if rank == world - 1 else ALIKE, LOCAL_BATCH * world
        indices = [torch.randint(0, ROWS, (batch * POOLING,)) for _ in mine]
        offsets = torch.arange(0, batch * POOLING, POOLING)
        return OwnTables(mine, len(kinds), wire), (indices, offsets, torch.rand(batch * POOLING))

    return build


class NoTables(nn.Module):
    """The last rank has nothing to send."""

    def __init__(self, world: int, rank: int) -> None:
        super().__init__()
        self.columns = [DIM * (r < world - 1) for r in range(world)]
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(rank < world - 1))
        self.nothing = nn.Parameter(torch.empty(LOCAL_BATCH * world, 0))

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        world, rank = dist.get_world_size(), dist.get_rank()
        pooled = [table(indices, offsets) for table in self.tables]
        sent = torch.cat([*pooled, self.nothing], 1).view(-1)
        sizes = [LOCAL_BATCH * c for c in self.columns]
        return Tables.per_source(exchange(sent, sizes, [sizes[rank]] * world), sizes).sin()


def no_tables(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    torch.manual_seed(rank)
    batch = LOCAL_BATCH * world
    indices = torch.randint(0, ROWS, (batch * POOLING,))
    return NoTables(world, rank), (indices, torch.arange(0, batch * POOLING, POOLING))


PROGRAMS: dict[str, Program] = {
    "modes, training": Program(own("sum", "mean", "sum"), *TRAIN, grad=True, worlds=(2, 3)),
    "all of them other, training": Program(own("max", "padding", "frequency"), *TRAIN, grad=True),
    "a mean, padding and weights, training": Program(own("mean", "padding", "weighted"), *TRAIN, grad=True),
    "a last offset, training": Program(own("last offset", "last offset", "sum"), *TRAIN, grad=True),
    "all padding, training": Program(own("padding", "padding", "max"), *TRAIN, grad=True),
    "dtypes, training": Program(own("bfloat16", "sum", "int32"), *TRAIN, grad=True, tolerance=0.03),
    "all of another dtype, training": Program(
        own("bfloat16", "bfloat16", "bfloat16"), *TRAIN, grad=True, tolerance=0.03
    ),
    "bf16 on the wire, training": Program(
        own("sum", "mean", "mean", wire=torch.bfloat16), *TRAIN, grad=True, tolerance=0.02
    ),
    "scaled, training": Program(own("sum", "scaled", "embedding"), *TRAIN, grad=True),
    "all scaled, training": Program(own("scaled", "scaled", "scaled"), *TRAIN, grad=True, worlds=(2, 3)),
    "all embeddings, dynamic, training": Program(
        own("embedding", "embedding", "embedding"), *TRAIN, grad=True, dynamic=True
    ),
    "no bag is alone, dynamic": Program(own("mean", "scaled", "max"), INFER[0], dynamic=True),
    "dynamic, training": Program(own("sum", "mean", "max"), *TRAIN, grad=True, dynamic=True),
    "uneven, training": Program(own("mean", "scaled", "sum", "max"), *TRAIN, grad=True),
    "no tables, training": Program(
        no_tables, kept={"forward": ["no_compute"], "backward": ["no_compute"]}, grad=True
    ),
}
