"""Matmuls of packed weights, of which collectives exchange pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import autofuse

from .dense import gathered
from .harness import fake_group

X, W, B = (6, 8), (12, 8), (12,)
MM = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
GATHERED = torch.ops.autofuse.matmul_all_gather.default

Program = Callable[[Tensor, Tensor, Tensor], object]


def split(x: Tensor, w: Tensor, b: Tensor) -> object:
    q, k, v = (x @ w.t()).split([6, 4, 2], -1)
    return q, gathered(k.contiguous()), gathered(v.contiguous())


def unbound(x: Tensor, w: Tensor, b: Tensor) -> object:
    q, k, v = F.linear(x, w, b).view(2, 3, 3, 4).unbind(2)
    return q, gathered(k.contiguous()), gathered(v.contiguous())


def sliced(x: Tensor, w: Tensor, b: Tensor) -> object:
    y = F.linear(x, w, b)
    return y[:, :6].sin(), gathered(y[:, 6:].contiguous())


def read_whole(x: Tensor, w: Tensor, b: Tensor) -> object:
    y = F.linear(x, w, b)
    return y.sin(), gathered(y[:, 6:].contiguous())


def overlapping(x: Tensor, w: Tensor, b: Tensor) -> object:
    y = F.linear(x, w, b)
    return y[:, :8].sin(), gathered(y[:, 6:].contiguous())


def interleaved(x: Tensor, w: Tensor, b: Tensor) -> object:
    """Every head has its q, k and v."""
    q, k, v = F.linear(x, w, b).view(6, 2, 6).split(2, -1)
    return q, gathered(k.contiguous()), gathered(v.contiguous())


def whole(x: Tensor, w: Tensor, b: Tensor) -> object:
    """The pieces are joined again."""
    return gathered(torch.stack(F.linear(x, w, b).chunk(3, -1)))


def rewritten(fn: Program, patterns: str = "all") -> tuple[int, int]:
    """How many matmuls are left, and how many are fused."""
    with fake_group(2), autofuse.config.patch(policy="always", patterns=patterns):
        gm = make_fx(fn, tracing_mode="fake")(*(torch.randn(size) for size in (X, W, B)))
        autofuse.rewrite(gm)
        gm.graph.lint()
        targets = [n.target for n in gm.graph.nodes]
    return sum(targets.count(mm) for mm in MM), targets.count(GATHERED)


@pytest.mark.parametrize(
    ("fn", "left", "fused"),
    [
        (split, 1, 2), (unbound, 1, 2), (sliced, 1, 1), (read_whole, 1, 1), (overlapping, 1, 1),
        (interleaved, 1, 0), (whole, 0, 1),
    ],
)  # fmt: skip
def test_pieces(fn: Program, left: int, fused: int) -> None:
    assert rewritten(fn) == (left, fused)


@pytest.mark.parametrize("fn", [split, unbound, sliced, read_whole, overlapping])
def test_what_is_kept_is_joined(fn: Program) -> None:
    assert rewritten(fn, patterns="matmul_all_reduce") == (1, 0)
