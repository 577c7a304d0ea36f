"""Programs of recommendation models: pooled embeddings, exchanged, in the spellings that people use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from .harness import Program, since

FORWARD, BACKWARD = "embedding_bag_all_to_all", "all_to_all_embedding_bag_backward"
TABLES, LOCAL_BATCH, DIM, ROWS, POOLING = 3, 4, 8, 50, 5


class Exchange(torch.autograd.Function):
    """A synchronous all_to_all of equal parts with its backward, as recommendation models have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty(x.numel())
        dist.all_to_all_single(out, x.reshape(-1))
        ctx.shape = x.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = grad.new_empty(grad.numel())
        dist.all_to_all_single(out, grad.contiguous())
        return out.view(ctx.shape)


def exchange(x: Tensor, output: list[int] | None = None, inputs: list[int] | None = None) -> Tensor:
    assert dist.group.WORLD is not None
    if x.requires_grad:
        world = dist.get_world_size()
        equal = [x.shape[0] // world] * world
        return funcol.all_to_all_single_autograd(x, output or equal, inputs or equal, dist.group.WORLD)
    return funcol.all_to_all_single(x, output, inputs, dist.group.WORLD)


class Tables(nn.Module):
    """Pools `dims` tables over the global batch and exchanges them in the spelling `how`.

    sparse: which tables have sparse gradients, from the first on again where it is too short.
    """

    def __init__(
        self,
        how: str,
        dims: list[int],
        weighted: bool,
        mode: str,
        sparse: Sequence[bool] = (False,),
        **bag: Any,
    ) -> None:
        super().__init__()
        self.how, self.dims, self.weighted = how, dims, weighted
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS, d, mode=mode, sparse=s, **bag)
            for d, s in zip(dims, cycle(sparse), strict=False)
        )

    def forward(self, indices: list[Tensor], offsets: list[Tensor], weights: list[Tensor]) -> Tensor:
        pooled = []
        for k, table in enumerate(self.tables):
            weight = weights[k] if self.weighted else None
            pooled.append(table(indices[k], offsets[k] if offsets else None, per_sample_weights=weight))
        return getattr(self, self.how)(pooled).sin()

    @staticmethod
    def per_source(flat: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([t.view(LOCAL_BATCH, -1) for t in flat.split(sizes)], 1)

    def flat(self, pooled: list[Tensor]) -> Tensor:
        world = dist.get_world_size()
        size = LOCAL_BATCH * sum(self.dims)
        return self.per_source(exchange(torch.cat(pooled, 1).view(-1)), [size] * world).view(LOCAL_BATCH, -1)

    def uneven(self, pooled: list[Tensor]) -> Tensor:
        """The other ranks have one table less."""
        world, rank = dist.get_world_size(), dist.get_rank()
        mine = torch.cat(pooled, 1).view(-1)
        columns = [DIM * (TABLES - (r > 0)) for r in range(world)]
        received = [LOCAL_BATCH * c for c in columns]
        sent = [LOCAL_BATCH * columns[rank]] * world
        return self.per_source(exchange(mine, received, sent), received)

    def of_batch(self, pooled: list[Tensor]) -> Tensor:
        """Sizes are computed from a batch that varies. Rank 0 has an even number of columns, others an odd
        one."""
        world, mine = dist.get_world_size(), torch.cat(pooled, 1)
        batch = mine.shape[0] // world
        if self.how == "of_parts":
            mine = mine.view(world, batch, -1)
        received = [batch * sum(self.dims_of_rank(r)) for r in range(world)]
        out = exchange(mine.reshape(-1), received, [received[dist.get_rank()]] * world)
        return torch.cat([t.view(batch, -1) for t in out.split(received)], 1)

    of_parts = of_batch

    @staticmethod
    def dims_of_rank(rank: int) -> list[int]:
        return [8, 12] if rank == 0 else [3, 4, 12]

    def rows(self, pooled: list[Tensor]) -> Tensor:
        world = dist.get_world_size()
        out = exchange(torch.cat(pooled, 1)).view(world, LOCAL_BATCH, -1)
        return out.permute(1, 0, 2).reshape(LOCAL_BATCH, -1)

    def rows_wire_bf16(self, pooled: list[Tensor]) -> Tensor:
        world = dist.get_world_size()
        out = exchange(torch.cat(pooled, 1).bfloat16()).float().view(world, LOCAL_BATCH, -1)
        return out.permute(1, 0, 2).reshape(LOCAL_BATCH, -1)

    def stacked_tables_first(self, pooled: list[Tensor]) -> Tensor:
        world = dist.get_world_size()
        x = torch.stack(pooled).view(len(pooled), world, LOCAL_BATCH, DIM).transpose(0, 1).contiguous()
        return exchange(x).view(-1, LOCAL_BATCH, DIM).transpose(0, 1)

    def stacked_batch_first(self, pooled: list[Tensor]) -> Tensor:
        world = dist.get_world_size()
        out = exchange(torch.stack(pooled, 1)).view(world, LOCAL_BATCH, len(pooled), DIM)
        return out.transpose(0, 1).reshape(LOCAL_BATCH, -1, DIM)

    def in_place(self, pooled: list[Tensor]) -> Tensor:
        x = torch.cat(pooled, 1).view(-1)
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return self.per_source(out, [x.numel() // dist.get_world_size()] * dist.get_world_size())

    def function(self, pooled: list[Tensor]) -> Tensor:
        out = Exchange.apply(torch.cat(pooled, 1))
        return self.per_source(out, [out.numel() // dist.get_world_size()] * dist.get_world_size())

    def pooled_also_read(self, pooled: list[Tensor]) -> Tensor:
        return self.rows(pooled) + pooled[0].sum()


def tables(
    how: str,
    dims: list[int] | None = None,
    offsets: bool = True,
    weighted: bool = False,
    mode: str = "sum",
    index: torch.dtype = torch.int64,
    **bag: Any,
) -> Callable[[int, int], tuple[Callable[..., Any], tuple[Any, ...]]]:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(rank)
        count = TABLES - (rank > 0) if how == "uneven" else TABLES
        mine = (dims or [DIM] * TABLES)[:count]
        if how in OF_BATCH:
            mine = Tables.dims_of_rank(rank)
            count = len(mine)
        model = Tables(how, mine, weighted, mode, **bag)
        batch = LOCAL_BATCH * world
        last = bag.get("include_last_offset", False)
        shape = (batch * POOLING,) if offsets else (batch, POOLING)
        indices = [torch.randint(0, ROWS, shape, dtype=index) for _ in range(count)]
        every = torch.arange(0, batch * POOLING + last, POOLING, dtype=index)
        starts = [every.clone() for _ in range(count)] if offsets else []
        return model, (indices, starts, [torch.rand(batch * POOLING) for _ in range(count)])

    return build


OF_BATCH = ("of_batch", "of_parts")

TRAIN = ({"forward": [FORWARD], "backward": [BACKWARD]},)
INFER = ({"inference": [FORWARD]},)

PROGRAMS: dict[str, Program] = {
    "flat, training": Program(tables("flat"), *TRAIN, grad=True, worlds=(2, 4)),
    "rows": Program(tables("rows"), *INFER, worlds=(2, 4)),
    "rows, training": Program(tables("rows"), *TRAIN, grad=True),
    "rows, several widths, training": Program(tables("rows", [4, 8, 12]), *TRAIN, grad=True),
    "rows, mean, training": Program(tables("rows", mode="mean"), *TRAIN, grad=True),
    "rows, last offset, training": Program(tables("rows", include_last_offset=True), *TRAIN, grad=True),
    "rows, padding, training": Program(tables("rows", padding_idx=3), *TRAIN, grad=True),
    "rows, max": Program(tables("rows", mode="max"), *INFER),
    "rows, max, training": Program(tables("rows", mode="max"), *TRAIN, grad=True),
    "rows, sparse, training": Program(
        tables("rows", sparse=[True]), *TRAIN, grad=True, tolerance=0, worlds=(2, 4)
    ),
    "rows, sparse, padding, training": Program(
        tables("rows", sparse=[True], padding_idx=3), *TRAIN, grad=True, tolerance=0
    ),
    "rows, sparse, mean, int32, last offset, training": Program(
        tables("rows", [4, 8, 20], mode="mean", sparse=[True], index=torch.int32, include_last_offset=True),
        *TRAIN,
        grad=True,
    ),
    "rows, sparse and dense, training": Program(tables("rows", sparse=[False, True]), *TRAIN, grad=True),
    "uneven, sparse, training": Program(tables("uneven", sparse=[True, False]), *TRAIN, grad=True),
    "dynamic, sparse, training": Program(
        tables("rows", sparse=[True, False]), *TRAIN, grad=True, dynamic=True
    ),
    "rows, sparse, bf16 on the wire, training": Program(
        tables("rows_wire_bf16", sparse=[True]), *TRAIN, grad=True, tolerance=0.01
    ),
    "rows, sparse mean with padding, training": Program(
        tables("rows", mode="mean", sparse=[True], padding_idx=3), *TRAIN, grad=True
    ),
    "rows, bf16 on the wire": Program(tables("rows_wire_bf16"), *INFER, tolerance=0.01),
    "stacked, tables first": Program(tables("stacked_tables_first"), *INFER, worlds=(2, 4)),
    "stacked, tables first, training": Program(tables("stacked_tables_first"), *TRAIN, grad=True),
    "stacked, batch first": Program(tables("stacked_batch_first", offsets=False), *INFER),
    "stacked, batch first, training": Program(
        tables("stacked_batch_first", offsets=False), *TRAIN, grad=True
    ),
    "weighted, training": Program(tables("flat", weighted=True), *TRAIN, grad=True),
    "uneven": Program(tables("uneven"), *INFER),
    "uneven, training": Program(tables("uneven"), *TRAIN, grad=True),
    "in place": Program(tables("in_place"), *INFER),
    "autograd function, training": since(
        "2.13",
        Program(tables("function"), *TRAIN, grad=True),
        # Torch 2.11 loses the gradient of an in-place collective there: what it exchanges are zeros.
        fused={"forward": [FORWARD]},
        kept={"forward": ["no_compute"], "backward": ["no_compute"]},
        unfused=True,
    ),
    "pooled rows also read": Program(tables("pooled_also_read"), *INFER),
    "dynamic, training": Program(tables("rows"), *TRAIN, grad=True, dynamic=True),
    **{
        f"{how}{', last offset' * last}, dynamic, training": Program(
            tables(how, include_last_offset=last), *TRAIN, grad=True, dynamic=True, worlds=(2, 4)
        )
        for how in OF_BATCH
        for last in (False, True)
    },
}
