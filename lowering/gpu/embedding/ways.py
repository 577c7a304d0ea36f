"""The ops of embedding bags as problems: all ways to run them on GPUs, kernels and torch's ops.

Whether a way can run depends only on values that are equal on all ranks, not on a rank's own tables, dims or
indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from autofuse.lowering.gpu.choice.kernel import MOST_BYTES, Kernel, OfOp, Way
from autofuse.native_kernels.triton.embedding_tables import DTYPE_BITS

from .kernels import BAGS, MERGED_BAGS, MERGED_STRIPS, STRIPS
from .work import torch_work

OP = "embedding_bag_all_to_all"
BACKWARD = "all_to_all_embedding_bag_backward"
UPDATE = "all_to_all_embedding_bag_update"

TORCH_NCCL = "torch+nccl"
"""Name of the way that the op replaces: kernels for every table, a collective and a copy."""


@dataclass(frozen=True)
class ExchangeProblem(OfOp):
    """A call: `b` bags a rank, `columns[r]` of rank r. dtype: of the exchange; programs: multiprocessors."""

    b: int
    columns: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    programs: int = 132
    op: str = OP

    k: ClassVar[int] = 1
    """Measured points have m bags in all, and n columns a rank."""
    is_whole: ClassVar[bool] = False
    """The time depends on the indices of all ranks, which a rank does not know."""
    most_bytes: ClassVar[int] = 2 * MOST_BYTES
    """For both halves of the inbox with the unused bytes at their ends. `kernels` limits the rows alone."""

    @property
    def world(self) -> int:
        return len(self.columns)

    @property
    def m(self) -> int:
        return self.b * self.world

    @property
    def n(self) -> int:
        return max(1, *self.columns)

    def library_ways(self) -> Sequence[Way]:
        return (Way(TORCH_NCCL, torch_work, replaced=True),)

    def kernels(self) -> Sequence[Kernel[ExchangeProblem, Any]]:
        columns = sum(self.columns) if self.op == OP else self.world * self.n
        nbytes = self.b * columns * self.dtype.itemsize
        if self.dtype not in DTYPE_BITS or self.world > 8 or not self.b * sum(self.columns):
            return ()
        if 2 * nbytes >= MOST_BYTES:
            return ()
        return (MERGED_BAGS, BAGS) if self.op == OP else (MERGED_STRIPS, STRIPS)

    def at(self, op: str, m: int, k: int, n: int, world: int) -> ExchangeProblem:
        """With as many columns on every rank."""
        return replace(self, b=m // world, columns=(n,) * world)

    @property
    def measured_as(self) -> str:
        return self.op

    def rounded(self) -> ExchangeProblem:
        """The problem itself. A call is measured with its own indices; the times hold for all later calls."""
        return self
