"""Problems of matmul_all_reduce and matmul_reduce_scatter in which each rank adds up rows, without a matmul.

The rows come from embedding bags, from experts, or from a vocabulary. The choice of a way treats all alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from autofuse.lowering.gpu.choice.kernel import MOST_BYTES, Kernel, Way
from autofuse.lowering.gpu.choice.work import Collective, Exchange, Rows, Work
from autofuse.lowering.ops.matmul_all_reduce import OP as REDUCE
from autofuse.native_kernels.triton.exchange_sums import UNIT


@dataclass(frozen=True)
class PooledProblem(ABC):
    """The sum over the ranks of a matrix of `rows` (bags or tokens) and `columns`. dtype: of the exchange;
    programs: multiprocessors; by_rows: each rank owns a contiguous range of rows."""

    op: str
    rows: int
    columns: int
    world: int
    dtype: torch.dtype
    programs: int
    by_rows: bool

    is_whole: ClassVar[bool] = False
    """The time depends on the indices of all ranks, which a rank does not know."""
    most_bytes: ClassVar[int] = MOST_BYTES
    replaced: ClassVar[str]
    """Name of the way that the op replaces."""
    kind: ClassVar[str]
    """The word for the source of the rows in the names of formulas."""

    @property
    def multiplied(self) -> tuple[Work, ...]:
        """The work before the rows are read."""
        return ()

    @property
    @abstractmethod
    def summands(self) -> int:
        """Rows that are added up for a bag or token, as far as ranks know."""

    @property
    def read(self) -> float:
        """Bytes of the rows that are added up."""
        return float(self.rows * self.summands * self.columns * self.dtype.itemsize)

    @property
    def computed(self) -> tuple[Work, ...]:
        """The work before the exchange, in ways that exchange finished sums."""
        return *self.multiplied, Rows(f"{self.op} {self.kind} sums", self.read, 0.0, False)

    @property
    @abstractmethod
    def exchanges(self) -> Sequence[Kernel[Any, Any]]:
        """The kernels for such rows."""

    def at(self, op: str, m: int, k: int, n: int, world: int) -> PooledProblem:
        return replace(self, rows=m, columns=n, world=world)

    @property
    def measured_as(self) -> str:
        return f"{self.op}, {self.kind}"

    def is_kin(self, op: str) -> bool:
        """False: other points of the op are those of matmuls."""
        return False

    def rounded(self) -> PooledProblem:
        """The problem itself. A call is measured with its own indices; the times hold for all later calls."""
        return self

    @property
    def m(self) -> int:
        return self.rows

    @property
    def k(self) -> int:
        """The K of a product; 1, since rows that are read have none."""
        return 1

    @property
    def n(self) -> int:
        return self.columns

    @property
    def everywhere(self) -> bool:
        """Whether every rank gets the whole sum."""
        return self.op == REDUCE

    def library_ways(self) -> Sequence[Way]:
        return (Way(self.replaced, torch_work, replaced=True),)

    def kernels(self) -> Sequence[Kernel[Any, Any]]:
        whole = self.columns % UNIT.value == 0 and self.rows * self.columns > 0
        return self.exchanges if whole and self.by_rows and self.world <= 8 else ()


def _sent(p: PooledProblem, hops: int) -> float:
    """Bytes that a rank sends in `hops` exchanges of the parts that owners add up."""
    return hops * p.rows * p.columns * p.dtype.itemsize * (p.world - 1) / p.world


def kernel_work(once: bool, p: PooledProblem) -> Work:
    """The work of a kernel, as if it sent nothing while it reads rows. once: every rank adds up
    everything."""
    hops = 2 if p.everywhere and not once else 1
    sent = _sent(p, p.world if once else hops)
    return Exchange(f"{p.op} {p.kind}", p.multiplied, sent, 2 * sent + p.read, hops)


def packets_work(p: PooledProblem) -> Work:
    """The work of a kernel that sends packets in one exchange. Half of the bytes of a packet are payload."""
    sent = 2 * _sent(p, p.world if p.everywhere else 1)
    return Exchange(f"{p.op} {p.kind} packets", p.multiplied, sent, 2 * sent + p.read, 1)


def torch_work(p: PooledProblem) -> tuple[Work, ...]:
    name, hops = ("all_reduce", 2) if p.everywhere else ("reduce_scatter", 1)
    return *p.computed, Collective(f"nccl {name}", _sent(p, hops), p.world)
