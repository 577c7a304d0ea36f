"""Programs with the synchronous pooled exchange of sharded embedding collections, and rarer embedding bags.

The exchange is an autograd function: forward sends `[B, D_local]` in runs of the bags of every rank and joins
what arrives by the columns of the sources; backward cuts the gradient into those columns and sends it back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Program, since
from .recommendation import BACKWARD, DIM, FORWARD, LOCAL_BATCH, POOLING, ROWS, exchange


class PooledExchange(torch.autograd.Function):
    """`x: [B, columns[r]]` to `[B / W, sum(columns)]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: list[int], wire: torch.dtype) -> Tensor:
        world, rank = dist.get_world_size(), dist.get_rank()
        ctx.columns, ctx.dtype, ctx.wire = columns, x.dtype, wire
        batch = x.shape[0] // world
        received = [batch * c for c in columns]
        out = torch.empty(sum(received), dtype=wire)
        dist.all_to_all_single(out, x.to(wire).view(-1), received, [batch * columns[rank]] * world)
        return torch.cat([part.view(batch, -1) for part in out.split(received)], 1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        world, rank = dist.get_world_size(), dist.get_rank()
        batch, mine = grad.shape[0], ctx.columns[rank]
        parts = grad.to(ctx.wire).split(ctx.columns, 1)
        sent = torch.cat([part.contiguous().view(-1) for part in parts])
        out = torch.empty(world * batch * mine, dtype=ctx.wire)
        dist.all_to_all_single(out, sent, [batch * mine] * world, [batch * c for c in ctx.columns])
        return out.view(world * batch, mine).to(ctx.dtype), None, None


class Sharded(nn.Module):
    """Table-wise sharding: rank r has `counts[r]` tables; features come back in the order `recat`."""

    def __init__(self, counts: list[int], wire: torch.dtype, recat: bool) -> None:
        super().__init__()
        self.columns = [DIM * c for c in counts]
        self.wire, self.recat = wire, recat
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(counts[dist.get_rank()])
        )

    def forward(self, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        pooled = torch.cat([t(i, o) for t, i, o in zip(self.tables, indices, offsets, strict=True)], 1)
        out = PooledExchange.apply(pooled, self.columns, self.wire)
        if self.recat:
            features = out.split([DIM] * (sum(self.columns) // DIM), 1)
            out = torch.cat(list(features[::-1]), 1)
        return out.sin()


def sharded(
    tables: int = 2, fewer: bool = False, wire: torch.dtype = torch.float32, recat: bool = False
) -> Callable[[int, int], tuple]:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(rank)
        counts = [tables - (fewer and r == world - 1) for r in range(world)]
        batch, count = LOCAL_BATCH * world, counts[rank]
        indices = [torch.randint(0, ROWS, (batch * POOLING,)) for _ in range(count)]
        return Sharded(counts, wire, recat), (indices, [torch.arange(0, batch * POOLING, POOLING)] * count)

    return build


class Spelling(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.tables = nn.ParameterList(torch.randn(ROWS, DIM) for _ in range(2))

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        world = dist.get_world_size()
        tables = list(self.tables)
        if self.how == "embedding and sum":
            pooled = [F.embedding(indices.view(-1, POOLING), t).sum(1) for t in tables]
        elif self.how == "rows and means of rows":
            bags = indices.view(-1, POOLING)
            pooled = [F.embedding(bags[:, 0], tables[0]), F.embedding(bags, tables[1], 3).mean(-2)]
        elif self.how == "rows of two tables":
            bags = indices.view(-1, POOLING)
            pooled = [F.embedding(bags[:, i], t) for i, t in enumerate(tables)]
        elif self.how == "rows in bfloat16":
            bags = indices.view(-1, POOLING)
            rows = [F.embedding(bags[:, 0], tables[0].bfloat16(), 2), F.embedding(bags, tables[1].bfloat16())]
            pooled = [rows[0], rows[1].sum(1)]
        elif self.how == "masked rows":
            bags, masks = indices.view(-1, POOLING), weights.view(-1, POOLING) > 0.3
            rows = [F.embedding(bags, t, padding_idx=3) for t in tables]
            pooled = [(rows[0] * masks.unsqueeze(-1)).sum(1), (masks.unsqueeze(2).float() * rows[1]).sum(-2)]
        elif self.how == "weighted rows":
            bags, samples = indices.view(-1, POOLING), weights.view(-1, POOLING)
            rows = [F.embedding(bags, tables[0]) * samples.unsqueeze(-1), F.embedding(bags, tables[1])]
            pooled = [r.sum(1) for r in rows]
        elif self.how == "rows of padding":
            bags = indices.view(-1, POOLING)
            pooled = [F.embedding(bags[:, i], t, padding_idx=3) for i, t in enumerate(tables)]
        elif self.how == "rows by frequency":
            bags = indices.view(-1, POOLING)
            pooled = [F.embedding(bags[:, i], t, scale_grad_by_freq=True) for i, t in enumerate(tables)]
        elif self.how == "rows of several widths":
            bags = indices.view(-1, POOLING)
            pooled = [F.embedding(bags[:, i], t[:, i:].contiguous()) for i, t in enumerate(tables)]
        elif self.how == "by index":
            pooled = [t[indices[: offsets.shape[0]]] for t in tables]
        elif self.how == "rows beside a bag":
            bags = indices.view(-1, POOLING)
            pooled = [F.embedding(bags[:, 1], tables[0]), F.embedding_bag(bags, tables[1], mode="sum")]
        elif self.how == "rows read elsewhere":
            rows = [F.embedding(indices.view(-1, POOLING), t) for t in tables]
            pooled = [r.sum(1) for r in rows]
            x = torch.cat([*pooled, rows[0].amax(1), rows[1].amax(1)], 1)
            return exchange(x).view(world, LOCAL_BATCH, -1).transpose(0, 1).flatten(1).sin()
        elif self.how == "bfloat16 tables":
            pooled = [F.embedding_bag(indices, t.bfloat16(), offsets, mode="sum") for t in tables]
        elif self.how == "one table":
            pooled = [F.embedding_bag(indices, tables[0], offsets, mode="sum")]
        elif self.how == "scaled":
            pooled = [F.embedding_bag(indices, t, offsets, mode="sum") * 0.5 for t in tables]
        elif self.how == "last two dims":
            pooled = [F.embedding_bag(indices, t, offsets, mode="mean") for t in tables]
            out = exchange(torch.stack(pooled, -1)).view(world, LOCAL_BATCH, DIM, 2)
            return out.permute(1, 0, 3, 2).reshape(LOCAL_BATCH, -1)
        elif self.how == "cat of rows":
            pooled = [F.embedding_bag(indices, t, offsets, mode="sum") for t in tables]
            x = torch.cat(pooled, 0).view(2, world, LOCAL_BATCH, DIM).transpose(0, 1).contiguous()
            return exchange(x).view(-1, LOCAL_BATCH, DIM).transpose(0, 1)
        elif self.how == "a third of the batch":
            few = indices.view(-1, POOLING)[: offsets.shape[0] // 3]
            pooled = [F.embedding_bag(few, t, mode="sum") for t in tables]
        else:
            pooled = [F.embedding_bag(indices, t, offsets, mode="sum") for t in tables]
        x = torch.cat(pooled, 1)
        return exchange(x).view(world, x.shape[0] // world, -1).transpose(0, 1).flatten(1).sin()


def spelled(how: str) -> Callable[[int, int], tuple]:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(rank)
        batch = LOCAL_BATCH * world * (3 if "third" in how else 1)
        indices, offsets = (
            torch.randint(0, ROWS, (batch * POOLING,)),
            torch.arange(0, batch * POOLING, POOLING),
        )
        return Spelling(how), (indices, offsets, torch.rand(batch * POOLING))

    return build


TRAIN = {"forward": [FORWARD], "backward": [BACKWARD]}
INFER = {"inference": [FORWARD]}


def in_place_gradient(program: Program) -> Program:
    """Torch 2.11 loses the gradient of an in-place collective in an autograd function."""
    return since(
        "2.13",
        program,
        fused={"forward": program.fused["forward"]},
        kept={"forward": ["no_compute"], "backward": ["no_compute"]},
        unfused=True,
    )


PROGRAMS: dict[str, Program] = {
    "sharded": Program(sharded(), INFER),
    "sharded, training": in_place_gradient(Program(sharded(), TRAIN, grad=True)),
    "sharded, uneven, training": in_place_gradient(
        Program(sharded(fewer=True), TRAIN, grad=True, worlds=(2, 4))
    ),
    "sharded, bf16 on the wire, training": Program(
        sharded(wire=torch.bfloat16), TRAIN, grad=True, tolerance=0.02
    ),
    "sharded, uneven, bf16 on the wire, training": Program(
        sharded(fewer=True, wire=torch.bfloat16), TRAIN, grad=True, tolerance=0.02
    ),
    "sharded, permuted features, training": in_place_gradient(Program(sharded(recat=True), TRAIN, grad=True)),
    **{
        how: Program(spelled(how), INFER)
        for how in ("one table", "last two dims", "cat of rows", "two tables")
    },
    # Eager adds in bfloat16.
    "bfloat16 tables": Program(spelled("bfloat16 tables"), INFER, tolerance=0.03),
    "a third of the batch, dynamic": Program(spelled("a third of the batch"), INFER, dynamic=True),
    # Torch computes all rows, which the op sends: other ranks may have bags.
    "scaled": Program(spelled("scaled"), INFER),
    "scaled, training": Program(spelled("scaled"), TRAIN, grad=True),
    "embedding and sum": Program(spelled("embedding and sum"), INFER),
    "embedding and sum, dynamic": Program(spelled("embedding and sum"), INFER, dynamic=True),
    **{
        f"{how}, training": Program(spelled(how), TRAIN, grad=True)
        for how in ("embedding and sum", "rows and means of rows", "rows of two tables", "rows beside a bag")
    },
    "rows in bfloat16, training": Program(spelled("rows in bfloat16"), TRAIN, grad=True, tolerance=0.03),
    "masked rows, training": Program(spelled("masked rows"), TRAIN, grad=True),
    "weighted rows, training": Program(spelled("weighted rows"), TRAIN, grad=True),
    "rows of padding, training": Program(spelled("rows of padding"), TRAIN, grad=True),
    "rows of several widths, training": Program(spelled("rows of several widths"), TRAIN, grad=True),
    "rows beside a bag, dynamic, training": Program(
        spelled("rows beside a bag"), TRAIN, grad=True, dynamic=True
    ),
    "rows by frequency, training": Program(spelled("rows by frequency"), TRAIN, grad=True),
    "rows of two tables, dynamic, training": Program(
        spelled("rows of two tables"), TRAIN, grad=True, dynamic=True
    ),
    "rows read elsewhere": Program(spelled("rows read elsewhere"), INFER),
    "rows of tables by index": Program(spelled("by index"), kept={"inference": ["no_compute"]}),
}
