"""Calls of `exchange_tokens` and `exchange_token_packets` on ranks that are CPU processes."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.native_kernels.gpu.memory import Need, PeerMemory
from autofuse.native_kernels.triton.exchange_sums import sums_needs
from autofuse.native_kernels.triton.exchange_token_packets import (
    TokenPacketsConfig,
    launch_exchange_token_packets,
    token_packets_needs,
)
from autofuse.native_kernels.triton.exchange_tokens import (
    TokenRows,
    TokensConfig,
    launch_exchange_tokens,
    launch_token_sums,
)
from tests.kernels.calls import SITE, peer_memory
from tests.kernels.embedding_calls import check, told

CONFIG = TokensConfig(length=64, per_sm=2)
PACKETS = TokenPacketsConfig(length=256)
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Tokens:
    """before, behind: the dtype of factors, `one`: of one for all; more: rows that no token has."""

    tokens: int
    columns: int
    k: int = 2
    dtype: torch.dtype = BF16
    wire: torch.dtype = BF16
    fold: bool = False
    taken: bool = True
    before: torch.dtype | None = None
    behind: torch.dtype | None = None
    one: bool = False
    added: bool = False
    more: int = 3
    all_ranks: bool = True
    mean: bool = False
    config: TokensConfig | TokenPacketsConfig = CONFIG
    programs: int = 2
    counts: bool | None = None
    """Where a mask says so, an entry counts."""

    def need(self, world: int) -> Need:
        how = self.tokens * self.columns, self.wire.itemsize, world, self.all_ranks
        if isinstance(self.config, TokenPacketsConfig):
            return token_packets_needs(*how, self.config)
        return sums_needs(*how, self.config)

    def of(self, rank: int, seed: int) -> TokenRows:
        make = torch.Generator().manual_seed(16 * seed + rank)
        entries = self.tokens * self.k
        # Ranks have other numbers of rows, of which a token may have one twice.
        count = entries + (self.more + rank if self.taken else 0)
        wide = torch.randn(count, self.columns + 8, generator=make).to(self.dtype)

        def factors(dtype: torch.dtype | None, length: int) -> Tensor | None:
            if dtype is None:
                return None
            return torch.rand(1 if self.one else length, 1, generator=make).to(dtype)

        return TokenRows(
            wide[:, : self.columns],
            torch.randint(0, count, (entries, 1), generator=make) if self.taken else None,
            factors(self.before, count),
            factors(self.behind, entries)
            if self.counts is None
            else torch.rand(entries, 1, generator=make) < 0.5,
            torch.randn(self.tokens, self.columns, generator=make).to(self.wire) if self.added else None,
            self.tokens,
            self.k,
            self.fold,
            self.counts is not False,
        )

    def sums(self, rank: int, seed: int) -> Tensor:
        """Of a rank, added up in the kernel's order."""
        of = self.of(rank, seed)
        total = torch.zeros(self.tokens, self.columns)
        for j in range(self.k):
            entry = torch.arange(self.tokens)
            entry = j * self.tokens + entry if self.fold else entry * self.k + j
            row = entry if of.index is None else of.index[entry, 0]
            part = of.rows[row].float()
            for factor, at in ((of.before, row), (of.behind, entry)):
                if factor is not None and factor.dtype == torch.bool:
                    part = part.where(factor[at] == self.counts, 0)
                elif factor is not None and not self.one:
                    part = part * factor[at].float()
            total = total + part
        for factor in (of.before, of.behind):
            if factor is not None and self.one:
                total = total * factor.float()
        return (total if of.added is None else total + of.added.float()).to(self.wire)

    def expected(self, rank: int, world: int, seed: int) -> Tensor:
        total = torch.zeros(self.tokens, self.columns)
        for r in range(world):
            total += self.sums(r, seed).float()
        total = (total / world if self.mean else total).to(self.wire)
        return total if self.all_ranks else total.chunk(world)[rank]

    def launch(self, memory: PeerMemory, of: TokenRows) -> Tensor:
        rows = self.tokens if self.all_ranks else self.tokens // memory.world
        out = torch.full((rows, self.columns), torch.nan, dtype=self.wire)
        given = replace(memory, programs=self.programs), of, out, self.mean, self.all_ranks
        if isinstance(self.config, TokenPacketsConfig):
            launch_exchange_token_packets(*given, self.config, SITE)
        else:
            launch_exchange_tokens(*given, self.config, SITE)
        return out

    def run(self, memory: PeerMemory, seed: int) -> None:
        rank = memory.rank
        got = self.launch(memory, self.of(rank, seed))
        check(got, self.expected(rank, memory.world, seed), self, memory)

    def run_alone(self) -> None:
        out = torch.full((self.tokens, self.columns), torch.nan, dtype=self.wire)
        launch_token_sums(self.of(0, 0), out, self.programs)
        assert torch.equal(out, self.sums(0, 0)), self


def alone(rank: int, world: int, calls: list[Tokens]) -> None:
    for call in calls:
        call.run_alone()


def reported(rank: int, world: int, call: Tokens, at: int, value: int) -> int:
    """The word of the record of rank 1, which has `value` among the indices. All other tokens are right on
    all ranks, and so is the next call."""
    memory = peer_memory(rank, world, call.need(world))
    of = call.of(rank, 0)
    if rank == 1:
        assert of.index is not None
        of.index[at] = value
    got = call.launch(memory, of)
    word = told(memory)
    assert int((got != call.expected(rank, world, 0)).any(1).sum()) <= 1, "other tokens were touched"
    assert not got.isnan().any()
    call.run(memory, 1)
    dist.barrier()
    return word
