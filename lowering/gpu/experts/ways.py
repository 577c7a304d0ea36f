"""The expert ops as problems: all ways to run them on GPUs, kernels and what they replace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL, DTYPES, Kernel, OfOp, Way
from autofuse.native_kernels.cuda.kernels.dropless_combine import MOST_EXPERTS

from .kernels import COMBINE_CLUSTERS, DISPATCH_CLUSTERS, DROPLESS_COMBINE, DROPLESS_DISPATCH
from .work import dropless_nccl_work, fixed_nccl_work

COMBINE, DISPATCH = "expert_matmul_all_to_all", "all_to_all_expert_matmul"

DROPLESS = ", dropless"
"""Behind the op's name in measured points of dropless calls."""

MOST_BYTES = 4 << 30
"""A way that needs a larger region than this is left out."""

LIKELY_ROWS = 256
"""Rows that are assumed for each expert of a dropless call until the ranks have told each other theirs."""

_REPLACED = (Way(CUBLAS_NCCL, fixed_nccl_work, replaced=True),)
_REPLACED_DROPLESS = (Way(CUBLAS_NCCL, dropless_nccl_work, replaced=True),)


@dataclass(frozen=True)
class ExpertProblem(OfOp):
    """A call: `[experts, rows, k] @ [experts, k, columns]` on every rank, rows = (outer, W, run).

    programs: that run at once; aligned: operands are as TMA loads them; weights: that a dispatch's kernel
    multiplies, of so many columns each. In measured points they are one weight with the columns of all.
    """

    op: str
    experts: int
    rows: int
    k: int
    columns: int
    world: int
    dtype: torch.dtype
    programs: int = 132
    outer: int = 1
    aligned: bool = True
    weights: int = 1

    gated: ClassVar[bool] = False
    is_whole: ClassVar[bool] = True
    most_bytes: ClassVar[int] = MOST_BYTES

    @property
    def m(self) -> int:
        """As measured points have it: what shares a weight."""
        return self.rows

    @property
    def n(self) -> int:
        return self.experts * self.columns * self.weights

    @property
    def outputs(self) -> int:
        """Of a dispatch's kernel."""
        return self.weights

    @property
    def run(self) -> int:
        return self.rows // (self.outer * self.world)

    def library_ways(self) -> Sequence[Way]:
        return _REPLACED

    def kernels(self) -> Sequence[Kernel[ExpertProblem, Any]]:
        if not self.run > 0 or not _usable(self):
            return ()
        return (COMBINE_CLUSTERS,) if self.op == COMBINE else (DISPATCH_CLUSTERS,)

    def at(self, op: str, m: int, k: int, n: int, world: int) -> ExpertProblem:
        """With as many experts as here: points do not tell how many share their columns."""
        columns = max(1, n // (self.experts * self.weights))
        return replace(self, rows=m, k=k, columns=columns, world=world)

    @property
    def measured_as(self) -> str:
        return self.op

    def rounded(self) -> ExpertProblem | None:
        """With the runs rounded up to a power of two; not where experts have several runs for a rank."""
        if self.outer != 1:
            return None
        return replace(self, rows=self.world * rounded_rows(self.run), aligned=True)


@dataclass(frozen=True)
class DroplessProblem(OfOp):
    """A call of any number of rows: ranks have different ones, and must take the same way.

    op: with `DROPLESS` behind its name. weights: as of an `ExpertProblem`; gated: the products with two of
    them are one output. rows: that the busiest rank computes, rounded up to a power of two; 0 while ranks
    have not told each other. kept: of a gated problem, whether the products are outputs, too.
    """

    op: str
    experts: int
    k: int
    columns: int
    world: int
    dtype: torch.dtype
    programs: int = 132
    aligned: bool = True
    weights: int = 1
    rows: int = 0
    gated: bool = False
    kept: bool = False

    is_whole: ClassVar[bool] = False
    """The way is settled before ranks know the rows of each other, and experts have different ones."""
    most_bytes: ClassVar[int] = MOST_BYTES

    @property
    def m(self) -> int:
        """As measured points have it."""
        return self.rows or rounded_rows(LIKELY_ROWS * self.experts)

    @property
    def n(self) -> int:
        return self.experts * self.columns * self.weights

    @property
    def outputs(self) -> int:
        """Of a dispatch's kernel."""
        return self.gated + (self.weights if self.kept or not self.gated else 0)

    def library_ways(self) -> Sequence[Way]:
        return _REPLACED_DROPLESS

    def kernels(self) -> Sequence[Kernel[DroplessProblem, Any]]:
        if self.experts > MOST_EXPERTS or not _usable(self):
            return ()
        return (DROPLESS_COMBINE,) if self.op == COMBINE + DROPLESS else (DROPLESS_DISPATCH,)

    def at(self, op: str, m: int, k: int, n: int, world: int) -> DroplessProblem:
        """As of an `ExpertProblem`."""
        columns = max(1, n // (self.experts * self.weights))
        return replace(self, rows=m, k=k, columns=columns, world=world)

    @property
    def measured_as(self) -> str:
        return self.op

    def rounded(self) -> DroplessProblem:
        """Itself: a call measures its own rows, which count for all that follow."""
        return self


def rounded_rows(rows: int) -> int:
    """Up to a power of two."""
    return 1 << (rows - 1).bit_length()


def _usable(problem: ExpertProblem | DroplessProblem) -> bool:
    """Whatever its rows: weights that TMA loads, and ranks that kernels serve."""
    return (
        problem.aligned
        and problem.dtype in DTYPES
        and problem.world <= 8
        and min(problem.experts, problem.k, problem.columns) > 0
        and problem.k % 8 == 0
        and problem.columns % 8 == 0
    )
