"""Compiled steps: no breaks, no graph made anew for other rates, the same numbers as without a compiler."""

from contextlib import closing
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autofuse
from tests.optim.test_optimizers import batch, loss_of, model
from tests.ranks import RankPool


def _compiled(rank: int, world: int, name: str, backend: str, whole: bool) -> None:
    """whole: forward, backward and step are one graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    make: Any = getattr(autofuse.optim, name)
    norm = 0.25 if name == "LAMB" else None
    pairs: list[tuple[nn.Sequential, Any]] = []
    for _ in range(2):
        network = model()
        rates = [{"params": p, "lr": 0.05 / (1 + i)} for i, p in enumerate(network.parameters())]
        pairs.append((network, make(rates, max_norm=norm)))
    network, optimizer = pairs[0]

    def step(x: Tensor) -> None:
        if whole:
            optimizer.zero_grad()
            loss_of(network, x).backward()
        optimizer.step()

    with patch.object(torch._dynamo.config, "trace_autograd_ops", True):
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for number in range(6):
            x = batch(rank, number)
            if not whole:
                optimizer.zero_grad()
                loss_of(network, x).backward()
            compiled(x)
            pairs[1][1].zero_grad()
            loss_of(pairs[1][0], x).backward()
            pairs[1][1].step()
            for a, b in zip(network.parameters(), pairs[1][0].parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            if norm is not None:
                torch.testing.assert_close(optimizer.grad_norm, pairs[1][1].grad_norm, rtol=1e-5, atol=0)
            for _, each in pairs:
                each.param_groups[0]["lr"] *= 0.7
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            # The first call may find no gradients where later ones find some.
            assert graphs <= 2
            if number == 1:
                after_two = graphs
    assert graphs == after_two
    before = [s.clone() for b in optimizer._batches for s in b.states]
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-7)
        for a, b in zip(before, [s for b in pairs[1][1]._batches for s in b.states], strict=True)
    )
    assert optimizer._batches[0].steps == pairs[1][1]._batches[0].steps == [6] * 4


@pytest.mark.parametrize(
    ("name", "backend", "whole"),
    [("AdamW", "eager", False), ("LAMB", "aot_eager", True), ("SGD", "autofuse", True)],
)
def test_compiled(name: str, backend: str, whole: bool) -> None:
    with closing(RankPool(2)) as pool:  # what Dynamo keeps of a whole step must not meet other tests
        pool.run(_compiled, name, backend, whole)
