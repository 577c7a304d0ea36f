"""matmul_all_reduce and matmul_reduce_scatter of few tokens: one kernel, and packets instead of signals.

    P = sum of x[i] @ w[i]: [M, N]      Y = sum over ranks of P, fp32, rounded once

All multiprocessors stream the weight; a program has BN columns and all M <= BM rows. It sends a tile of P,
once complete, as packets of two values and the epoch. ONCE: it sends the tile to all ranks, and every rank
adds up the W parts. Otherwise rank d gets the rows `[d * C, (d + 1) * C)`, adds them up and, for all_reduce,
sends the sums to all ranks as packets. There is no signal, and nothing to reset: a packet with another epoch
has not arrived.

A rank has two halves of packets [2, W, rows, N / 2] (int64): parts first, then sums.
"""

from collections.abc import Sequence
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
    describe_terms,
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
    half_of,
    peer,
    put_packets,
    stamp,
)
from .dependent import grid_wait, launch_dependents
from .gemm import blocks_of, load_term, pack, pair
from .packet_shares import end_packets, further, look, mark, next_left, take_or_help, through, unmarked
from .patience import any_thread
from .shares import A, B, announce, firm, start


@triton.jit(do_not_specialize=["rank", "site"])
def matmul_packets(
    x, w, x1, w1, x2, w2, x3, w3, out, packets, state, trace, M, N, K, K1, K2, K3, rank, site, chunk, slot,
    pitch, packets_half,
    PROGRAMS: tl.constexpr, W: tl.constexpr, ONCE: tl.constexpr, ALL: tl.constexpr, TRANSPOSED: tl.constexpr,
    MEAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    BP: tl.constexpr, SOURCES: tl.constexpr, TERMS: tl.constexpr, TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS. x, w: descriptors; x1, w1, K1 and so on: of further TERMS of P, else None; packets:
    int64 [W], addresses of the packet memory of all ranks.

    pitch: N / 2; chunk: rows of a rank (M if ONCE), BC the power of two above; slot: packets from one source;
    BP: pairs of columns that are added up at a time; SOURCES: the power of two above W.
    """
    program = tl.program_id(0)
    SUMS: tl.constexpr = ALL and not ONCE
    grid_wait()
    start(state)
    epoch = begin(state)
    base = half_of(epoch) * packets_half
    dtype: tl.constexpr = out.dtype.element_ty
    event = 0
    event = stamp(trace, program, event, BEGUN, rank, 0, TRACE, EVENTS)
    # The own share comes first, by itself: a loop around it would begin with loads of what follows.
    event = send_parts(
        (x, x1, x2, x3), (w, w1, w2, w3), packets, trace, M, N, (K, K1, K2, K3), rank, program, chunk, pitch,
        base, epoch, event, dtype, PROGRAMS, W, ONCE, TRANSPOSED, BM, BN, BK, TERMS, TRACE, EVENTS,
    )  # fmt: skip
    mark(state, A, program, epoch)
    if SUMS:
        mark(state, B, program, epoch)
    if program == 0:
        announce(state, rank, W, epoch)
    launch_dependents(state, rank, W, epoch)
    out_pairs = out.to(tl.pointer_type(tl.uint32))
    own = peer(packets, rank, tl.int64) + base
    source = tl.arange(0, SOURCES)[:, None, None]
    m = tl.arange(0, BM)
    r = tl.arange(0, BC)
    rows = tl.minimum(chunk, M - rank * chunk) if not ONCE else M
    wide = tl.arange(0, BP)
    # What to add up next and what to copy next, in 16 pairs of columns: the compiler sees the alignment of
    # what is multiplied by 16. Peers wait for sums: programs of the margin, which may leave, have none.
    adding = firm(state, PROGRAMS) if SUMS else PROGRAMS
    step = tl.cdiv(pitch, adding * 16)
    n = program * step
    end_n = tl.where(program < adding, n + step, n)
    c = n
    end_c = end_n if SUMS else c
    share = tl.full((), -1, tl.int32)  # of another program
    left = tl.full((), 0, tl.int32)  # 1: the last program adds up in the place of this one
    last = tl.full((), 0, tl.int32)
    behind = tl.full((), 0, tl.int32)  # of the last program: whose columns were left
    going = tl.full((), 1, tl.int32)
    while going != 0:
        if share >= 0:
            event = send_parts(
                (x, x1, x2, x3), (w, w1, w2, w3), packets, trace, M, N, (K, K1, K2, K3), rank, share, chunk,
                pitch, base, epoch, event, dtype, PROGRAMS, W, ONCE, TRANSPOSED, BM, BN, BK, TERMS, TRACE,
                EVENTS,
            )  # fmt: skip
            if share == 0:
                announce(state, rank, W, epoch)
            share = tl.full((), -1, tl.int32)
        seen = look(state, PROGRAMS, epoch)
        while (n < end_n) & (share < 0):
            at = n * 16 + wide
            inside = (r[:, None] < rows) & ((at < end_n * 16) & (at < pitch))[None, :]
            where = (source * chunk + r[None, :, None]) * pitch + at[None, None, :]
            wanted = (source < W) & inside[None, :, :]
            code = site * CODES_PER_SITE + REDUCING
            parts, share, _, left = take_or_help(
                own + where, epoch, wanted, state, code, source, n, program, PROGRAMS, adding, rank, W, last,
                LEAVES=not SUMS, ADDS=False,
            )  # fmt: skip
            if left != 0:
                n = end_n
            elif share < 0:
                event = stamp(trace, program, event, WAITED, -1, n, TRACE, EVENTS)
                low = (parts & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
                high = ((parts >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
                low = tl.sum(low, 0)
                high = tl.sum(high, 0)
                if MEAN:
                    low /= W
                    high /= W
                pairs = pair(low.to(dtype), high.to(dtype))
                first = 0 if (ONCE or not ALL) else rank * chunk
                to = (first + r[:, None]) * pitch + at[None, :]
                tl.store(out_pairs + to, pairs, mask=inside)
                if SUMS:
                    for i in tl.static_range(1, W):
                        there = peer(packets, (rank + i) % W, tl.int64) + base + W * slot
                        put_packets(there + to, pairs, epoch, inside)
                event = stamp(trace, program, event, REDUCED, rank, n, TRACE, EVENTS)
                n += BP // 16
        if SUMS:
            while (c < end_c) & (share < 0) & (n >= end_n):
                at = c * 16 + wide
                owner = m[:, None] // chunk
                theirs = (m[:, None] < M) & (owner != rank) & ((at < end_c * 16) & (at < pitch))[None, :]
                where = m[:, None] * pitch + at[None, :]
                code = site * CODES_PER_SITE + COPYING
                sums, share, other, _ = take_or_help(
                    own + W * slot + where, epoch, theirs, state, code, owner, c, program, PROGRAMS, adding,
                    rank, W, last, LEAVES=False, ADDS=True,
                )  # fmt: skip
                if other >= 0:
                    n = other * step
                    end_n = n + step
                if (share < 0) & (n >= end_n):
                    event = stamp(trace, program, event, WAITED, -1, c, TRACE, EVENTS)
                    tl.store(out_pairs + where, sums.to(tl.uint32), mask=theirs)
                    event = stamp(trace, program, event, COPIED, -1, c, TRACE, EVENTS)
                    c += BP // 16
        if (share < 0) & (n >= end_n) & (c >= end_c):
            if last == 0:
                share = further(seen, PROGRAMS, state, A, PROGRAMS, epoch)
                if SUMS:
                    if (share < 0) & any_thread(seen):
                        other = unmarked(state, B, adding, epoch)
                        if other >= 0:
                            n = other * step
                            end_n = n + step
                if (share < 0) & (n >= end_n):
                    last, going = through(state, B, program, left, PROGRAMS, epoch)
            if (last != 0) & (going != 0):
                behind = next_left(state, B, behind, PROGRAMS, epoch)
                going = (behind < PROGRAMS).to(tl.int32)
                if going != 0:
                    n = behind * step
                    end_n = n + step
                left = tl.full((), 0, tl.int32)
                behind += 1
    event = stamp(trace, program, event, ENDED, rank, 0, TRACE, EVENTS)
    if last != 0:
        end_packets(state, epoch)


@triton.jit
def send_parts(
    x, w, packets, trace, M, N, K, rank, share, chunk, pitch, base, epoch, event,
    dtype: tl.constexpr, PROGRAMS: tl.constexpr, W: tl.constexpr, ONCE: tl.constexpr,
    TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TERMS: tl.constexpr,
    TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """Multiply every PROGRAMS-th tile from number `share` on, and send them."""
    blocks = blocks_of(K, BK, TERMS)
    m = tl.arange(0, BM)
    half = tl.arange(0, BN // 2)
    acc = tl.zeros((BM, BN), tl.float32)
    block = blocks - 1
    tile = share - PROGRAMS
    for _ in range(tl.cdiv(tl.cdiv(N, BN) - share, PROGRAMS) * blocks):
        block = tl.where(block == blocks - 1, 0, block + 1)
        if block == 0:
            tile += PROGRAMS
        a, b = load_term(x, w, 0, tile * BN, block, K, TRANSPOSED, BK, TERMS)
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
            event = stamp(trace, tl.program_id(0), event, COMPUTED, -1, tile, TRACE, EVENTS)
            acc = tl.zeros((BM, BN), tl.float32)
    return event


@dataclass(frozen=True)
class PacketsConfig:
    """The configuration of `matmul_packets`. once: every rank gets all parts, and sums are not sent."""

    bn: int = 64
    bk: int = 128
    warps: int = 4
    stages: int = 5
    once: bool = False


TAKEN = 32
"""Packets that a thread polls at a time. A poll takes some 0.7 us, however many they are."""


def pairs_at_once(pitch: int, programs: int, rows: int, warps: int) -> int:
    """Pairs of columns whose packets one of `programs` programs takes at a time: its share of `pitch`, if
    threads have the registers for `rows` packets of each."""
    share = triton.next_power_of_2(cdiv(pitch, programs))
    fits = TAKEN * 32 * warps // triton.next_power_of_2(rows)
    return max(16, min(share, fits))


def packets_needs(m: int, n: int, world: int, config: PacketsConfig) -> Need:
    """The memory that a call of `matmul_packets` needs."""
    return Need(packets=4 * world * (m if config.once else cdiv(m, world)) * (n // 2) * 8)


def launch_matmul_packets(
    memory: PeerMemory,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    out: Tensor,
    mean: bool,
    all_ranks: bool,
    config: PacketsConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
) -> None:
    """`out = sum (mean) over ranks of sum of x[i] @ w[i]`: all of it, `[M, N]`, or the rows of this rank.

    x[i]: [M, K_i], row-major; w[i]: [K_i, N], all row-major or all transposed; 16-bit floats that `is_tma`
    accepts; N is even; out is contiguous.
    """
    m, n, world = x[0].shape[0], w[0].shape[1], memory.world
    rows = max(16, triton.next_power_of_2(m))
    chunk = m if config.once else cdiv(m, world)
    terms, lengths, transposed = describe_terms(x, w, rows, config.bk, config.bn)
    programs = min(memory.programs, cdiv(n, config.bn))
    sources, added = triton.next_power_of_2(world), triton.next_power_of_2(chunk)
    sums = all_ranks and not config.once
    adding = min(programs, cdiv(3 * memory.programs, 4)) if sums else programs  # about, with a margin
    launch(
        matmul_packets, programs, compile_only,
        *terms, out, memory.packets.addresses, memory.state,
        memory.state if trace is None else trace,
        m, n, *lengths, memory.rank, site, chunk, chunk * (n // 2), n // 2, memory.packets.half(torch.int64),
        PROGRAMS=programs, W=world, ONCE=config.once, ALL=all_ranks, TRANSPOSED=transposed, MEAN=mean,
        BM=rows, BN=config.bn, BK=config.bk, BC=added,
        BP=pairs_at_once(n // 2, adding, sources * added, config.warps), SOURCES=sources,
        TERMS=len(x), TRACE=trace is not None, EVENTS=EVENTS,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
