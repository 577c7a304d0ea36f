"""Steps of training of embedding bags, compiled by Inductor, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import autofuse
from tests.ranks import RankPool

from .harness import became, fake_group
from .recommendation import BACKWARD, FORWARD, OF_BATCH, ROWS, exchange, tables


def _steps(patterns: list[str], world: int, rank: int, options: dict) -> list[Tensor]:
    """What the tables are after some steps."""
    model, (indices, offsets, weights) = tables("rows", **options)(world, rank)
    assert isinstance(model, torch.nn.Module)
    parameters = list(model.parameters())
    # A third of the lookups are padding, where there is any.
    indices = [torch.where(torch.arange(len(i)) % 3 == 0, 3, i) for i in indices]
    how = {"policy": "always", "patterns": patterns}
    step = torch.compile(model, backend="autofuse", options=how) if patterns else model
    for _ in range(3):
        step(indices, offsets, weights).sum().backward()
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None
        indices = [torch.where(i == 3, 3, (i * 7 + 1) % ROWS) for i in indices]
    return [p.detach() for p in parameters]


def _train(rank: int, world: int, patterns: list[str], options: dict) -> list[str]:
    torch._dynamo.reset()
    expected = _steps([], world, rank, options)
    with autofuse.debug() as report:
        found = _steps(patterns, world, rank, options)
    for table, want in zip(found, expected, strict=True):
        torch.testing.assert_close(table, want)
    return [site.pattern for site in report.fused]


class Columns(torch.nn.Module):
    """Matmul sharded by columns: the gradient of its input is reduced. `behind`: and then exchanged."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.behind = behind
        self.table = torch.nn.EmbeddingBag(ROWS, 8, mode="sum", sparse=True)
        self.dense = torch.nn.Parameter(torch.randn(8, 8))
        self.weight = torch.nn.Parameter(torch.randn(8, 16))

    def forward(self, indices: Tensor) -> Tensor:
        pooled = exchange(self.table(indices))
        if self.behind:
            return Copy.apply(pooled) @ self.weight
        return torch.cat([pooled.sin(), Copy.apply(self.dense) @ self.weight], 1)


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert dist.group.WORLD is not None
        return funcol.all_reduce(grad.contiguous(), "sum", dist.group.WORLD)


def _keep_sparse(rank: int, world: int, behind: bool) -> list[str]:
    torch._dynamo.reset()
    torch.manual_seed(rank)
    model, indices = Columns(behind), torch.randint(0, ROWS, (8, 3))
    model(indices).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    how = {"policy": "always", "patterns": ["matmul_all_reduce"]}
    with autofuse.debug() as report:
        torch.compile(model, backend="autofuse", options=how)(indices).sum().backward()
    for parameter, want in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, want)
    return [site.pattern for site in report.fused]


@pytest.mark.parametrize("behind", [True, False], ids=["behind", "beside"])
def test_sparse_gradients_are_kept_where_others_are_fused(
    ranks: Callable[[int], RankPool], behind: bool
) -> None:
    assert ranks(2).run(_keep_sparse, behind, timeout=200) == [["matmul_all_reduce"]] * 2


MEAN = {"mode": "mean", "padding_idx": 3}
CASES = {
    "sparse": ([FORWARD, BACKWARD], {"sparse": [True]}),
    "some tables dense": ([FORWARD, BACKWARD], {"sparse": [True, False], **MEAN}),
    # Torch's backward divides by the sizes of bags that the fused forward leaves it.
    "forward alone, sparse": ([FORWARD], {"sparse": [True], **MEAN}),
    "forward alone, dense": ([FORWARD], {"index": torch.int32, "include_last_offset": True, **MEAN}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_training(ranks: Callable[[int], RankPool], name: str) -> None:
    patterns, options = CASES[name]
    assert ranks(2).run(_train, patterns, options, timeout=200) == [patterns] * 2


@pytest.mark.parametrize("how", OF_BATCH)
def test_bags_whose_number_is_read(how: str) -> None:
    """The op pools them: it, and not torch, has their rows."""
    dynamic = torch._dynamo.config.patch(assume_static_by_default=False)
    with fake_group(2), dynamic, autofuse.config.patch(policy="always"):
        fn, args = tables(how, include_last_offset=True)(2, 0)
        report = autofuse.explain(fn, backward=True)(*args)
    assert became(report) == [(FORWARD, ""), (BACKWARD, "")]
