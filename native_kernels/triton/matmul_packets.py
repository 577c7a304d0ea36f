"""matmul_all_reduce and matmul_reduce_scatter of few tokens: one kernel, and packets instead of signals.

    P = x @ w: [M, N]      Y = sum over ranks of P, fp32, rounded once

All multiprocessors stream the weight; a program has BN columns and all M <= BM rows. It sends a tile of P,
once complete, as packets of two values and the epoch. ONCE: it sends the tile to all ranks, and every rank
adds up the W parts. Otherwise rank d gets the rows `[d * C, (d + 1) * C)`, adds them up and, for all_reduce,
sends the sums to all ranks as packets. There is no signal, and nothing to reset: a packet with another epoch
has not arrived.

A rank has two halves of packets [2, W, rows, N / 2] (int64): parts first, then sums.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import (
    EVENTS,
    Need,
    PeerMemory,
    cdiv,
    describe,
    describe_weight,
    launch,
)

from .comm import (
    BEGUN,
    CODES_PER_SITE,
    COMPUTED,
    COPIED,
    COPYING,
    ENDED,
    REDUCED,
    REDUCING,
    WAITED,
    begin,
    finish,
    half_of,
    pack,
    pair,
    peer,
    put_packets,
    stamp,
    take_packets,
)
from .gemm import load_operands


@triton.jit(do_not_specialize=["rank", "site"])
def matmul_packets(
    x, w, out, packets, state, trace, M, N, K, rank, site, chunk, slot, pitch, packets_half,
    PROGRAMS: tl.constexpr, W: tl.constexpr, ONCE: tl.constexpr, ALL: tl.constexpr, TRANSPOSED: tl.constexpr,
    MEAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    SOURCES: tl.constexpr, TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS. x, w: descriptors; packets: int64 [W], addresses of the packet memory of all ranks.

    pitch: N / 2; chunk: rows of a rank (M if ONCE), BC the power of two above; slot: packets from one source;
    SOURCES: the power of two above W.
    """
    program = tl.program_id(0)
    epoch = begin(state)
    base = half_of(epoch) * packets_half
    dtype: tl.constexpr = out.dtype.element_ty
    blocks = tl.cdiv(K, BK)
    tiles = tl.cdiv(N, BN)
    mine = tl.cdiv(tiles - program, PROGRAMS)
    event = 0
    event = stamp(trace, program, event, BEGUN, rank, 0, TRACE, EVENTS)
    m = tl.arange(0, BM)
    half = tl.arange(0, BN // 2)
    acc = tl.zeros((BM, BN), tl.float32)
    block = blocks - 1
    tile = program - PROGRAMS
    for _ in range(mine * blocks):
        block = tl.where(block == blocks - 1, 0, block + 1)
        if block == 0:
            tile += PROGRAMS
        a, b = load_operands(x, w, 0, tile * BN, block * BK, TRANSPOSED)
        acc = tl.dot(a, b, acc)
        if block == blocks - 1:
            pairs = pack(acc.to(dtype))
            n = tile * (BN // 2) + half
            inside = (m[:, None] < M) & (n[None, :] < pitch)
            if ONCE:
                where = base + (rank * M + m[:, None]) * pitch + n[None, :]
                for i in tl.static_range(1, W + 1):
                    put_packets(peer(packets, (rank + i) % W, tl.int64) + where, pairs, epoch, inside)
            else:
                owner = m // chunk
                to = tl.load(packets + owner, mask=m < M, other=0).to(tl.pointer_type(tl.int64))
                where = base + (rank * chunk + m % chunk)[:, None] * pitch + n[None, :]
                put_packets(to[:, None] + where, pairs, epoch, inside)
            event = stamp(trace, program, event, COMPUTED, -1, tile, TRACE, EVENTS)
            acc = tl.zeros((BM, BN), tl.float32)

    out_pairs = out.to(tl.pointer_type(tl.uint32))
    own = peer(packets, rank, tl.int64) + base
    source = tl.arange(0, SOURCES)[:, None, None]
    r = tl.arange(0, BC)
    rows = tl.minimum(chunk, M - rank * chunk) if not ONCE else M
    for tile in range(program, tiles, PROGRAMS):
        n = tile * (BN // 2) + half
        inside = (r[:, None] < rows) & (n[None, :] < pitch)
        where = (source * chunk + r[None, :, None]) * pitch + n[None, None, :]
        code = site * CODES_PER_SITE + REDUCING
        parts = take_packets(own + where, epoch, (source < W) & inside[None, :, :], state, code, source, tile)
        event = stamp(trace, program, event, WAITED, -1, tile, TRACE, EVENTS)
        low = (parts & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        high = ((parts >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        low = tl.sum(low, 0)
        high = tl.sum(high, 0)
        if MEAN:
            low /= W
            high /= W
        pairs = pair(low.to(dtype), high.to(dtype))
        first = 0 if (ONCE or not ALL) else rank * chunk
        tl.store(out_pairs + (first + r[:, None]) * pitch + n[None, :], pairs, mask=inside)
        if ALL and not ONCE:
            where = base + (W * slot) + (rank * chunk + r[:, None]) * pitch + n[None, :]
            for i in tl.static_range(1, W):
                put_packets(peer(packets, (rank + i) % W, tl.int64) + where, pairs, epoch, inside)
        event = stamp(trace, program, event, REDUCED, rank, tile, TRACE, EVENTS)
    if ALL and not ONCE:
        m = tl.arange(0, BM)
        for tile in range(program, tiles, PROGRAMS):
            n = tile * (BN // 2) + half
            theirs = (m[:, None] < M) & (m[:, None] // chunk != rank) & (n[None, :] < pitch)
            where = own + W * slot + m[:, None] * pitch + n[None, :]
            sums = take_packets(
                where, epoch, theirs, state, site * CODES_PER_SITE + COPYING, m[:, None] // chunk, tile
            )
            event = stamp(trace, program, event, WAITED, -1, tile, TRACE, EVENTS)
            tl.store(out_pairs + m[:, None] * pitch + n[None, :], sums.to(tl.uint32), mask=theirs)
            event = stamp(trace, program, event, COPIED, -1, tile, TRACE, EVENTS)
    event = stamp(trace, program, event, ENDED, rank, 0, TRACE, EVENTS)
    finish(state, epoch, PROGRAMS)


@dataclass(frozen=True)
class PacketsConfig:
    """The configuration of `matmul_packets`. once: every rank gets all parts, and sums are not sent."""

    bn: int = 64
    bk: int = 128
    warps: int = 4
    stages: int = 5
    once: bool = False


def packets_needs(m: int, n: int, world: int, config: PacketsConfig) -> Need:
    """The memory that a call of `matmul_packets` needs."""
    return Need(packets=4 * world * (m if config.once else cdiv(m, world)) * (n // 2) * 8)


def launch_matmul_packets(
    memory: PeerMemory,
    x: Tensor,
    w: Tensor,
    out: Tensor,
    mean: bool,
    all_ranks: bool,
    config: PacketsConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
) -> None:
    """`out = sum (mean) over ranks of x @ w`: all of it, `[M, N]`, or the rows of this rank.

    x: [M, K], row-major; w: [K, N], row-major or transposed; both 16-bit floats that `is_tma` accepts; N is
    even; out is contiguous.
    """
    (m, k), n, world = x.shape, w.shape[1], memory.world
    rows = max(16, triton.next_power_of_2(m))
    chunk = m if config.once else cdiv(m, world)
    weight, transposed = describe_weight(w, config.bk, config.bn)
    programs = min(memory.programs, cdiv(n, config.bn))
    launch(
        matmul_packets, programs, compile_only,
        describe(x, rows, config.bk), weight, out, memory.packets.addresses, memory.state,
        memory.state if trace is None else trace,
        m, n, k, memory.rank, site, chunk, chunk * (n // 2), n // 2, memory.packets.half(torch.int64),
        PROGRAMS=programs, W=world, ONCE=config.once, ALL=all_ranks, TRANSPOSED=transposed, MEAN=mean,
        BM=rows, BN=config.bn, BK=config.bk, BC=triton.next_power_of_2(chunk),
        SOURCES=triton.next_power_of_2(world), TRACE=trace is not None, EVENTS=EVENTS,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
