"""The matmul of an expert cell alone, with what torch ships."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from autofuse.bench.expert_routes import Route
from autofuse.lowering.torch_internals import grouped_mm

Run: TypeAlias = Callable[[Tensor], Tensor]
"""Of the weights [E, K, N]: the result."""


def matmuls(route: Route, x: Tensor, out: Tensor) -> dict[str, Run]:
    """[R, K] in expert order to [R, N], which is `out` but for grouped_mm: that has no such argument."""
    name = "bmm" if route.cell.even else "mm"
    return {name: plain(route, x, out), "grouped": lambda w: grouped_mm(x, w, route.ends)}


def plain(route: Route, x: Tensor, out: Tensor) -> Run:
    """A bmm where all experts have as many rows, else a matmul an expert."""
    experts = route.cell.experts

    def bmm(w: Tensor) -> Tensor:
        torch.bmm(x.view(experts, -1, x.shape[1]), w, out=out.view(experts, -1, out.shape[1]))
        return out

    def one_by_one(w: Tensor) -> Tensor:
        parts = zip(x.split(route.per_expert), w, out.split(route.per_expert), strict=True)
        for rows, of_expert, place in parts:
            if rows.shape[0]:
                torch.mm(rows, of_expert, out=place)
        return out

    return bmm if route.cell.even else one_by_one
