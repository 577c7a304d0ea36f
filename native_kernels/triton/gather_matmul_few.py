"""all_gather_matmul of few tokens: all rows of X fit in one tile, and all multiprocessors stream the weight.

    X = all_gather(x): [W * C, K], part c from rank c        Y = X @ w: [W * C, N]

Every rank stores its part into the memory of all ranks, itself included. A program waits for all parts and
multiplies a piece of K of one tile of Y. The last program of a tile adds up its pieces, in order.

A rank has two halves each of gathered [W, C, K] and the counters arrived [W].
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import (
    EVENTS,
    LONGEST_ROW,
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
    ENDED,
    GATHERING,
    PUSHED,
    WAITED,
    begin,
    fence_copies,
    half_of,
    peer,
    signal_all,
    stamp,
    wait_all,
)
from .gather_matmul import BLOCK, reset
from .gemm import add_bias, add_pieces, load_operands
from .shares import (
    PLACED_NS,
    STATE_CLAIMED_B,
    YIELD_NS,
    A,
    B,
    add_one,
    claim,
    firm,
    further,
    leaves,
    look,
    start,
    try_all,
    unclaimed,
    won,
)


@triton.jit
def push_to_all(
    part, gathered, signals, rank, elements, first, first_signal, mover, asked,
    MOVERS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store this rank's part into the memory of all ranks, from element `first` on, then signal all ranks.

    Mover number `mover` of MOVERS moves every MOVERS-th block, if it gets the share that it has `asked` for.
    """
    program = tl.program_id(0)
    dtype: tl.constexpr = part.dtype.element_ty
    for at in range(mover * BLOCK, elements, MOVERS * BLOCK):
        o = at + tl.arange(0, BLOCK)
        value = tl.load(part + o, mask=o < elements)
        mine = won(asked, program)  # by now: it came while the part was loaded
        for i in tl.static_range(1, W + 1):
            there = peer(gathered, (rank + i) % W, dtype) + first
            tl.store(there + o, value, mask=(o < elements) & mine)
    signal_all(signals, tl.where(won(asked, program), W, 0), first_signal + rank, -1)


@triton.jit(do_not_specialize=["rank", "site"])
def gather_matmul_few(
    gathered_x, w, bias, part, gathered, signals, out, pieces, done, state, trace,
    M, N, K, rank, site, chunk, cols, per_piece, out_stride, gathered_half, signals_half,
    PROGRAMS: tl.constexpr, MOVERS: tl.constexpr, W: tl.constexpr,
    TRANSPOSED: tl.constexpr, PIECES: tl.constexpr, BIASED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
    TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS = cols * PIECES, which multiply; the first MOVERS of them move before. M <= BM.

    gathered_x, w: descriptors of the own gathered memory, both halves, and of the weight; bias: [N], used if
    BIASED; part, out: the own part and the output; gathered, signals: int64 [W], addresses of those of all
    ranks; pieces, done: as `add_pieces` has them, of cols tiles; per_piece: blocks of K in a piece.
    """
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    firm_programs = firm(state, PROGRAMS)
    first_row = half_of(epoch) * gathered_half
    first_signal = half_of(epoch) * signals_half
    event = 0
    event = stamp(trace, program, event, BEGUN, rank, 0, TRACE, EVENTS)
    arrived = peer(signals, rank, tl.int32) + first_signal
    push_share = tl.where(program < MOVERS, program, -1)  # part A of a share
    share = program  # part B: a piece of a tile
    held = program < 0  # whether this program has asked for it
    asked_b = tl.full((), 0, tl.int32)
    while share >= 0:
        if push_share >= 0:
            push_to_all(
                part, gathered, signals, rank, chunk * K, (first_row + rank * chunk).to(tl.int64) * K,
                first_signal, push_share, asked, MOVERS, W, BLOCK,
            )  # fmt: skip
            event = stamp(trace, program, event, PUSHED, -1, 0, TRACE, EVENTS)
        if (held == 0) & (program < firm_programs):
            asked_b = claim(state, B, program, program)
            add_one(state + STATE_CLAIMED_B)
            held = program >= 0
        # Where the parts do not come: perhaps nobody has pushed this rank's.
        ready = try_all(arrived, 1, W, MOVERS, state, tl.where(held, PLACED_NS, YIELD_NS))
        fence_copies()
        push_share = tl.full((), -1, tl.int32)
        if ready == 0:
            asked = program + 1
            push_share = unclaimed(state, A, MOVERS, program)
            if push_share < 0:
                # The margin leaves while enough others stay; the rest wait.
                stay = held
                if held == 0:
                    stay = leaves(state, firm_programs) == 0
                if stay:
                    code = site * CODES_PER_SITE + GATHERING
                    wait_all(arrived, 1, W, MOVERS, state, code, 0, share, epoch)
                    fence_copies()
                    ready = stay
                else:
                    share = push_share
        if ready:
            event = stamp(trace, program, event, WAITED, -1, 0, TRACE, EVENTS)
            if held == 0:
                asked_b = claim(state, B, program, program)
                add_one(state + STATE_CLAIMED_B)
                held = program >= 0
            col = share % cols
            piece = share // cols
            acc = tl.zeros((BM, BN), tl.float32)
            first = piece * per_piece
            for block in range(first, tl.minimum(first + per_piece, tl.cdiv(K, BK))):
                a, b = load_operands(gathered_x, w, first_row, col * BN, block * BK, TRANSPOSED)
                acc = tl.dot(a, b, acc)
            claimed = look(state, STATE_CLAIMED_B)
            if BIASED:
                acc = add_bias(acc, bias, col * BN, N, piece)
            if won(asked_b, program):
                r = tl.arange(0, BM)[:, None]
                c = col * BN + tl.arange(0, BN)[None, :]
                where = out + r * out_stride + c
                inside = (r < M) & (c < N)
                if PIECES > 1:
                    add_pieces(pieces, done, acc, col, piece, where, inside, PIECES)
                else:
                    tl.store(where, acc.to(out.dtype.element_ty), mask=inside)
            event = stamp(trace, program, event, COMPUTED, -1, share, TRACE, EVENTS)
            share = further(claimed, PROGRAMS, state, B, PROGRAMS, program)
            asked_b = program + 1
    event = stamp(trace, program, event, ENDED, rank, 0, TRACE, EVENTS)
    reset(signals, rank, first_signal, W, epoch, state, PROGRAMS, W, False, False)


@dataclass(frozen=True)
class FewConfig:
    """The configuration of `gather_matmul_few`. pieces: of K; movers: programs that move parts."""

    bn: int = 64
    bk: int = 128
    warps: int = 4
    stages: int = 4
    pieces: int = 4
    movers: int = 32


def few_needs(chunk: int, k: int, n: int, itemsize: int, world: int, config: FewConfig) -> Need:
    """The memory that a call of `gather_matmul_few` needs."""
    rows, cols = max(16, triton.next_power_of_2(world * chunk)), cdiv(n, config.bn)
    return Need(
        inbox=2 * (world * chunk * k * itemsize + LONGEST_ROW),
        signals=2 * 4 * world,
        pieces=config.pieces * rows * cols * config.bn,
        done=cols,
    )


def launch_gather_matmul_few(
    memory: PeerMemory,
    part: Tensor,
    w: Tensor,
    out: Tensor,
    config: FewConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """As `launch_gather_matmul` with outer = 1, W * C <= 128 and cols * pieces <= memory.programs.

    The gathered memory that it returns also has this rank's part.
    """
    (chunk, k), n, world, rank = part.shape, w.shape[1], memory.world, memory.rank
    rows, cols = max(16, triton.next_power_of_2(world * chunk)), cdiv(n, config.bn)
    half = memory.inbox.half(part.dtype, k) // k
    gathered = memory.inbox.matrix(rank, part.dtype, 0, half + world * chunk, k)
    weight, transposed = describe_weight(w, config.bk, config.bn)
    programs = cols * config.pieces
    launch(
        gather_matmul_few, programs, compile_only,
        describe(gathered, rows, config.bk), weight, out if bias is None else bias, part,
        memory.inbox.addresses,
        memory.signals.addresses, out, memory.pieces, memory.done, memory.state,
        memory.state if trace is None else trace,
        world * chunk, n, k, rank, site, chunk, cols, cdiv(cdiv(k, config.bk), config.pieces),
        out.stride(0), half, memory.signals.half(torch.int32),
        PROGRAMS=programs, MOVERS=min(config.movers, programs), W=world,
        TRANSPOSED=transposed, PIECES=config.pieces, BIASED=bias is not None,
        BM=rows, BN=config.bn, BK=config.bk, BLOCK=BLOCK,
        TRACE=trace is not None, EVENTS=EVENTS,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return gathered
