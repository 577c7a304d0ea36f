"""DLRM with tables by model parallelism: pooled embeddings go to the rank of their sample.

Every rank owns some tables and pools them for the whole batch; an all_to_all gives each rank the pooled rows
of its own samples, from all tables. autofuse fuses the EmbeddingBags with that all_to_all (a row is pooled
straight into its place on the rank that needs it), and the all_to_all of the backward with the
scatter-add into the tables, or with `--update` with the update of their rows.

    python examples/dlrm.py
    torchrun --nproc-per-node 4 examples/dlrm.py --batch 4096

Indices follow a power law, bags are ragged and some are empty. Losses are printed beside those of eager, from
the same weights and batches. Gradients and losses must agree with eager, or the script fails.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Step, all_to_all, compile_each, launch, race, show, train_beside
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import autofuse

LR = 0.5
UPDATES = {"sgd": lambda: autofuse.SGD(LR), "adagrad": lambda: autofuse.RowwiseAdagrad(LR / 100)}

GRADIENT_TOLERANCE = 1e-4
"""Of float32, summed in another order; the gradient of the last bias nearly cancels."""
LOSS_TOLERANCE = 1e-4
"""The same after some steps of training, each of which adds to the difference."""

DENSE = 13
"""Dense features of a sample, as in the Criteo data."""


class Batch(NamedTuple):
    """One rank's part: `b` samples, and its tables' indices for all `B = world * b` samples."""

    dense: Tensor  # [b, 13]
    labels: Tensor  # [b]
    indices: list[Tensor]  # of each table: [B * pooling] int64
    offsets: list[Tensor]  # of each table: [B] int64, the first index of every bag


class DLRM(nn.Module):
    """`tables` tables on every rank, all of `dim` columns, and the two MLPs, replicated."""

    pairs: Tensor

    def __init__(self, world: int, tables: int, rows: int, dim: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        features = world * tables + 1
        # SiLU, not ReLU: of a million inputs some are so near 0 that rounding would decide on their gradient.
        self.bottom = nn.Sequential(nn.Linear(DENSE, 256), nn.SiLU(), nn.Linear(256, dim), nn.SiLU())
        pairs = features * (features - 1) // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 256), nn.SiLU(), nn.Linear(256, 1))
        self.register_buffer("pairs", torch.tril_indices(features, features, -1))
        self.shape = (world, -1, tables, dim)

    def forward(self, dense: Tensor, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        pooled = [
            table(index, offset) for table, index, offset in zip(self.tables, indices, offsets, strict=True)
        ]
        # [B, tables * dim], rows by sample -> [world, b, tables, dim], parts by the rank they come from
        exchanged = all_to_all(torch.cat(pooled, 1)).view(self.shape)
        x = self.bottom(dense)
        features = torch.cat([x[:, None], exchanged.transpose(0, 1).flatten(1, 2)], 1)
        products = features @ features.mT
        return self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


def make_model(args: Namespace, device: torch.device) -> DLRM:
    """The same weights in every call; tables differ between ranks, MLPs do not."""
    torch.manual_seed(0)
    with device:
        model = DLRM(dist.get_world_size(), args.tables, args.rows, args.dim)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    for weight in model.tables.parameters():
        nn.init.normal_(weight, std=0.05, generator=generator)
    if args.update:
        autofuse.optimizer_in_backward(model.tables, UPDATES[args.update]())
    return model


def make_batches(args: Namespace, device: torch.device) -> Iterator[Batch]:
    """Random batches, without end. The label of a sample depends on its dense features."""
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    count = args.batch * args.pooling
    while True:
        dense = torch.randn(args.batch // world, DENSE, generator=generator)
        labels = (dense.sum(1) > 0).float()
        indices, offsets = [], []
        for _ in range(args.tables):
            # P(row k) is about 1 / k: the logarithm is uniform.
            ranks = torch.exp(torch.rand(count, generator=generator) * math.log(args.rows))
            indices.append((ranks.long() - 1).to(device))
            cuts = torch.randint(count + 1, (args.batch - 1,), generator=generator).sort().values
            offsets.append(F.pad(cuts, (1, 0)).to(device))
        yield Batch(dense.to(device), labels.to(device), indices, offsets)


def make_step(model: DLRM, call: Callable[..., Any]) -> Step:
    """`step(batch) -> loss` of this rank's samples: one step of SGD on the mean over all ranks' samples."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    replicated = [*model.bottom.parameters(), *model.top.parameters()]

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(
            call(batch.dense, batch.indices, batch.offsets), batch.labels
        )
        (loss / dist.get_world_size()).backward()
        grads = [p.grad for p in replicated if p.grad is not None]
        total = parameters_to_vector(grads)
        dist.all_reduce(total)
        vector_to_parameters(total, grads)
        optimizer.step()
        return loss.detach()

    return step


def run(args: Namespace, device: torch.device) -> None:
    models = {name: make_model(args, device) for name in ("eager", "inductor", "autofuse")}
    calls = compile_each(models, args.policy)
    steps = {name: make_step(models[name], calls[name]) for name in models}
    batches = make_batches(args, device)
    with autofuse.debug() as report:
        train_beside(models, steps, batches, args.steps, GRADIENT_TOLERANCE, LOSS_TOLERANCE)
        batch = next(batches)
        race("training step", {name: partial(step, batch) for name, step in steps.items()}, args.rounds)
    show(f"\n{report}")


if __name__ == "__main__":
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=2048, help="samples of all ranks")
    parser.add_argument("--tables", type=int, default=8, help="tables of each rank")
    parser.add_argument("--rows", type=int, default=10_000, help="rows of a table")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--pooling", type=int, default=20, help="mean size of a bag")
    parser.add_argument("--update", choices=UPDATES, help="what the backward does to tables")
    launch(parser, run)
