"""Matmuls with an operand that is computed from the product of the same site: a fused op would be an input of
itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx

import autofuse
from autofuse.passes.graph.emit import order_nodes

from .dense import group
from .harness import became, fake_group


def exchange(x: Tensor) -> Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single(x, None, None, group()))


def scaled_rows(x: Tensor, w: Tensor) -> Tensor:
    """The rows of experts are added up after a norm of them."""
    p = torch.bmm(x, w)
    p = p * torch.rsqrt(p.pow(2).mean(-1, keepdim=True) + 1e-6)
    return funcol.all_reduce(p.sum(0), "sum", group())


def sorted_rows(x: Tensor, w: Tensor) -> Tensor:
    """Rows are sent in an order that is computed from them."""
    p = torch.bmm(x, w).flatten(0, 1)
    sent = torch.zeros_like(p)
    sent[p.sum(-1).argsort()] = p
    return exchange(sent)


def chained(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """An expert multiplies what another one gave, which is also read apart."""
    first = x[0] @ w[0]
    by_expert = torch.stack([first, first.relu() @ w[1]]).view(2, 2, 3, 8)
    return exchange(by_expert.transpose(0, 1).contiguous()), first.sum()


@pytest.mark.parametrize("fn", [scaled_rows, sorted_rows, chained])
def test_operands_from_the_product(fn: Callable[..., Any]) -> None:
    with fake_group(2), torch.no_grad(), autofuse.config.patch(policy="always"):
        report = autofuse.explain(fn)(torch.randn(2, 6, 8), torch.randn(2, 8, 8))
    ((what, detail),) = became(report)
    assert what == "extra_users", (what, detail)
    assert "reads the product" in detail


def test_no_order_of_a_cycle() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.add, (x, x))
    b = graph.call_function(torch.mul, (a, x))
    graph.output(b)
    a.args = (x, b)
    with pytest.raises(RuntimeError, match="is computed from itself"):
        order_nodes(graph)
