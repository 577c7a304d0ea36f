"""all_gather_matmul: one persistent kernel that multiplies the parts of X in the order in which they arrive.

    X = all_gather(x): [W * C, K], part c from rank c        Y[i] = X @ w[i]: [W * C, N_i]

Columns of tiles go through all weights, which multiply rows while these lie in the L2 cache. Each rank
stores its part into the memory of all peers, r + 1 first, in slices of a few rows of tiles; each slice has
a counter. Movers do that: programs that multiply afterwards, programs that do nothing else, or copy engines
that the host has started (MOVERS = 0). A rank multiplies its own part first, where it lies, then the parts
of r - 1, r - 2, ..., whose slices arrive in that order.

A rank has two halves each of gathered [W, C, K] and the counters arrived [W, slices].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.copy_engine import FIRST_CREDIT, CopyEngine
from autofuse.native_kernels.gpu.memory import (
    EVENTS,
    LONGEST_ROW,
    Need,
    PeerMemory,
    cdiv,
    describe,
    describe_weight,
    is_tma,
    launch,
)
from autofuse.native_kernels.gpu.state import MOST_WEIGHTS

from .comm import (
    BEGUN,
    CODES_PER_SITE,
    COMPUTED,
    ENDED,
    GATHERING,
    PUSHED,
    STATE_GIVEN_UP,
    WAITED,
    begin,
    fence_copies,
    half_of,
    is_last,
    peer,
    signal,
    signal_all,
    stamp,
    wait,
)
from .gemm import add_bias, add_pieces, chunk_tile_at, load_operands
from .shares import (
    STATE_CLAIMED_B,
    STATE_STARTED,
    A,
    B,
    add_one,
    announce,
    claim,
    end_shares,
    firm,
    first_share,
    further,
    look,
    start,
    stays,
    won,
)

CREDITS = tl.constexpr(FIRST_CREDIT)


@triton.jit
def push(
    part, gathered, signals, rank, first, first_signal, elements, slices, slice_elements, mover,
    MOVERS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store this rank's part (`elements` elements, contiguous) into the memory of all peers, from element
    `first` on.

    Mover number `mover` of MOVERS moves every MOVERS-th block of a slice and signals once a slice.
    """
    dtype: tl.constexpr = part.dtype.element_ty
    for i in tl.static_range(1, W):
        to = (rank + i) % W
        there = peer(gathered, to, dtype) + first
        flags = peer(signals, to, tl.int32) + first_signal + rank * slices
        for s in range(slices):
            last = tl.minimum((s + 1) * slice_elements, elements)
            for at in range(s * slice_elements + mover * BLOCK, last, MOVERS * BLOCK):
                o = at + tl.arange(0, BLOCK)
                tl.store(there + o, tl.load(part + o, mask=o < last), mask=o < last)
            signal(flags + s)


@triton.jit
def reset(
    signals, rank, first, count, epoch, state, PROGRAMS: tl.constexpr, W: tl.constexpr,
    COPIED: tl.constexpr, CREDIT: tl.constexpr,
):  # fmt: skip
    """Ends a program after a barrier. The last one sets `count` counters from `first` on back to 0.

    CREDIT: it gives all peers credit, so that they may store again. COPIED: if a wait has given up, it raises
    this rank's credits: the copy streams wait for them without a limit.
    """
    if is_last(state, PROGRAMS):
        flags = peer(signals, rank, tl.int32) + first
        for i in range(count):
            tl.store(flags + i, 0)
        if CREDIT:
            signal_all(signals, W, CREDITS + rank, rank)
        if COPIED:
            if tl.load(state + STATE_GIVEN_UP, volatile=True) != 0:
                own = peer(signals, rank, tl.int32) + CREDITS
                for r in range(W):
                    tl.store(own + r, 1)
        end_shares(state, epoch, PROGRAMS)


@triton.jit(do_not_specialize=["rank", "site"])
def gather_matmul(
    x, gathered_x, w, w1, w2, w3, y, y1, y2, y3, bias, bias1, bias2, bias3, part, gathered, signals,
    out, out1, out2, out3, pieces, done, state, trace,
    M, N, N1, N2, N3, K, rank, site, chunk, inner, stretch, rows, cols, slices, slice_elements, slice_rows,
    target, out_stride, gathered_half, signals_half,
    PROGRAMS: tl.constexpr, MOVERS: tl.constexpr, COMPUTING: tl.constexpr, W: tl.constexpr,
    TRANSPOSED: tl.constexpr, EXACT: tl.constexpr, PIECES: tl.constexpr, BIASED: tl.constexpr,
    WEIGHTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
    COPIED: tl.constexpr, CREDIT: tl.constexpr,
    TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, of which the first MOVERS move and the last COMPUTING multiply; some may do both.

    x, gathered_x, w: descriptors of the own part [C, K], of the own gathered memory with all its halves
    [.., K] and of the weight; y: of the output, used if EXACT (inner is a multiple of BM, and PIECES is 1);
    bias: [N], used if BIASED; part, out: the own part and the output; gathered, signals: int64 [W],
    addresses of those of all ranks; w1, y1, bias1, out1, N1 and so on: of further WEIGHTS, else None, whose
    outputs are contiguous; cols: columns of tiles of all weights; slice_rows: rows of tiles in a slice, of
    slice_elements elements; target: what the counter of a complete slice shows; pieces, done: as
    `add_pieces` has them, of W * rows * cols tiles.
    """
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    stay = program < firm(state, PROGRAMS)
    asked_b = tl.full((), 0, tl.int32)
    if stay:
        asked_b = claim(state, B, program, program)
        add_one(state + STATE_CLAIMED_B)
    # Copy engines do not know the epoch: there is one half, and a peer stores again once it has credit.
    half = half_of(epoch) if MOVERS else half_of(epoch * 0)
    first_row = half * gathered_half
    first_signal = half * signals_half
    event = 0
    event = stamp(trace, program, event, BEGUN, rank, 0, TRACE, EVENTS)
    weights = (w, w1, w2, w3), (y, y1, y2, y3), (bias, bias1, bias2, bias3), (out, out1, out2, out3)
    columns = (N, N1, N2, N3)
    # Part A of a share: what its program pushes, and its tiles of the own part.
    share = first_share(asked, state, A, PROGRAMS, program, PROGRAMS)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, epoch)
        if share < MOVERS:
            push(
                part, gathered, signals, rank, (first_row + rank * chunk).to(tl.int64) * K, first_signal,
                chunk * K, slices, slice_elements, share, MOVERS, W, BLOCK,
            )  # fmt: skip
            event = stamp(trace, program, event, PUSHED, -1, 0, TRACE, EVENTS)
        # Movers multiply the parts that arrive last.
        turn = PROGRAMS - 1 - share
        started = look(state, STATE_STARTED)
        if turn < COMPUTING:
            event = multiply(
                x, weights, columns, pieces, done, trace, event, K, 0, rank, inner, stretch, rows, cols, 0,
                rows, turn, out_stride, W, COMPUTING, TRANSPOSED, EXACT, PIECES, BIASED, WEIGHTS, BM, BN, BK,
                TRACE, EVENTS,
            )  # fmt: skip
        share = further(started, PROGRAMS, state, A, PROGRAMS, program)
    # Part B: its tiles of the other parts.
    if stay == 0:
        stay = stays(state, program, 1, rank, W, epoch)
        if stay:
            asked_b = claim(state, B, program, program)
            add_one(state + STATE_CLAIMED_B)
    if stay:
        share = program
        if won(asked_b, program) == 0:
            share = further(look(state, STATE_CLAIMED_B), PROGRAMS, state, B, PROGRAMS, program)
    arrived = peer(signals, rank, tl.int32) + first_signal
    while share >= 0:
        turn = PROGRAMS - 1 - share
        claimed = look(state, STATE_CLAIMED_B)
        before = rows * cols * PIECES
        for unit in range(slices, tl.where(turn < COMPUTING, W * slices, 0)):
            source = (rank + W - unit // slices) % W
            piece = unit % slices
            first = piece * slice_rows
            here = tl.minimum(slice_rows, rows - first)
            # The turns of the programs continue where the last unit ended.
            start_at = (turn + COMPUTING - before % COMPUTING) % COMPUTING
            before += here * cols * PIECES
            if start_at < here * cols * PIECES:
                code = site * CODES_PER_SITE + GATHERING
                wait(arrived + source * slices + piece, target, state, code, source, piece, epoch)
                fence_copies()
                claimed = look(state, STATE_CLAIMED_B)
                event = stamp(trace, program, event, WAITED, source, piece, TRACE, EVENTS)
                event = multiply(
                    gathered_x, weights, columns, pieces, done, trace, event, K, first_row + source * chunk,
                    source, inner, stretch, rows, cols, first, here, start_at, out_stride, W, COMPUTING,
                    TRANSPOSED, EXACT, PIECES, BIASED, WEIGHTS, BM, BN, BK, TRACE, EVENTS,
                )  # fmt: skip
        share = further(claimed, PROGRAMS, state, B, PROGRAMS, program)
    event = stamp(trace, program, event, ENDED, rank, 0, TRACE, EVENTS)
    tl.debug_barrier()
    reset(signals, rank, first_signal, W * slices, epoch, state, PROGRAMS, W, COPIED, CREDIT)


@triton.jit
def multiply(
    x, weights, columns, pieces, done, trace, event, K, at, source, inner, stretch, rows, cols, first, here,
    start, out_stride, W: tl.constexpr, COMPUTING: tl.constexpr,
    TRANSPOSED: tl.constexpr, EXACT: tl.constexpr, PIECES: tl.constexpr, BIASED: tl.constexpr,
    WEIGHTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TRACE: tl.constexpr,
    EVENTS: tl.constexpr,
):  # fmt: skip
    """Multiply pieces `start, start + COMPUTING, ...` of `here` rows of tiles, from row `first` of a part on.

    The part of `source` begins in row `at` of x. Rows of X are (outer, W, inner); those of the part have
    index `source` of W. Pieces of one tile follow each other. weights: tuples of w, y, bias and out with an
    entry a weight, of so many `columns`.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(tl.cdiv(K, BK), PIECES)
    # The compiler cannot flatten a loop with a branch.
    for t in tl.range(start, here * cols * PIECES, COMPUTING, flatten=PIECES == 1):
        row, col = chunk_tile_at(t // PIECES, here, cols)
        row += first
        in_part = row // stretch * inner + row % stretch * BM
        to = (row // stretch * W + source) * inner + row % stretch * BM
        w, y, bias, out = weights[0][0], weights[1][0], weights[2][0], weights[3][0]
        N = columns[0]
        pitch = out_stride
        of_weight = col  # the column of tiles, counted in its weight
        end = tl.cdiv(N, BN)
        for i in tl.static_range(1, WEIGHTS):
            if col >= end:
                w = weights[0][i]
                y = weights[1][i]
                bias = weights[2][i]
                out = weights[3][i]
                N = columns[i]
                pitch = columns[i]
                of_weight = col - end
            end += tl.cdiv(columns[i], BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for block in range(blocks):
            k = (t % PIECES * blocks + block) * BK
            a, b = load_operands(x, w, at + in_part, of_weight * BN, k, TRANSPOSED)
            acc = tl.dot(a, b, acc)
        if BIASED:
            acc = add_bias(acc, bias, of_weight * BN, N, t % PIECES)
        if EXACT:
            y.store([to, of_weight * BN], acc.to(x.dtype))
        else:
            r = tl.arange(0, BM)[:, None]
            c = of_weight * BN + tl.arange(0, BN)[None, :]
            inside = (row % stretch * BM + r < inner) & (c < N)
            where = out + (to + r).to(tl.int64) * pitch + c
            if PIECES == 1:
                tl.store(where, acc.to(x.dtype), mask=inside)
            else:
                tile = (source * rows + row) * cols + col
                add_pieces(pieces, done, acc, tile, t % PIECES, where, inside, PIECES)
        event = stamp(trace, program, event, COMPUTED, source, t, TRACE, EVENTS)
    return event


@dataclass(frozen=True)
class GatherConfig:
    """The configuration of `gather_matmul`.

    movers: programs that move parts, 0 for copy engines; shared: movers multiply, too; slices: of a part;
    pieces: of K.
    """

    bm: int = 128
    bn: int = 256
    bk: int = 64
    warps: int = 8
    stages: int = 3
    movers: int = 0
    shared: bool = False
    slices: int = 1
    pieces: int = 1

    @property
    def copied(self) -> bool:
        """Whether copy engines move the parts."""
        return not self.movers


BLOCK = 1024
"""Elements that a warp of a mover moves at a time."""


def gather_needs(
    chunk: int, k: int, widths: Sequence[int], outer: int, itemsize: int, world: int, config: GatherConfig
) -> Need:
    """The memory that a call of `gather_matmul` needs. widths: columns of each weight."""
    rows, cols = outer * cdiv(chunk // outer, config.bm), sum(cdiv(n, config.bn) for n in widths)
    slices = cdiv(rows, cdiv(rows, config.slices))
    gathered, tiles = world * chunk * k * itemsize, world * rows * cols
    return Need(
        inbox=2 * (gathered + LONGEST_ROW) if config.movers else 0,
        copies=0 if config.movers else gathered,
        signals=2 * 4 * world * slices if config.movers else 0,
        copy_signals=0 if config.movers else 4 * world * slices,
        pieces=tiles * config.pieces * config.bm * config.bn if config.pieces > 1 else 0,
        done=tiles,
    )


def launch_gather_matmul(
    memory: PeerMemory,
    part: Tensor,
    w: Sequence[Tensor],
    out: Sequence[Tensor],
    outer: int,
    config: GatherConfig,
    engine: CopyEngine | None = None,
    credit: bool = True,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    bias: Sequence[Tensor] = (),
) -> Tensor:
    """`out[i] = X @ w[i] (+ bias[i])`, of up to MOST_WEIGHTS weights.

    part: [C, K], contiguous; w[i]: [K, N_i], all row-major or all transposed; out[i]: [W * C, N_i], those
    behind the first contiguous; bias[i]: [N_i], of all or of none; all are 16-bit floats of one dtype. Rows
    of X are (outer, W, inner), and `part` has index r of W. engine: moves the parts where the configuration
    has no movers. credit: whether the kernel gives credit; without it the caller calls `engine.give_credit`
    before the next call.

    Returns this rank's gathered memory, [H + W * C, K], with the parts of the peers, not its own. Odd epochs
    use the rows from H on; the parts stay until the call after the next. With copy engines H is 0, and the
    next call overwrites the parts.
    """
    (chunk, k), world, rank = part.shape, memory.world, memory.rank
    widths = [wi.shape[1] for wi in w]
    inner, cols = chunk // outer, sum(cdiv(n, config.bn) for n in widths)
    stretch = cdiv(inner, config.bm)
    rows = outer * stretch
    slice_rows = cdiv(rows, config.slices)
    if inner % config.bm:  # a slice holds whole stretches
        slice_rows = cdiv(slice_rows, stretch) * stretch
    slices = cdiv(rows, slice_rows)
    part_rows = slice_rows * config.bm if inner % config.bm == 0 else slice_rows // stretch * inner
    region, signals = (
        (memory.inbox, memory.signals) if config.movers else (memory.copies, memory.copy_signals)
    )
    half = region.half(part.dtype, k) // k if config.movers else 0
    gathered = region.matrix(rank, part.dtype, 0, half + world * chunk, k)
    exact = inner % config.bm == 0 and config.pieces == 1 and is_tma(*out)
    described = [describe_weight(wi, config.bk, config.bn) for wi in w]
    unused = describe(part, config.bm, config.bn)
    none = [None] * (MOST_WEIGHTS - len(w))
    programs = memory.programs
    if not config.movers and not compile_only:
        assert engine is not None
        engine.push(part, part_rows, slices)
    launch(
        gather_matmul, programs, compile_only,
        describe(part, config.bm, config.bk), describe(gathered, config.bm, config.bk),
        *(weight for weight, _ in described), *none,
        *(describe(y, config.bm, config.bn) if exact else unused for y in out), *none,
        *(bias or out), *none, part, region.addresses, signals.addresses, *out, *none, memory.pieces,
        memory.done, memory.state,
        memory.state if trace is None else trace,
        world * chunk, *widths, *none, k, rank, site, chunk, inner, stretch, rows, cols, slices,
        part_rows * k, slice_rows, config.movers or 1, out[0].stride(0), half, signals.half(torch.int32),
        PROGRAMS=programs, MOVERS=config.movers,
        COMPUTING=programs if config.shared or not config.movers else programs - config.movers, W=world,
        TRANSPOSED=described[0][1], EXACT=exact, PIECES=config.pieces, BIASED=bool(bias), WEIGHTS=len(w),
        BM=config.bm, BN=config.bn, BK=config.bk, BLOCK=BLOCK * config.warps,
        COPIED=config.copied, CREDIT=credit and config.copied,
        TRACE=trace is not None, EVENTS=EVENTS,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if not config.movers and not compile_only:
        assert engine is not None
        engine.join()
    return gathered
