"""The matmul of an expert cell alone, with what torch ships."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from autofuse.bench.gpu.experts.routes import Route
from autofuse.lowering.torch_internals import grouped_mm

Run: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Takes the weights of a cell, [E, K, columns] each, and returns the results."""


def empty(route: Route, like: Tensor) -> list[Tensor]:
    """A buffer for the product with each weight: [R, columns]."""
    return [like.new_empty(route.rows, route.cell.columns) for _ in range(route.cell.weights)]


def matmuls(route: Route, x: Tensor, out: Sequence[Tensor]) -> dict[str, Run]:
    """[R, K] in expert order to `out`, but for grouped_mm, which has no such argument."""
    name = "bmm" if route.cell.even else "mm"
    return {name: plain(route, x, out), "grouped": lambda w: [grouped_mm(x, wi, route.ends) for wi in w]}


def plain(route: Route, x: Tensor, out: Sequence[Tensor]) -> Run:
    """A bmm where all experts have as many rows, else a matmul an expert."""
    experts = route.cell.experts

    def bmm(w: Tensor, y: Tensor) -> None:
        torch.bmm(x.view(experts, -1, x.shape[1]), w, out=y.view(experts, -1, y.shape[1]))

    def one_by_one(w: Tensor, y: Tensor) -> None:
        for rows, of_expert, place in zip(
            x.split(route.per_expert), w, y.split(route.per_expert), strict=True
        ):
            if rows.shape[0]:
                torch.mm(rows, of_expert, out=place)

    multiply = bmm if route.cell.even else one_by_one

    def run(w: Sequence[Tensor]) -> Sequence[Tensor]:
        for wi, y in zip(w, out, strict=True):
            multiply(wi, y)
        return out

    return run
