"""Calls of `exchange_rows` and `exchange_row_packets` on ranks that are CPU processes."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.gpu.dense.tails import Behind, behind_of, tail_of
from autofuse.lowering.reference.tail import tail_reference
from autofuse.native_kernels.gpu.memory import Need, PeerMemory
from autofuse.native_kernels.triton.exchange_row_packets import (
    RowPacketsConfig,
    launch_exchange_row_packets,
    row_packets_fit,
    row_packets_needs,
)
from autofuse.native_kernels.triton.exchange_rows import RowsConfig, launch_exchange_rows, rows_needs
from autofuse.native_kernels.triton.tail_alone import launch_tail
from autofuse.native_kernels.triton.tails import NO_TAIL, TailSpec
from tests.kernels.calls import SITE, Reduction, random_matrix

CONFIG = RowsConfig(length=64)
PACKETS = RowPacketsConfig()


@dataclass(frozen=True)
class Rows(Reduction):
    """The product is computed before; chunk r is rows of rank r.

    operands: of each whether it has rows, whether it has columns, and its dtype.
    """

    config: Any = CONFIG
    programs: int = 2
    tail: str = ""
    operands: tuple[tuple[bool, bool, torch.dtype], ...] = ()
    alone: bool = False
    """Whether the tail is applied by a kernel behind the exchange."""

    @property
    def owners(self) -> bool:
        """Whether the owner of a row applies the tail for all ranks."""
        return self.all_ranks and not self.config.once

    def exchange(self, *args: Any, **more: Any) -> None:
        launch_exchange_rows(*args, **more)

    def need(self, world: int) -> Need:
        tail = self.spec(self.given(world, 0))
        written = sum(tail.row_bytes(self.n))
        return rows_needs(self.m, self.n, self.dtype.itemsize, world, self.all_ranks, self.config, written)

    def spec(self, operands: list[Tensor], rows: int = 0) -> TailSpec:
        return tail_of(self.tail, self.dtype, rows or self.m, operands) if self.tail else NO_TAIL

    def given(self, world: int, rank: int) -> list[Tensor]:
        """The operands; those of owners are the same on all ranks, those of others are not."""
        rows = self.m if self.all_ranks else self.m // world
        found = []
        for i, (high, wide, dtype) in enumerate(self.operands):
            t = random_matrix(
                1000 + i + (0 if self.owners else 10 * rank), rows if high else 1, self.n, dtype
            )
            found.append(t[:, : self.n if wide else 1].contiguous())
        return found

    def run(self, memory: PeerMemory, seed: int) -> None:
        world, rank = memory.world, memory.rank
        total = self.expected(world, seed)
        if not self.all_ranks:
            total = total.chunk(world)[rank]
        operands = self.given(world, rank)
        expected = tail_reference(total, operands, self.tail)
        (x,), (w,) = self.inputs(rank, seed)
        product = (x.double() @ w.double()).to(self.dtype)
        rows, columns = total.shape
        tail = self.spec(operands, rows)
        memory = replace(memory, programs=self.programs)
        own = NO_TAIL if self.alone else tail
        results = [t.fill_(torch.nan) for t in own.empty(product, rows, columns)] or [total.clone()]
        self.exchange(
            memory, product, results, self.mean, self.all_ranks, self.config, SITE,
            operands=[] if self.alone else operands, tail=own,
        )  # fmt: skip
        assert not memory.record.any(), f"rank {rank}, {self}: gave up with {memory.record.tolist()}"
        if not self.alone:
            self.compare(rank, results, expected)
            return
        for adds in (False, True):
            self.compare(rank, self.behind(results[0], operands, behind_of(tail, adds)), expected)

    def behind(self, value: Tensor, operands: list[Tensor], behind: Behind) -> list[Tensor]:
        """The results of the tail where the kernel of the sum adds what it can."""
        if behind.added >= 0:
            value = value + operands[behind.added]
        results = [t.fill_(torch.nan) for t in behind.rest.empty(value, *value.shape)]
        if behind.rest.stages:
            launch_tail(value, [operands[i] for i in behind.operands], results, behind.rest)
        return behind.results([value, *results])

    def compare(self, rank: int, results: list[Tensor], expected: list[Tensor]) -> None:
        for got, wanted in zip(results, expected, strict=True):
            got, wanted = (t.float() if t.dtype.itemsize == 1 else t for t in (got, wanted))
            torch.testing.assert_close(got, wanted, msg=lambda text: f"rank {rank}, {self}: {text}")


@dataclass(frozen=True)
class RowPackets(Rows):
    """Every rank applies its own tail."""

    config: Any = PACKETS

    @property
    def owners(self) -> bool:
        return False

    def exchange(self, *args: Any, **more: Any) -> None:
        launch_exchange_row_packets(*args, **more)

    def need(self, world: int) -> Need:
        assert row_packets_fit(self.n, world)
        return row_packets_needs(self.m, self.n, world, self.all_ranks)
