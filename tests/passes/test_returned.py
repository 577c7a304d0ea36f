"""What a program returns as two tensors stays two: a caller may change one in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import autofuse

from .dense import group
from .harness import fake_group


def gathered(x: Tensor) -> Tensor:
    return funcol.wait_tensor(funcol.all_gather_tensor(x, 0, group()))


def two_gathers(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    a, b = gathered(x), gathered(x)
    return a, b, a @ v, b @ (2 * v)


def a_clone(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    a = gathered(x)
    return a, a.clone(), a @ v


def a_view(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    a = gathered(x)
    return a, a.t(), a @ v


def a_stored_piece(x: Tensor, new: Tensor) -> tuple[Tensor, ...]:
    """The pass that forwards pieces runs only in graphs with both collectives."""
    y = torch.slice_scatter(x, new, 0, 0, 2)
    scattered = funcol.wait_tensor(funcol.reduce_scatter_tensor(x, "sum", 0, group()))
    read = y[:2].sin()
    new.mul_(2)
    return y[:2], read, gathered(scattered)


def outputs(fn: Callable[..., Any], *args: Tensor) -> list[fx.Node]:
    """Of the graph of `fn` as it is rewritten."""
    with fake_group(2), torch.no_grad(), autofuse.config.patch(policy="always"):
        gm = make_fx(fn, tracing_mode="fake")(*args)
        autofuse.rewrite(gm)
        gm.recompile()
    (found,) = gm.graph.output_node().args
    return list(found)


@pytest.mark.parametrize("fn", [two_gathers, a_clone])
def test_two_results(fn: Callable[..., Any]) -> None:
    first, second, *_ = outputs(fn, torch.zeros(4, 8), torch.zeros(8, 16))
    assert second.target is torch.ops.aten.clone.default
    assert second.args == (first,)


def test_views_share_memory_as_before() -> None:
    first, second, _ = outputs(a_view, torch.zeros(4, 8), torch.zeros(8, 16))
    assert "clone" not in f"{first} {second} {second.all_input_nodes}"


def test_a_stored_piece_is_no_input() -> None:
    """And is copied before the input changes."""
    first, read, _ = outputs(a_stored_piece, torch.zeros(4, 3), torch.zeros(2, 3))
    assert first.target is torch.ops.aten.clone.default
    assert first.args[0].op == read.args[0].op == "placeholder"
    assert first < next(n for n in read.graph.nodes if n.target is torch.ops.aten.mul_.Tensor)
