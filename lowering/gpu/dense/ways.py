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
"""torch's async tensor parallelism: matmuls of chunks, and copies, on two streams."""

FEW_ROWS = 128
"""With at most so many rows a kernel multiplies by one weight while parts arrive, and torch by the others
afterwards."""

MOST_ONE_SHOT_BYTES = 8 << 20
"""In `ONE_SHOT` every rank reads the whole product of every other rank. For larger products `TWO_SHOT` was
always faster."""


@dataclass(frozen=True)
class DenseProblem(OfOp):
    """A dense call: `[m, k] @ [k, n]` on every rank.

    Attributes:
        m: rows of the product. A gather's are the rows of all ranks. programs: how many programs run at once.
        dim, outer: which rows (dim 0) or columns (dim 1) belong to which rank. aligned: whether TMA can load
        the operands. update: whether tiles may be added at their owners in the order of their arrival. terms:
        for a sum of several matmuls the K of each; `k` is their total. widths: for several weights by which a
        gather's kernel multiplies together, the columns of each; `n` is their total. written: for a tail that
        owners of rows may apply, the bytes of its results in one row. product: the kind of the product that
        is reduced (`factors.py`). `dtype` is that of the product."""

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
        """Fields that may differ between ranks: a dim may be cut into unequal parts, and one rank alone may
        add a bias. If such a field differs and is not `free`, all ranks run what the op replaces."""
        if self.op == GATHER:
            return "n", "widths", "aligned"
        return ("k", "aligned") if self.op == PUBLISH else ("k", "terms", "aligned", "product")

    @property
    def free(self) -> tuple[str, ...]:
        """The fields in `own` that no kernel sees: where cuBLAS multiplies, kernels only add up the products.
        A rank with K = 0 has no product, so its K is not free."""
        exchanged = self.op in (REDUCE, SCATTER) and self.k > 0 and not self._is_multiplied()
        return ("k", "terms") if exchanged else ()

    @property
    def everywhere(self) -> bool:
        """Whether every rank gets the whole sum."""
        return self.op == REDUCE

    @property
    def by_rows(self) -> bool:
        return self.dim == 0

    @property
    def columns(self) -> tuple[int, ...]:
        """The columns of each weight by which the kernel multiplies while parts arrive."""
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
            # torch's kernels read and write each rank's share in units of 16 bytes.
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
        """Whether the product is one matmul, and each rank owns a contiguous range of its rows."""
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
        """Points of matmul_all_gather are measured with columns. They count for rows, too, since the kernels
        take the same time."""
        op = f"{self.op}, {len(self.terms)} terms" if self.terms else self.op
        op = f"{op}, {MADE}" if self.product == MADE else op
        op = f"{op}, float32" if self.dtype is torch.float32 else op
        op = f"{op}, {len(self.widths)} weights" if self.widths else op
        op = f"{op}, tail" if self.written else op
        return op if self.by_rows or self.op == PUBLISH else f"{op}, columns"

    def rounded(self) -> DenseProblem | None:
        """The problem with its tokens rounded up to a power of two; where ranks share the tokens, with those
        of one rank rounded up. None if a rank owns several ranges of rows."""
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
