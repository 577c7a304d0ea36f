"""Calls of `exchange_sums` on ranks that are CPU processes."""

from dataclasses import dataclass, replace

from autofuse.native_kernels.gpu.memory import Need, PeerMemory
from autofuse.native_kernels.triton.exchange_sums import SumsConfig, launch_exchange_sums, sums_needs
from tests.kernels.calls import SITE, Reduction, check, nan

CONFIG = SumsConfig(length=64, slice_items=2, per_sm=2)


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
