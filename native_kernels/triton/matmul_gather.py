"""matmul_all_gather of many tokens: one persistent kernel that pushes every tile to all peers.

    P = x @ w (+ bias): [M, N] on every rank        Y = all_gather(P): [W * M, N] or [M, W * N]

TMA stores a tile of P into the inbox of every peer, and at its own place in the output of its maker. The tile
is signalled to all peers one tile later, when these stores have long completed, so that neither NVLink nor a
fence stops the tensor cores. Outputs are not mapped by peers: programs that only communicate, and all others
once they are out of tiles, take tickets; a ticket is one tile of a peer, copied from the inbox to the output.

In either half of the memory of a rank: inbox [W - 1, rows * BM, pitch], of which slot i - 1 is for the rank i
places to the left, and the counters arrived [W, rows * cols]. Where rows of the output alternate between
ranks (outer > 1), the own tiles go through a slot of their own, the last one.
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
    COPIED,
    DRAINED,
    ENDED,
    GATHERING,
    STATE_TICKETS,
    WAITED,
    begin,
    half_of,
    is_last,
    peer,
    signal_all,
    stamp,
    stored,
    wait,
)
from .gemm import add_bias, chunk_tile_at, load_operands
from .shares import (
    STATE_STARTED,
    A,
    announce,
    claim,
    end_shares,
    first_share,
    further,
    look,
    start,
    stays,
)


@triton.jit
def place(row, col, source, inner, jump, out_stride, out_rank):
    """Where element `(row, col)` of the product of `source` lies in the output; int64.

    Rows of a product come in stretches of `inner`, `jump` rows of the output apart; products of two ranks lie
    `out_rank` elements apart.
    """
    at = (row // inner * jump + row % inner).to(tl.int64) * out_stride
    return at + tl.cast(source, tl.int64) * out_rank + col


@triton.jit(do_not_specialize=["rank", "site"])
def matmul_gather(
    x, w, bias, box0, box1, box2, box3, box4, box5, box6, box7, out, inbox, signals, state, trace,
    M, N, K, rank, site, rows, cols, inner, jump, out_stride, out_rank, pitch, inbox_half, signals_half,
    COMPUTING: tl.constexpr, PROGRAMS: tl.constexpr, W: tl.constexpr, TRANSPOSED: tl.constexpr,
    BIASED: tl.constexpr, THROUGH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr, TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, of which the first COMPUTING multiply.

    x, w: descriptors; bias: [N], used if BIASED; box0 to box7: W descriptors of where tiles of this rank go:
    its slot in the inbox of the rank 1, 2, ... places to the right; last its own part of the output or, if
    THROUGH, the slot for own tiles in the own inbox; inbox: address of the own inbox; signals: int64 [W],
    addresses of the counters of all ranks; rows, cols: tiles of P; inner, jump, out_stride, out_rank: as
    `place` has them; pitch: elements of a row of the inbox; inbox_half (rows), signals_half (elements): where
    the other half begins.
    """
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    parity = half_of(epoch)
    tiles = rows * cols
    first_row = parity * inbox_half
    first_signal = parity * signals_half
    event = 0
    event = stamp(trace, program, event, BEGUN, rank, 0, TRACE, EVENTS)
    share = first_share(asked, state, A, COMPUTING, program, PROGRAMS)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, epoch)
        event, started = compute(
            x, w, bias, (box0, box1, box2, box3, box4, box5, box6, box7), signals, N, K, rank, rows, cols,
            first_row, first_signal, share, state, event, trace, COMPUTING, W, TRANSPOSED, BIASED, THROUGH,
            BM, BN, BK, TRACE, EVENTS,
        )  # fmt: skip
        share = further(started, PROGRAMS, state, A, COMPUTING, program)
    dtype: tl.constexpr = out.dtype.element_ty
    SOURCES: tl.constexpr = W if THROUGH else W - 1
    arrived = peer(signals, rank, tl.int32) + first_signal
    arriving = tl.multiple_of(inbox.to(tl.pointer_type(dtype)), 16) + first_row.to(tl.int64) * pitch
    r = tl.arange(0, BR)[:, None]
    c = tl.max_contiguous(tl.multiple_of(tl.arange(0, BN), BN), BN)[None, :]
    tickets = tiles * SOURCES
    ticket = tl.cast(tickets, tl.int32)
    if stays(state, program, 1, rank, W, epoch):
        ticket = tl.atomic_add(state + STATE_TICKETS, 1, sem="relaxed").to(tl.int32)
    while ticket < tickets:
        slot = ticket % SOURCES
        t = ticket // SOURCES
        source = (rank + 2 * W - 1 - slot) % W
        row, col = chunk_tile_at(t, rows, cols)
        wait(arrived + source * tiles + t, 1, state, site * CODES_PER_SITE + GATHERING, source, t, epoch)
        tl.store(arrived + source * tiles + t, 0)
        event = stamp(trace, program, event, WAITED, source, t, TRACE, EVENTS)
        for sub in range(BM // BR):
            in_p = row * BM + sub * BR + r
            at = (slot * rows * BM + in_p).to(tl.int64) * pitch + col * BN + c
            to = place(in_p, col * BN + c, source, inner, jump, out_stride, out_rank)
            tl.store(out + to, tl.load(arriving + at), mask=(in_p < M) & (col * BN + c < N))
        event = stamp(trace, program, event, COPIED, source, t, TRACE, EVENTS)
        ticket = tl.atomic_add(state + STATE_TICKETS, 1, sem="relaxed").to(tl.int32)
    event = stamp(trace, program, event, ENDED, rank, 0, TRACE, EVENTS)
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        end_shares(state, epoch, PROGRAMS)


@triton.jit
def compute(
    x, w, bias, boxes, signals, N, K, rank, rows, cols, first_row, first_signal, share, state, event, trace,
    COMPUTING: tl.constexpr, W: tl.constexpr, TRANSPOSED: tl.constexpr, BIASED: tl.constexpr,
    THROUGH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """The tiles `share, share + COMPUTING, ...`; flattened, so that loads never pause between tiles."""
    program = tl.program_id(0)
    tiles = rows * cols
    skipped = -1 if THROUGH else rank
    # The counter of the tile that was stored last, -1 before the first tile. A variable that the loop sets
    # to a constant would be wrong: Triton 3.6 sets it after every block of K of the flattened loop.
    unsignalled = tl.full((), -1, tl.int32)
    for t in tl.range(share, tiles, COMPUTING, flatten=True):
        row, col = chunk_tile_at(t, rows, cols)
        acc = tl.zeros((BM, BN), tl.float32)
        for block in range(tl.cdiv(K, BK)):
            a, b = load_operands(x, w, row * BM, col * BN, block * BK, TRANSPOSED)
            acc = tl.dot(a, b, acc)
        if BIASED:
            acc = add_bias(acc, bias, col * BN, N, 0)
        stored()
        signal_all(signals, tl.where(unsignalled < 0, 0, W), unsignalled, skipped)
        value = acc.to(x.dtype)
        for i in tl.static_range(W - 1):
            boxes[i].store([first_row + row * BM, col * BN], value)
        boxes[W - 1].store([(first_row if THROUGH else 0) + row * BM, col * BN], value)
        unsignalled = first_signal + rank * tiles + t
        event = stamp(trace, program, event, COMPUTED, rank, t, TRACE, EVENTS)
    started = look(state, STATE_STARTED)
    stored()
    signal_all(signals, tl.where(unsignalled < 0, 0, W), unsignalled, skipped)
    return stamp(trace, program, event, DRAINED, -1, 0, TRACE, EVENTS), started


@dataclass(frozen=True)
class PublishConfig:
    """How `matmul_gather` runs.

    bm, bn, bk: a tile; communicating: programs that compute nothing; br: rows that are copied at a time.
    """

    bm: int = 128
    bn: int = 256
    bk: int = 64
    warps: int = 8
    stages: int = 3
    communicating: int = 0
    br: int = 32


def publish_needs(m: int, n: int, outer: int, itemsize: int, world: int, config: PublishConfig) -> Need:
    """What a call of `matmul_gather` uses."""
    rows, cols = cdiv(m, config.bm), cdiv(n, config.bn)
    slots = world - (outer == 1)
    return Need(
        inbox=2 * (slots * rows * config.bm * cols * config.bn * itemsize + LONGEST_ROW),
        signals=2 * 4 * world * rows * cols,
    )


def places(m: int, n: int, dim: int, outer: int, world: int) -> tuple[int, int, int, int]:
    """`(inner, jump, out_stride, out_rank)` as `place` takes them. Columns are gathered as a whole."""
    if dim == 1:
        assert outer == 1, "GPU kernels gather no stretches of columns"
        return m, 0, world * n, n
    inner = m // outer
    return inner, inner * world, n, inner * n


def launch_matmul_gather(
    memory: PeerMemory,
    x: Tensor,
    w: Tensor,
    out: Tensor,
    dim: int,
    outer: int,
    config: PublishConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
    bias: Tensor | None = None,
) -> None:
    """`out`: the products `x @ w (+ bias)` of all ranks, rows (dim 0) or columns (dim 1) side by side.

    x: [M, K], row-major; w: [K, N], either way round; both as `is_tma` wants them; bias: [N]; out is
    contiguous, [W * M, N], its rows (outer, W, inner), or [M, W * N]; 16-bit floats, N a multiple of 8.
    `memory` has what `publish_needs` says. Every rank of the group makes the same calls.
    """
    (m, k), n, world, rank, dtype = x.shape, w.shape[1], memory.world, memory.rank, x.dtype
    rows, cols = cdiv(m, config.bm), cdiv(n, config.bn)
    pitch, height = cols * config.bn, rows * config.bm
    half = memory.inbox.half(dtype, pitch) // pitch
    inner, jump, out_stride, out_rank = places(m, n, dim, outer, world)
    through = outer != 1

    def box(dest: int, slot: int) -> Tensor:
        return memory.inbox.matrix(dest, dtype, slot * height * pitch, half + height, pitch)

    targets = [box((rank + i) % world, i - 1) for i in range(1, world)]
    if through:
        targets.append(box(rank, world - 1))
    else:
        targets.append(out.narrow(dim, rank * (m, n)[dim], (m, n)[dim]))
    boxes = [describe(target, config.bm, config.bn) for target in targets]
    weight, transposed = describe_weight(w, config.bk, config.bn)
    programs = memory.programs
    launch(
        matmul_gather, programs, compile_only,
        describe(x, config.bm, config.bk), weight, out if bias is None else bias, *boxes,
        *boxes[:1] * (8 - world), out, memory.inbox.views[rank].data_ptr(), memory.signals.addresses,
        memory.state, memory.state if trace is None else trace,
        m, n, k, rank, site, rows, cols, inner, jump, out_stride, out_rank, pitch, half,
        memory.signals.half(torch.int32),
        COMPUTING=programs - config.communicating, PROGRAMS=programs, W=world, TRANSPOSED=transposed,
        BIASED=bias is not None, THROUGH=through, BM=config.bm, BN=config.bn, BK=config.bk, BR=config.br,
        TRACE=trace is not None, EVENTS=EVENTS,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
