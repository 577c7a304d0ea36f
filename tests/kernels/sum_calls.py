"""Calls of `exchange_sums` on ranks that are CPU processes."""

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from autofuse.native_kernels.gpu.memory import Need, PeerMemory
from autofuse.native_kernels.triton.exchange_sums import SumsConfig, launch_exchange_sums, sums_needs
from tests.kernels.calls import SITE, Reduction, check, nan, peer_memory

CONFIG = SumsConfig(length=64, per_sm=2)


@dataclass(frozen=True)
class Sums(Reduction):
    """The product is computed before; chunk r is rows of rank r."""

    config: SumsConfig = CONFIG
    programs: int = 2

    def need(self, world: int) -> Need:
        return sums_needs(self.m * self.n, self.dtype.itemsize, world, self.all_ranks, self.config)

    def run(self, memory: PeerMemory, seed: int) -> None:
        expected = self.expected(memory.world, seed)
        if not self.all_ranks:
            expected = expected.chunk(memory.world)[memory.rank]
        (x,), (w,) = self.inputs(memory.rank, seed)
        product, out = (x.double() @ w.double()).to(self.dtype), nan(*expected.shape, self.dtype)
        launch_exchange_sums(
            replace(memory, programs=self.programs),
            product,
            out,
            self.mean,
            self.all_ranks,
            self.config,
            SITE,
        )
        check(out, expected, self, memory)


def sum_of_each_kind(rank: int, world: int, dtype: torch.dtype, config: SumsConfig) -> None:
    """Zeros of both signs, infinities, NaN and the smallest numbers."""
    tiny = torch.finfo(dtype).smallest_normal / 4
    kinds = torch.tensor([-0.0, 0.0, math.inf, -math.inf, math.nan, tiny, -tiny, 1.0], dtype=dtype)
    zeros = torch.full((32,), -0.0, dtype=dtype)
    memory = peer_memory(rank, world, sums_needs(64, dtype.itemsize, world, True, config))
    for _ in range(3):
        given = [torch.cat([kinds, kinds.roll(r), kinds, zeros, kinds.roll(3 * r)]) for r in range(world)]
        expected = sum((g.float() for g in given), torch.zeros(64)).to(dtype)
        product, out = given[rank].contiguous(), torch.full((64,), 7.0, dtype=dtype)
        launch_exchange_sums(memory, product, out, False, True, config, SITE)
        assert not memory.record.any(), f"gave up: {memory.record.tolist()}"
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        of_ranks: list[torch.Tensor] = [torch.empty(0)] * world
        dist.all_gather_object(of_ranks, out)
        bits = [each.view(torch.int32 if dtype.itemsize == 4 else torch.int16) for each in of_ranks]
        assert all(torch.equal(bits[0], each) for each in bits), "ranks have other bits"
    dist.barrier()
    assert not memory.words.views[rank].any(), "words are left over"
