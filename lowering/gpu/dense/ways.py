"""The dense ops as problems: all ways to run them on GPUs, kernels and what they replace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL, DTYPES, MOST_BYTES, Kernel, OfOp, Way
from autofuse.lowering.ops.matmul_all_reduce import GPU_DTYPES
from autofuse.native_kernels.gpu.memory import LONGEST_ROW, Need, cdiv
from autofuse.native_kernels.gpu.state import MOST_TERMS, MOST_WEIGHTS

from .factors import MADE, MULTIPLIED
from .gathers import GATHERS
from .publishes import PUBLISHES
from .reductions import EXCHANGES, REDUCTIONS
from .work import async_tp_work, nccl_work, one_shot_work, two_shot_work

REDUCE, SCATTER, GATHER = "matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"
PUBLISH = "matmul_all_gather"

ONE_SHOT = "cublas+one_shot"
TWO_SHOT = "cublas+two_shot"
ASYNC_TP = "async_tp"
"""torch's own: matmuls of chunks and copies on two streams."""

FEW_ROWS = 128
"""Of so many rows kernels multiply one weight while parts arrive, and others afterwards."""

MOST_ONE_SHOT_BYTES = 8 << 20
"""Every rank reads all of every other: for more, two_shot was always faster."""


@dataclass(frozen=True)
class DenseProblem(OfOp):
    """A dense call: `[m, k] @ [k, n]` on every rank.

    m: rows of the product: all tokens, of a gather too. programs: that run at once. dim, outer: which rows
    (columns) belong to whom. aligned: operands are as TMA loads them. update: tiles may be added at their
    owners as they arrive. terms: of a sum of several matmuls, the K of each, `k` in total. widths: of several
    weights of a gather that kernels multiply together, the columns of each, `n` in total. written: where
    owners of rows may apply a tail, bytes of a row of what it returns. product: the kind of what is reduced,
    which has the dtype.
    """

    op: str
    m: int
    k: int
    n: int
    world: int
    dtype: torch.dtype
    programs: int = 132
    dim: int = 0
    outer: int = 1
    aligned: bool = True
    update: bool = False
    terms: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    written: int = 0
    product: str = MULTIPLIED

    is_whole: ClassVar[bool] = True
    most_bytes: ClassVar[int] = MOST_BYTES

    @property
    def own(self) -> tuple[str, ...]:
        """Fields that ranks may have of their own: parts of a dim that has no equal ones, a bias of one rank.
        Unless they are `free` no kernel takes these; such calls run as what the op replaces."""
        if self.op == GATHER:
            return "n", "widths", "aligned"
        return ("k", "aligned") if self.op == PUBLISH else ("k", "terms", "aligned", "product")

    @property
    def free(self) -> tuple[str, ...]:
        """Of those, fields that kernels do not see: where cuBLAS multiplies, they add up products alone.
        Without a K there is no product."""
        exchanged = self.op in (REDUCE, SCATTER) and self.k > 0 and not self._is_multiplied()
        return ("k", "terms") if exchanged else ()

    @property
    def everywhere(self) -> bool:
        """Every rank gets the whole sum."""
        return self.op == REDUCE

    @property
    def by_rows(self) -> bool:
        return self.dim == 0

    @property
    def columns(self) -> tuple[int, ...]:
        """Of each weight that is multiplied while parts arrive."""
        return self.widths or (self.n,)

    @property
    def chunk(self) -> int:
        """Rows that a rank brings to a gather."""
        return self.m // self.world

    def library_ways(self) -> Sequence[Way]:
        ways = [Way(CUBLAS_NCCL, nccl_work, replaced=True)]
        if self.op == PUBLISH:
            return ways
        nbytes = self.m * self.n * self.dtype.itemsize
        if self.everywhere:
            # torch's kernels read and write 16 bytes at a time, of every rank's share.
            whole = nbytes % (16 * self.world) == 0
            if self.dtype in (torch.bfloat16, torch.float32) and whole and self.world in (2, 4, 8):
                need = Need(products=nbytes)
                if nbytes <= MOST_ONE_SHOT_BYTES:
                    ways.append(Way(ONE_SHOT, one_shot_work, need=need))
                ways.append(Way(TWO_SHOT, two_shot_work, need=need))
        elif self.m >= 1024 and self._is_plain and self.dtype is torch.bfloat16:
            ways.append(Way(ASYNC_TP, async_tp_work, by_streams=True))
        return ways

    @property
    def _is_plain(self) -> bool:
        """One matmul, of which each rank has rows side by side."""
        return self.by_rows and self.outer == 1 and not self.terms and self.product == MULTIPLIED

    def kernels(self) -> Sequence[Kernel[DenseProblem, Any]]:
        dtypes = GPU_DTYPES if self.product == MADE else DTYPES
        if self.dtype not in dtypes or self.world > 8 or not min(self.m, self.k, self.n):
            return ()
        if not self._is_multiplied():
            return EXCHANGES if self.op in (REDUCE, SCATTER) else ()
        if self.op == PUBLISH:
            return PUBLISHES if self.by_rows or self.outer == 1 else ()
        if self.op != GATHER:
            return REDUCTIONS
        return GATHERS if self.by_rows else ()

    def at(self, op: str, m: int, k: int, n: int, world: int) -> DenseProblem:
        if op == self.op:  # of one matmul, without a tail
            return replace(self, m=m, k=k, n=n, world=world, terms=(), widths=(), written=0)
        terms = tuple(length * k // self.k for length in self.terms)
        widths = tuple(width * n // self.n for width in self.widths)
        written = self.written * n // self.n
        return replace(self, m=m, k=k, n=n, world=world, terms=terms, widths=widths, written=written)

    @property
    def measured_as(self) -> str:
        """Points of matmul_all_gather are of columns and count for rows, too: the kernels take as long."""
        op = f"{self.op}, {len(self.terms)} terms" if self.terms else self.op
        op = f"{op}, {MADE}" if self.product == MADE else op
        op = f"{op}, float32" if self.dtype is torch.float32 else op
        op = f"{op}, {len(self.widths)} weights" if self.widths else op
        op = f"{op}, tail" if self.written else op
        return op if self.by_rows or self.op == PUBLISH else f"{op}, columns"

    def rounded(self) -> DenseProblem | None:
        """With the tokens rounded up to a power of two, or those of a rank where ranks share them; not for
        several stretches of rows."""
        if self.outer != 1:
            return None
        shares = self.world if self.by_rows and self.op in (SCATTER, GATHER) else 1
        m = shares << (cdiv(self.m, shares) - 1).bit_length()
        return replace(self, m=max(self.world, m), aligned=True)

    def _is_multiplied(self) -> bool:
        """Whether kernels of ours can multiply the operands."""
        return (
            self.product != MADE
            and self.aligned
            and all(width % 8 == 0 for width in (self.n, *self.widths))
            and all(length % 8 == 0 for length in (self.k, *self.terms))
            and len(self.terms) <= MOST_TERMS
            and len(self.widths) <= MOST_WEIGHTS
            and max(self.k, self.n + 256) * self.dtype.itemsize <= LONGEST_ROW
        )
