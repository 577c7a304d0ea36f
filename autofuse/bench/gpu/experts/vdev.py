"""torch's all-to-all of expert rows that reads counts on the GPU, as a peer: it needs NVSHMEM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autofuse.bench.gpu.experts.matmuls import Run, empty, plain
from autofuse.bench.gpu.experts.routes import Route
from autofuse.lowering.torch_internals import (
    symmetric_all_to_all_2d,
    symmetric_all_to_all_2d_back,
    symmetric_empty,
    symmetric_memory,
)


def missing() -> str | None:
    """Why it cannot be measured; None if it can."""
    if not hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d"):
        return "this torch has none"
    backend = symmetric_memory("cuda") if torch.cuda.is_available() else None
    if backend != "NVSHMEM":
        return f"torch's symmetric memory is of {backend}; start with TORCH_SYMMMEM=NVSHMEM to measure it"
    return None


def peer(route: Route, x: Tensor, group_name: str) -> Run:
    """The op around the plain matmul: rows come and go in expert order, without a copy for their order.

    Symmetric memory is as large on all ranks: as the rank with most rows needs.
    """
    cell = route.cell

    def shared(rows: int) -> Tensor:
        return symmetric_empty(rows * cell.width, x.dtype, x.device).view(rows, cell.width)

    def numbers(*rows: list[int]) -> Tensor:
        flat = symmetric_empty(len(rows) * len(rows[0]), torch.int64, x.device)
        return flat.view(len(rows), -1).copy_(torch.tensor(rows))

    held, own = shared(cell.most_rows), shared(cell.sent)
    if cell.combines:
        counts = route.by_expert.flatten().tolist()
        starts = torch.tensor([0, *counts]).cumsum(0)[:-1].tolist()
        given, found = numbers(counts, starts), numbers(counts, starts)
        product = plain(route, x, [held[: route.rows]])

        def combine(w: Sequence[Tensor]) -> Sequence[Tensor]:
            product(w)
            symmetric_all_to_all_2d_back(held, own, given, found, group_name)
            return [own]

        return combine
    counts = [n for part in cell.counts[route.rank] for n in part]
    splits, found = numbers(counts)[0], numbers(counts, counts)
    own.copy_(x)
    product = plain(route, held[: route.rows], empty(route, x))

    def dispatch(w: Sequence[Tensor]) -> Sequence[Tensor]:
        symmetric_all_to_all_2d(own, held, splits, found, group_name)
        return product(w)

    return dispatch
