"""Ranks of one process on one GPU, each on a stream and a part of the multiprocessors of its own.

Regions of all ranks lie in the memory of that GPU: kernels store to "peers" as they do across a link.
"""

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Kernel, Launch
from autofuse.lowering.gpu.dense import gathers, publishes, reductions
from autofuse.lowering.gpu.dense.ways import GATHER, PUBLISH, REDUCE, SCATTER, DenseProblem
from autofuse.native_kernels.cuda.host.gemm import CLUSTERS
from autofuse.native_kernels.cuda.host.launcher import kernel, macros
from autofuse.native_kernels.cuda.kernels.dropless_combine import (
    DroplessConfig,
    dropless_combine_needs,
    launch_dropless_combine,
)
from autofuse.native_kernels.cuda.kernels.dropless_dispatch import (
    dropless_dispatch_needs,
    launch_dropless_dispatch,
)
from autofuse.native_kernels.cuda.kernels.expert_combine import (
    CombineConfig,
    combine_needs,
    launch_expert_combine,
)
from autofuse.native_kernels.cuda.kernels.expert_dispatch import (
    DispatchConfig,
    dispatch_needs,
    launch_expert_dispatch,
)
from autofuse.native_kernels.cuda.kernels.gather_matmul import ClusterGatherConfig
from autofuse.native_kernels.cuda.kernels.gather_words import WordsGatherConfig
from autofuse.native_kernels.cuda.kernels.matmul_reduce import ClusterReduceConfig
from autofuse.native_kernels.cuda.kernels.matmul_words import WordsConfig
from autofuse.native_kernels.gpu.copy_engine import FIRST_PRESENCE
from autofuse.native_kernels.gpu.memory import SHARED_MEMORY, Need, PeerMemory, Region, new_state
from autofuse.native_kernels.gpu.state import RECORD_WORDS, Record, State
from autofuse.native_kernels.triton.exchange_rows import RowsConfig
from autofuse.native_kernels.triton.exchange_sums import SumsConfig
from autofuse.native_kernels.triton.gather_matmul import GatherConfig
from autofuse.native_kernels.triton.gather_matmul_few import FewConfig
from autofuse.native_kernels.triton.matmul_gather import PublishConfig
from autofuse.native_kernels.triton.matmul_gather_packets import PublishPacketsConfig
from autofuse.native_kernels.triton.matmul_packets import PacketsConfig
from autofuse.native_kernels.triton.matmul_reduce import ReduceConfig

BF16 = torch.bfloat16
MOST_ERROR = 4e-3
LIMIT_S = 20
"""Of a wait. A call that hangs ends after it, and its rank has a failure record."""


def peer_memory(world: int, programs: int, need: Need, margin: int) -> list[PeerMemory]:
    """Memory of all ranks, each with `programs` multiprocessors; those of the margin are the last ones."""

    def region(nbytes: int) -> Region:
        size = -(-nbytes // 256) * 256 + (4 << 20)
        return Region.of([torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(world)])

    regions = {
        f.name: region(getattr(need, f.name))
        for f in fields(Need)
        if f.name not in ("pieces", "done", "outbox")
    }
    regions["inbox"].views[0].fill_(0xFF)
    told = [view.view(torch.int32)[FIRST_PRESENCE:] for view in regions["copy_signals"].views]
    found = []
    for rank in range(world):
        record = torch.zeros(RECORD_WORDS, dtype=torch.int32).pin_memory()
        state = new_state(record, told, max(8, programs - margin), torch.device("cuda"))
        state[State.LIMIT] = int(LIMIT_S * 1e9)
        pieces = torch.zeros(max(need.pieces, 1), device="cuda")
        done = torch.zeros(max(need.done, 1), dtype=torch.int32, device="cuda")
        outbox = torch.zeros(max(need.outbox, 1), dtype=torch.uint8, device="cuda")
        clusters = tuple(programs // size for size in CLUSTERS)
        found.append(
            PeerMemory(
                rank,
                world,
                programs,
                **regions,
                state=state,
                record=record,
                pieces=pieces,
                done=done,
                outbox=outbox,
                clusters=clusters,
            )
        )
    return found


def randn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(BF16)


class Call:
    """One call of all ranks: `launch` for each rank, then `check`."""

    def __init__(self, world: int, cluster: int) -> None:
        self.world, self.cluster = world, cluster

    need: Need

    def launch(self, memory: PeerMemory) -> None:
        raise NotImplementedError

    def wanted(self, rank: int) -> Tensor:
        """In fp64."""
        raise NotImplementedError

    def new_outputs(self) -> None:
        """NaN, so that what is not written is seen."""
        shape = self.wanted(0).shape
        self.out = [torch.full(shape, torch.nan, dtype=BF16, device="cuda") for _ in range(self.world)]

    def check(self) -> None:
        for rank in range(self.world):
            found, wanted = self.out[rank].double(), self.wanted(rank)
            assert not found.isnan().any(), f"rank {rank}: something was not written"
            error = float((found - wanted).norm() / wanted.norm())
            assert error < MOST_ERROR, f"rank {rank}: error {error}"


KERNELS: dict[type, Kernel[DenseProblem, Any]] = {
    PacketsConfig: reductions.PACKETS,
    WordsConfig: reductions.WORDS,
    ClusterReduceConfig: reductions.CLUSTERS,
    ReduceConfig: reductions.TILES,
    SumsConfig: reductions.SUMS,
    RowsConfig: reductions.ROWS,
    WordsGatherConfig: gathers.WORDS_GATHER,
    FewConfig: gathers.FEW,
    GatherConfig: gathers.PARTS,
    ClusterGatherConfig: gathers.CLUSTERS_GATHER,
    PublishPacketsConfig: publishes.PACKETS,
    PublishConfig: publishes.TILES,
}


class Dense(Call):
    """A dense op; m, k, n: of a rank's matmul, of a gather with the rows of all. Logits gather columns."""

    def __init__(self, world: int, op: str, m: int, k: int, n: int, config: Any) -> None:
        # The pieces of a tile of `gather_words` need as much room as a cluster of so many blocks.
        together = config.pieces if isinstance(config, WordsGatherConfig) else getattr(config, "cluster", 1)
        super().__init__(world, together)
        self.op, self.config = op, config
        self._kernel = KERNELS[type(config)]
        self.need = self._kernel.needs(config, DenseProblem(op, m, k, n, world, BF16))
        self.x = [randn(r, m // world if op == GATHER else m, k) for r in range(world)]
        self.w = [randn(100 + r, n, k).t() / k**0.5 for r in range(world)]
        if self._kernel.takes_product:
            self.x, self.w = [x @ w for x, w in zip(self.x, self.w, strict=True)], []
        self._wanted = [self._compute(r) for r in range(world)]
        self.new_outputs()

    def _compute(self, rank: int) -> Tensor:
        if self.op == GATHER:
            return torch.cat(self.x).double() @ self.w[rank].double()
        products = [x.double() for x in self.x]
        if not self._kernel.takes_product:
            products = [x @ w.double() for x, w in zip(products, self.w, strict=True)]
        if self.op == PUBLISH:
            return torch.cat(products, 1)
        total = sum(products, torch.zeros((), device="cuda"))
        return total if self.op == REDUCE else total.chunk(self.world)[rank]

    def wanted(self, rank: int) -> Tensor:
        return self._wanted[rank]

    def launch(self, memory: PeerMemory) -> None:
        x, out = self.x[memory.rank], self.out[memory.rank]
        w = x.new_empty(0) if self._kernel.takes_product else self.w[memory.rank]
        operands: dict[str, tuple[Any, ...]] = {
            REDUCE: ([x], [w], out, reductions.Reduce(mean=False, everywhere=True, outer=1, order=0)),
            SCATTER: ([x], [w], out, reductions.Reduce(mean=False, everywhere=False, outer=1, order=0)),
            GATHER: (x, [w], [out], None, (), 1),
            PUBLISH: (x, w, out, None, 1, 1),
        }
        at = Launch(memory, None, 0, None, False)  # type: ignore[arg-type]  # no copy engine
        self._kernel.launch(at, self.config, *operands[self.op])


class Experts(Call):
    """Experts with a fixed capacity: `run` rows of each expert for, or from, each rank."""

    def __init__(
        self, world: int, experts: int, run: int, k: int, n: int, config: CombineConfig | DispatchConfig
    ) -> None:
        super().__init__(world, config.cluster)
        self.experts, self.run, self.k, self.n, self.config = experts, run, k, n, config
        combine = isinstance(config, CombineConfig)
        shape = (experts, world * run, k) if combine else (world, experts, run, k)
        self.x = [randn(r, *shape) for r in range(world)]
        self.w = [randn(100 + r, experts, k, n) / k**0.5 for r in range(world)]
        rows = world * run
        self.need = (
            combine_needs(experts, rows, n, 1, world, config)
            if isinstance(config, CombineConfig)
            else dispatch_needs(experts, rows, k, world, config)
        )
        self._wanted = [self._compute(r) for r in range(world)]
        self.new_outputs()

    def _compute(self, rank: int) -> Tensor:
        if isinstance(self.config, CombineConfig):
            runs = slice(rank * self.run, (rank + 1) * self.run)
            parts = [x[:, runs].double() @ w.double() for x, w in zip(self.x, self.w, strict=True)]
            return torch.stack(parts)
        x = torch.cat([x[rank] for x in self.x], 1)
        return x.double() @ self.w[rank].double()

    def wanted(self, rank: int) -> Tensor:
        return self._wanted[rank]

    def launch(self, memory: PeerMemory) -> None:
        r, config = memory.rank, self.config
        if isinstance(config, CombineConfig):
            launch_expert_combine(memory, [self.x[r]], [self.w[r]], self.out[r], 1, 0, config)
        else:
            launch_expert_dispatch(memory, self.x[r], [self.w[r]], [self.out[r]], 1, config)


@dataclass(frozen=True)
class _Rows:
    offsets: Tensor
    positions: Tensor
    received: list[int]
    sent: list[int]


class Dropless(Call):
    """Experts with other numbers of rows each; `combine` sends rows back, else they are dispatched.

    gated: the products with two weights are one output, behind which they come if they are `kept`."""

    def __init__(
        self,
        world: int,
        experts: int,
        rows: int,
        k: int,
        n: int,
        combine: bool,
        config: DroplessConfig,
        gated: bool = False,
        transposed: bool = False,
        kept: bool = False,
    ) -> None:
        self.combine, self.k, self.n, self.config, self.gated = combine, k, n, config, gated
        self.kept = kept
        super().__init__(world, self.config.cluster)
        generator = torch.Generator().manual_seed(7)
        most = 2 * rows // (experts * world)
        # [rank of the experts, expert, rank of the rows]
        self.counts = torch.randint(1, most, (world, experts, world), generator=generator)
        shape = (experts, n, k) if transposed else (experts, k, n)
        seeds = (100, 200) if gated else (100,)
        self.w = [[randn(s + r, *shape) / k**0.5 for s in seeds] for r in range(world)]
        if transposed:
            self.w = [[wi.transpose(1, 2) for wi in w] for w in self.w]
        self.rows = [self._rows(r) for r in range(world)]
        away = self.counts.sum(1)  # [rank of the experts, rank of the rows]
        held = [int(away[r].sum() if combine else away[:, r].sum()) for r in range(world)]
        self.x = [randn(r, held[r], k) for r in range(world)]
        self._wanted = [self._compute(r) for r in range(world)]
        longest = max(*(y.shape[-2] for y in self._wanted), *(len(x) for x in self.x))
        self.need = (
            dropless_combine_needs(longest, n, world)
            if combine
            else dropless_dispatch_needs(longest, k, world)
        )
        self.out = [torch.full(y.shape, torch.nan, dtype=BF16, device="cuda") for y in self._wanted]

    def _rows(self, rank: int) -> _Rows:
        """By expert and other rank at the experts, by rank of the experts and expert elsewhere."""
        counts, world = self.counts[rank], self.world
        starts = (counts.t().flatten().cumsum(0) - counts.t().flatten()).view(world, -1).t().flatten()
        spans = zip(starts.tolist(), counts.flatten().tolist(), strict=True)
        positions = torch.tensor([p for first, count in spans for p in range(first, first + count)])
        offsets = counts.sum(1).cumsum(0).int()
        there, here = counts.sum(0).tolist(), self.counts[:, :, rank].sum(1).tolist()
        received, sent = (here, there) if self.combine else (there, here)
        return _Rows(offsets.cuda(), positions.cuda(), received, sent)

    def _product(self, rank: int, x: Tensor) -> Tensor:
        counts = self.counts[rank].sum(1).tolist()
        products = [
            torch.cat([xi @ wi for xi, wi in zip(x.double().split(counts), w.double(), strict=True)])
            for w in self.w[rank]
        ]
        if not self.gated:
            return products[0]
        gate, other = (y.to(BF16) for y in products)
        result = (F.silu(gate) * other).double()
        return torch.stack([result, *products]) if self.kept else result

    def _compute(self, rank: int) -> Tensor:
        if self.combine:
            parts = []
            for source in range(self.world):
                p = self._product(source, self.x[source])
                buffer = torch.empty_like(p)
                buffer[self.rows[source].positions] = p
                begins = [0, *accumulate(self.rows[source].sent)]
                parts.append(buffer[begins[rank] : begins[rank + 1]])
            return torch.cat(parts)
        parts = []
        for source in range(self.world):
            begins = [0, *accumulate(self.rows[source].sent)]
            parts.append(self.x[source][begins[rank] : begins[rank + 1]])
        return self._product(rank, torch.cat(parts)[self.rows[rank].positions])

    def wanted(self, rank: int) -> Tensor:
        return self._wanted[rank]

    def new_outputs(self) -> None:
        for out in self.out:
            out.fill_(torch.nan)

    def launch(self, memory: PeerMemory) -> None:
        r, rows = memory.rank, self.rows[memory.rank]
        where = rows.offsets, rows.positions, rows.received, rows.sent
        if self.combine:
            launch_dropless_combine(memory, [self.x[r]], self.w[r], self.out[r], *where, self.config)
        else:
            outputs = list(self.out[r]) if self.kept else [self.out[r]]
            launch_dropless_dispatch(
                memory, self.x[r], self.w[r], outputs, *where, self.config, gated=self.gated
            )


class _HoldParams(ctypes.Structure):
    _fields_ = (("held", ctypes.c_void_p), ("ending", ctypes.c_void_p))


class Holder:
    """Blocks that hold multiprocessors; `place` returns how many run after at most `timeout_s`."""

    def __init__(self) -> None:
        constants = macros(_HoldParams, {})
        self._kernel = kernel("hold.cu", "hold", constants, SHARED_MEMORY, Path(__file__).parent)
        self._words = torch.zeros(1024, dtype=torch.int32).pin_memory()  # the first one ends
        self._stream = torch.cuda.Stream()

    def place(self, blocks: int, timeout_s: float = 5.0) -> int:
        self._words.zero_()
        at = self._words.data_ptr()
        params = _HoldParams(at + 4, at)
        if blocks:
            self._kernel.launch(blocks, 1, 32, params, self._stream.cuda_stream)
        end = time.monotonic() + timeout_s
        while (held := int(self._words[1:].sum())) < blocks and time.monotonic() < end:
            pass
        return held

    def release(self) -> None:
        ctypes.c_int32.from_address(self._words.data_ptr()).value = 1
        self._stream.synchronize()

    @contextmanager
    def holding(self, blocks: int) -> Iterator[None]:
        try:
            assert self.place(blocks) == blocks
            yield
        finally:
            self.release()


class Ranks:
    """All ranks of a call, and a stream for each."""

    def __init__(self, call: Call, programs: int, margin: int) -> None:
        self.call, self.memory = call, peer_memory(call.world, programs, call.need, margin)
        self._streams = [torch.cuda.Stream() for _ in self.memory]
        self._ended = [torch.cuda.Event() for _ in self.memory]
        torch.cuda.synchronize()

    def launch(self, rank: int) -> None:
        with torch.cuda.stream(self._streams[rank]):
            self.call.launch(self.memory[rank])
            self._ended[rank].record()

    def have_ended(self, timeout_s: float, ranks: Sequence[int] | None = None) -> bool:
        """Whether all, or these, end in time; nothing else waits for the GPU meanwhile."""
        end = time.monotonic() + timeout_s
        of = range(self.call.world) if ranks is None else ranks
        while not all(self._ended[r].query() for r in of):
            if time.monotonic() > end:
                return False
        return True

    def check(self) -> None:
        """What has been computed, and that all counters are as before a call."""
        torch.cuda.synchronize()
        for memory in self.memory:
            assert not memory.record[Record.RAISED], memory.record.tolist()
            assert not memory.state[State.FINISHED : State.HELD_EVEN].any(), memory.state[:16].tolist()
            assert not memory.claims.any()
            assert not memory.signals.views[memory.rank].any()
        self.call.check()
        self.call.new_outputs()
        torch.cuda.synchronize()
