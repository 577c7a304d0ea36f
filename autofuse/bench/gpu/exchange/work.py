"""What a cell of an exchange gives its measurement: variants, each with the error of its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.bench.gpu.driver import relative_error
from autofuse.bench.gpu.named_ways import Fused
from autofuse.lowering.gpu.choice.timer import Call


@dataclass(frozen=True)
class Variant:
    """One way to run a cell, or a step of it. `error`: that of what call 0 returned."""

    call: Call
    error: Callable[[Any], float]


@dataclass(frozen=True)
class Work:
    """A cell with its operands on this rank. `variants`: compute, parts, peers and ours, by kind and name."""

    variants: Mapping[str, Mapping[str, Variant]]
    fused: Fused
    """The op; the result of a way by name is checked as that of `ours`."""
    capturable: bool = True
    """Whether ours may be captured. A call that waits for the GPU would break the capture for all that
    follow."""


SAMPLED = 16
"""The number of rows of each rank, and of each table, for which a benchmark computes the exact values."""


def sampled(rows: int, world: int, device: torch.device) -> Tensor:
    """[W, S]: the indices of some rows of each rank. Every rank has `rows / W` rows."""
    part = rows // world
    some = torch.linspace(0, part - 1, min(SAMPLED, part), device=device).long()
    return torch.arange(world, device=device)[:, None] * part + some


@dataclass(frozen=True)
class Sample:
    """Rows of a result [shape] whose exact values are known: `rows`: [S], `exact`: [S, columns], fp64."""

    shape: tuple[int, int]
    rows: Tensor
    exact: Tensor

    def error(self, result: Tensor) -> float:
        """|result - exact| / |exact| (Frobenius) on these rows, of a result of as many elements."""
        if result.numel() != self.shape[0] * self.shape[1]:
            raise RuntimeError(f"expected a result of shape {self.shape}, got {tuple(result.shape)}")
        return relative_error(result.reshape(self.shape)[self.rows], self.exact)


def exchange(
    received: Tensor, sent: Tensor, output_splits: list[int] | None, input_splits: list[int] | None
) -> Tensor:
    """The all-to-all along dim 0, into `received`; without splits all parts have as many rows."""
    dist.all_to_all_single(received, sent, output_splits, input_splits)
    return received
