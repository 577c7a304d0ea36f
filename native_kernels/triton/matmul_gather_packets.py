"""matmul_all_gather of few tokens: one kernel, and packets (flag in payload) instead of signals.

    P = x @ w (+ bias): [M, N] on every rank        Y = all_gather(P): [W * M, N] or [M, W * N]

All SMs stream the weight; a program owns BN columns and all M <= BM rows. As soon as a tile of P is complete
it goes to every peer as packets of two values and the epoch, and to its place in the own output. A program
then takes the packets of the same columns from every peer, and stores their payload in the output.

In either half of the memory of a rank: packets [W - 1, M, N / 2] (int64), of which slot i - 1 is for the rank
i places to the left.
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
    ENDED,
    GATHERING,
    WAITED,
    begin,
    half_of,
    peer,
    put_packets,
    stamp,
)
from .gemm import add_bias, load_operands, pack
from .matmul_gather import place, places
from .matmul_packets import pairs_at_once
from .packet_shares import end_packets, further, look, mark, next_left, take_or_help, through
from .shares import A, B, announce, start

MOST_ROWS = 128
"""Tokens of a call: one tile has all of them."""

TAKEN = 16
"""Packets that a thread polls at a time. A poll takes some 0.7 us, however many they are."""


@triton.jit(do_not_specialize=["rank", "site"])
def matmul_gather_packets(
    x, w, bias, out, packets, state, trace, M, N, K, rank, site, pitch, inner, jump, out_stride, out_rank,
    packets_half,
    PROGRAMS: tl.constexpr, W: tl.constexpr, TRANSPOSED: tl.constexpr, BIASED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
    TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS. x, w: descriptors; bias: [N], used if BIASED; packets: int64 [W], addresses of the
    packet memory of all ranks.

    pitch: N / 2; inner, jump, out_stride, out_rank: as `place` has them, in pairs of elements; BR, BP: rows
    and pairs of columns that are taken at a time.
    """
    program = tl.program_id(0)
    start(state)
    epoch = begin(state)
    base = half_of(epoch) * packets_half
    dtype: tl.constexpr = out.dtype.element_ty
    out_pairs = out.to(tl.pointer_type(tl.uint32))
    event = 0
    event = stamp(trace, program, event, BEGUN, rank, 0, TRACE, EVENTS)
    # The own share comes first, by itself: a loop around it would begin with loads of what follows.
    event = send_tiles(
        x, w, bias, out_pairs, packets, trace, M, N, K, rank, program, pitch, inner, jump, out_stride,
        out_rank, base, epoch, event, dtype, PROGRAMS, W, TRANSPOSED, BIASED, BM, BN, BK, TRACE, EVENTS,
    )  # fmt: skip
    mark(state, A, program, epoch)
    if program == 0:
        announce(state, rank, W, epoch)
    own = peer(packets, rank, tl.int64) + base
    wide = tl.arange(0, BP)[None, :]
    # What to take next, in 16 pairs of columns: the compiler sees the alignment of what is multiplied by 16.
    step = tl.cdiv(pitch, PROGRAMS * 16)
    n = program * step
    end_n = n + step
    share = tl.full((), -1, tl.int32)  # of another program
    left = tl.full((), 0, tl.int32)  # 1: the last program takes the columns of this one
    last = tl.full((), 0, tl.int32)
    behind = tl.full((), 0, tl.int32)  # of the last program: whose columns were left
    going = tl.full((), 1, tl.int32)
    while going != 0:
        if share >= 0:
            event = send_tiles(
                x, w, bias, out_pairs, packets, trace, M, N, K, rank, share, pitch, inner, jump, out_stride,
                out_rank, base, epoch, event, dtype, PROGRAMS, W, TRANSPOSED, BIASED, BM, BN, BK, TRACE,
                EVENTS,
            )  # fmt: skip
            if share == 0:
                announce(state, rank, W, epoch)
            share = tl.full((), -1, tl.int32)
        seen = look(state, PROGRAMS, epoch)
        while (n < end_n) & (share < 0):
            at = n * 16 + wide
            here = (at < end_n * 16) & (at < pitch)
            for i in range(1, W):
                source = (rank + W - i) % W
                for first in range(0, M, BR):
                    if (share < 0) & (left == 0):
                        r = first + tl.arange(0, BR)[:, None]
                        inside = (r < M) & here
                        where = own + ((i - 1) * M + r) * pitch + at
                        code = site * CODES_PER_SITE + GATHERING
                        pairs, share, _, left = take_or_help(
                            where, epoch, inside, state, code, source, n, program, PROGRAMS, PROGRAMS, rank,
                            W, last, LEAVES=True, ADDS=False,
                        )  # fmt: skip
                        if (share < 0) & (left == 0):
                            event = stamp(trace, program, event, WAITED, source, n, TRACE, EVENTS)
                            to = out_pairs + place(r, at, source, inner, jump, out_stride, out_rank)
                            tl.store(to, pairs.to(tl.uint32), mask=inside)
                            event = stamp(trace, program, event, COPIED, source, n, TRACE, EVENTS)
            if left != 0:
                n = end_n
            elif share < 0:
                n += BP // 16
        if (share < 0) & (n >= end_n):
            if last == 0:
                share = further(seen, PROGRAMS, state, A, PROGRAMS, epoch)
                if share < 0:
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
def send_tiles(
    x, w, bias, out_pairs, packets, trace, M, N, K, rank, share, pitch, inner, jump, out_stride,
    out_rank, base, epoch, event, dtype: tl.constexpr, PROGRAMS: tl.constexpr, W: tl.constexpr,
    TRANSPOSED: tl.constexpr, BIASED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """Multiply every PROGRAMS-th tile from number `share` on, and send them."""
    blocks = tl.cdiv(K, BK)
    m = tl.arange(0, BM)[:, None]
    half = tl.arange(0, BN // 2)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    block = blocks - 1
    tile = share - PROGRAMS
    for _ in range(tl.cdiv(tl.cdiv(N, BN) - share, PROGRAMS) * blocks):
        block = tl.where(block == blocks - 1, 0, block + 1)
        if block == 0:
            tile += PROGRAMS
        a, b = load_operands(x, w, 0, tile * BN, block * BK, TRANSPOSED)
        acc = tl.dot(a, b, acc)
        if block == blocks - 1:
            if BIASED:
                acc = add_bias(acc, bias, tile * BN, N, 0)
            pairs = pack(acc.to(dtype))
            n = tile * (BN // 2) + half
            inside = (m < M) & (n < pitch)
            for i in tl.static_range(1, W):
                to = peer(packets, (rank + i) % W, tl.int64) + base + ((i - 1) * M + m) * pitch + n
                put_packets(to, pairs, epoch, inside)
            tl.store(out_pairs + place(m, n, rank, inner, jump, out_stride, out_rank), pairs, mask=inside)
            event = stamp(trace, tl.program_id(0), event, COMPUTED, rank, tile, TRACE, EVENTS)
            acc = tl.zeros((BM, BN), tl.float32)
    return event


@dataclass(frozen=True)
class PublishPacketsConfig:
    """How `matmul_gather_packets` runs."""

    bn: int = 64
    bk: int = 128
    warps: int = 4
    stages: int = 5


def publish_packets_needs(m: int, n: int, world: int, config: PublishPacketsConfig) -> Need:
    """What a call of `matmul_gather_packets` uses."""
    return Need(packets=2 * (world - 1) * m * (n // 2) * 8)


def launch_matmul_gather_packets(
    memory: PeerMemory,
    x: Tensor,
    w: Tensor,
    out: Tensor,
    dim: int,
    outer: int,
    config: PublishPacketsConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    bias: Tensor | None = None,
) -> None:
    """As `launch_matmul_gather`, of at most MOST_ROWS rows."""
    (m, k), n, world = x.shape, w.shape[1], memory.world
    rows = max(16, triton.next_power_of_2(m))
    inner, jump, out_stride, out_rank = places(m, n, dim, outer, world)
    weight, transposed = describe_weight(w, config.bk, config.bn)
    programs = min(memory.programs, cdiv(n, config.bn))
    together = pairs_at_once(n // 2, programs, 1, config.warps)
    most = TAKEN * 32 * config.warps // together
    launch(
        matmul_gather_packets, programs, compile_only,
        describe(x, rows, config.bk), weight, out if bias is None else bias, out, memory.packets.addresses,
        memory.state, memory.state if trace is None else trace,
        m, n, k, memory.rank, site, n // 2, inner, jump, out_stride // 2, out_rank // 2,
        memory.packets.half(torch.int64),
        PROGRAMS=programs, W=world, TRANSPOSED=transposed, BIASED=bias is not None,
        BM=rows, BN=config.bn, BK=config.bk, BR=min(triton.next_power_of_2(m), most), BP=together,
        TRACE=trace is not None, EVENTS=EVENTS,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
