"""Embedding bags of a training graph on GPUs, traced without one: which sites are fused."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from autofuse.lowering.gpu import support
from autofuse.passes.fuse import Settings, fuse

from .harness import fake_group

WORLD, LOCAL, DIM, ROWS, POOLING = 4, 3, 8, 11, 2


class Exchange(torch.autograd.Function):
    """`[B, C]` to `[W, b, C]`."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return funcol.all_to_all_single(x, None, None, "0")

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return funcol.all_to_all_single(grad.contiguous(), None, None, "0")


def step(first: Tensor, second: Tensor, indices: Tensor, offsets: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    pooled = [F.embedding_bag(indices, table, offsets, mode="sum") for table in (first, second)]
    y = Exchange.apply(torch.cat(pooled, 1))
    return torch.autograd.grad(y, (first, second), grad)


def moved(graph: fx.Graph) -> fx.Graph:
    """The same graph of tensors on a GPU: without one autograd traces CPUs only."""
    for node in graph.nodes:
        if isinstance(val := node.meta.get("val"), Tensor):
            node.meta["val"] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="cuda")
    return graph


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_exchanges_of_a_training_step_are_fused(dtype: torch.dtype) -> None:
    with fake_group(WORLD), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        bags = WORLD * LOCAL
        tables = [torch.empty(ROWS, DIM, dtype=dtype, requires_grad=True) for _ in range(2)]
        indices = torch.empty(bags * POOLING, dtype=torch.int64)
        offsets = torch.empty(bags, dtype=torch.int64)
        grad = torch.empty(bags, 2 * DIM, dtype=dtype)
        graph = moved(make_fx(step)(*tables, indices, offsets, grad).graph)
        report = fuse(graph, Settings(policy="always"), "joint", "0")
    assert [site.op for site in report.sites] == [
        "autofuse::embedding_bag_all_to_all",
        "autofuse::all_to_all_embedding_bag_backward",
    ], report.sites
