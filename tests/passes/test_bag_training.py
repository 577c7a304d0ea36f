"""Steps of training of embedding bags, compiled by Inductor, on real ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import autofuse
from tests.ranks import RankPool

from .recommendation import FORWARD, ROWS, tables


def _steps(compiled: bool, world: int, rank: int) -> list[Tensor]:
    """What the tables are after some steps."""
    build = tables("rows", mode="mean", padding_idx=3, include_last_offset=True)
    model, (indices, offsets, weights) = build(world, rank)
    assert isinstance(model, torch.nn.Module)
    parameters, offsets = list(model.parameters()), [o.int() for o in offsets]
    # A third of the lookups are padding.
    indices = [torch.where(torch.arange(len(i)) % 3 == 0, 3, i).int() for i in indices]
    how = {"policy": "always", "patterns": [FORWARD]}
    step = torch.compile(model, backend="autofuse", options=how) if compiled else model
    for _ in range(3):
        step(indices, offsets, weights).sum().backward()
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None
        indices = [torch.where(i == 3, 3, (i * 7 + 1) % ROWS) for i in indices]
    return [p.detach() for p in parameters]


def _train(rank: int, world: int) -> list[str]:
    torch._dynamo.reset()
    expected = _steps(False, world, rank)
    with autofuse.debug() as report:
        found = _steps(True, world, rank)
    for table, want in zip(found, expected, strict=True):
        torch.testing.assert_close(table, want)
    return [site.pattern for site in report.fused]


def test_padding_does_not_count_where_torch_divides(ranks: Callable[[int], RankPool]) -> None:
    """Fused forward, kept backward: torch divides by the sizes of bags that the fused forward leaves it."""
    assert ranks(2).run(_train, timeout=200) == [[FORWARD]] * 2
