"""DLRM with tables by model parallelism: pooled embeddings go to the rank of their sample."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from autofuse.bench.models.work import Cell, Forward, Work, local, world_group

DENSE = 13
"""Dense features of a sample, as in the Criteo data."""
POOLING = 20
"""Indices of a bag."""


class DLRM(nn.Module):
    """`tables` tables on every rank, and the two MLPs, replicated."""

    pairs: Tensor

    def __init__(self, world: int, tables: int, rows: int, dim: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        features = world * tables + 1
        self.bottom = nn.Sequential(nn.Linear(DENSE, 256), nn.SiLU(), nn.Linear(256, dim), nn.SiLU())
        pairs = features * (features - 1) // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 256), nn.SiLU(), nn.Linear(256, 1))
        self.register_buffer("pairs", torch.tril_indices(features, features, -1))
        self.shape = (world, -1, tables, dim)

    def forward(self, dense: Tensor, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        pooled = [
            table(index, offset) for table, index, offset in zip(self.tables, indices, offsets, strict=True)
        ]
        rows = torch.cat(pooled, 1)
        # [B, tables * dim], rows by sample -> [world, b, tables, dim], parts by the rank they come from
        exchanged = all_to_all_single_autograd(rows, None, None, world_group()).view(self.shape)
        x = self.bottom(dense)
        features = torch.cat([x[:, None], exchanged.transpose(0, 1).flatten(1, 2)], 1)
        products = features @ features.mT
        return self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


def work(batch: int, tables: int, rows: int, dim: int, device: torch.device) -> Work:
    """Forward and backward in float32, without the optimizer and without the sum of the MLPs' gradients."""
    world = dist.get_world_size()
    with device:
        torch.manual_seed(1 + dist.get_rank())
        model = DLRM(world, tables, rows, dim)
        for weight in model.tables.parameters():
            nn.init.normal_(weight, std=0.05)
        dense = torch.randn(batch // world, DENSE)
        # P(row k) is about 1 / k: the logarithm is uniform.
        indices = [(float(rows) ** torch.rand(batch * POOLING)).long() - 1 for _ in range(tables)]
        offsets = [torch.arange(0, batch * POOLING, POOLING) for _ in range(tables)]

    def step_of(model: DLRM, call: Forward, dense: Tensor) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        y = call(dense, indices, offsets)
        y.square().mean().backward()
        compared = [model.tables[0], model.tables[-1], model.bottom, model.top]
        return [y.detach(), *(local(p.grad) for m in compared for p in m.parameters())]

    def exact() -> list[Tensor]:
        wide = copy.deepcopy(model).double()
        return step_of(wide, wide, dense.double())

    return Work(model, lambda call: step_of(model, call, dense), exact)


def cells(quick: bool) -> list[Cell]:
    name, sizes = ("dlrm tiny", (64, 4, 50, 16)) if quick else ("dlrm", (8192, 64, 100_000, 128))
    return [Cell(f"{name} train {sizes[0]}", partial(work, *sizes))]
