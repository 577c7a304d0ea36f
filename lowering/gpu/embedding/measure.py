"""Measures all ways to run embedding_bag_all_to_all, or its backward, on all GPUs of a group together."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from autofuse.lowering.gpu.choice.choose import Point, keep
from autofuse.lowering.gpu.choice.timer import Call
from autofuse.lowering.gpu.dense.measure import time_ways
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_for
from autofuse.lowering.ops import all_to_all_embedding_bag_backward, embedding_bag_all_to_all
from autofuse.lowering.ops.all_to_all_embedding_bag_backward import AllToAllEmbeddingBagBackward
from autofuse.lowering.ops.embedding_bag_all_to_all import EmbeddingBagAllToAll
from autofuse.lowering.reference import embedding_layout
from autofuse.native_kernels.triton.embedding_tables import Tables

from .backward import exchange_backward
from .call import exchange, tables_of
from .ways import BACKWARD, OP, TORCH_NCCL, ExchangeProblem, exchange_ways

DRAWS = 3
"""Sets of indices that calls take by turns, so that rows are not found in the L2 cache."""


def random_tables(
    rows: int, dims: list[int], bags: int, pooling: int, dtype: torch.dtype, device: torch.device
) -> list[Tables]:
    """The same tables with DRAWS sets of indices; every bag has `pooling` of them."""
    weights = [torch.randn(rows, dim, device=device).to(dtype) for dim in dims]
    offsets = [torch.arange(bags, device=device) * pooling for _ in dims]
    return [
        tables_of(
            weights,
            [torch.randint(0, rows, (bags * pooling,), device=device) for _ in dims],
            offsets,
            [],
            mode=0,
            last=False,
            padding=-1,
        )
        for _ in range(DRAWS)
    ]


def measure_exchange(
    workspace: GpuWorkspace, problem: ExchangeProblem, draws: list[Tables], only: list[str] | None = None
) -> dict[str, float]:
    """Microseconds by way, as `time_ways` has them. All ranks call it together."""
    shape = embedding_layout.shape(problem.layout, problem.b, problem.columns, draws[0].dims)
    grad = torch.randn([int(n) for n in shape], device=workspace.device).to(problem.dtype)

    def call(way: str) -> Call:
        if problem.op == BACKWARD:
            return lambda i: run_backward(workspace, way, problem, draws[i % len(draws)], grad)
        return lambda i: run(workspace, way, problem, draws[i % len(draws)])

    ways = only or list(exchange_ways(problem))
    rows = sum(t.indices[0].shape[0] * sum(t.dims) for t in draws) // len(draws)
    roughly_us = max(10.0, rows * draws[0].weights[0].element_size() / 4e6)  # at 4 TB/s
    return time_ways(workspace, {way: call(way) for way in ways}, roughly_us)


def run(workspace: GpuWorkspace, way: str, problem: ExchangeProblem, tables: Tables) -> torch.Tensor:
    """A call in any way, that of torch too."""
    if way != TORCH_NCCL:
        found = exchange(workspace, way, problem, tables, "measure")
        if found is not None:
            return found
    return embedding_bag_all_to_all.reference(
        EmbeddingBagAllToAll(
            list(tables.weights),
            list(tables.indices),
            list(tables.offsets),
            list(tables.samples),
            tables.mode,
            tables.last,
            tables.padding,
            problem.dtype,
            list(problem.columns),
            problem.layout,
            workspace.group_name,
            "direct",
            "measure",
        )
    )


def run_backward(
    workspace: GpuWorkspace,
    way: str,
    problem: ExchangeProblem,
    tables: Tables,
    grad: torch.Tensor,
    keep_exchanged: bool = False,
) -> list[torch.Tensor]:
    """As `run`, of the backward; of the weights of the tables only sizes and dtype matter."""
    if way != TORCH_NCCL:
        gradients = replace(tables, weights=[torch.empty_like(w) for w in tables.weights])
        found = exchange_backward(workspace, way, problem, gradients, grad, keep_exchanged, "measure")
        if found is not None:
            return found
    return all_to_all_embedding_bag_backward.reference(
        AllToAllEmbeddingBagBackward(
            grad,
            list(tables.indices),
            list(tables.offsets),
            list(tables.samples),
            [w.shape[0] for w in tables.weights],
            list(tables.dims),
            tables.mode,
            tables.last,
            tables.padding,
            tables.weights[0].dtype,
            [False] * len(tables.weights),
            list(problem.columns),
            problem.layout,
            keep_exchanged,
            workspace.group_name,
            "direct",
            "measure",
        )
    )


def tune_exchange(
    batch: int,
    tables: int,
    dim: int,
    pooling: int,
    rows: int,
    dtype: torch.dtype,
    save: bool = True,
    backward: bool = False,
) -> dict[str, float]:
    """Measures `tables` tables a rank, of `batch` bags in all. All ranks of the world call it together.

    With `save` calls like this take the fastest way from now on, here and, from rank 0's own table, later.
    """
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = workspace_for(group.group_name, device)
    problem = ExchangeProblem(
        batch // workspace.world, (tables * dim,) * workspace.world, "bsc", dtype, workspace.programs,
        BACKWARD if backward else OP,
    )  # fmt: skip
    draws = random_tables(rows, [dim] * tables, batch, pooling, dtype, device)
    times = measure_exchange(workspace, problem, draws)
    if save:
        keep(workspace, Point.of(problem, times))
    return times
