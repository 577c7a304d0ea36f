"""embedding_bag_all_to_all: one persistent kernel that pools bags and stores pooled rows at their ranks.

    y[r] = pooled rows of all tables of all ranks, for the bags [r * b, (r + 1) * b)

An item is BB bags of one table, all for one rank. Items for r + 1 come first, then r + 2, ..., those of this
rank last; MIXED: items for all ranks in turn. A program stores pooled rows in the inbox of their rank, which
has the layout of the output, or in this rank's output. A slice is some bags of all tables. Programs count the
items of a slice, and the last one signals. Programs that have nothing left to pool copy what arrives, slice
by slice, to the output; some programs may do so from the start.

A rank has two halves each of the inbox, of the output's shape, and the counters arrived [W, slices].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import EVENTS, PeerMemory, cdiv, launch

from .comm import (
    BEGUN,
    CODES_PER_SITE,
    COMPUTED,
    COPIED,
    ENDED,
    POOLING,
    STATE_TICKETS,
    WAITED,
    begin,
    draw,
    drawn,
    finish,
    half_of,
    is_last,
    peer,
    stamp,
    wait,
)
from .embedding_bags import TABLE, bags_of, find_faults, item_at, report_faults
from .embedding_tables import (
    MOST_BAGS,
    WORDS_SOURCE,
    BagsConfig,
    Places,
    Tables,
    place_aligned,
)
from .shares import (
    STATE_STARTED,
    A,
    announce,
    claim,
    end_shares,
    first_share,
    further,
    look,
    multiprocessor,
    start,
    stays,
)
from .slices import clear, count_item

SUM, MEAN, MAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BF16, FP16, FP32 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
ENDLESS = tl.constexpr(0x7FFFFFFF)  # bags have fewer indices
SOURCE = tl.constexpr(WORDS_SOURCE)


@triton.jit
def pool(
    table, begin_at, end_at, longest, first_column, padding,
    DTYPE: tl.constexpr, INDEX: tl.constexpr, MODE: tl.constexpr, WEIGHTED: tl.constexpr, READ: tl.constexpr,
    BB: tl.constexpr, BD: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The pooled rows [BB, BD], rounded to the table's dtype. An index without a row is left out."""
    nbytes: tl.constexpr = DTYPE.primitive_bitwidth // 8
    weight = tl.multiple_of(tl.load(table).to(tl.pointer_type(DTYPE)), READ * nbytes)
    rows = tl.load(table + 1)
    indices = tl.load(table + 2).to(tl.pointer_type(INDEX))
    samples = tl.load(table + 5).to(tl.pointer_type(DTYPE))
    shape = tl.load(table + 6)
    # Multiples are told of where a value is made: the compiler loses them on its way out of a function.
    row_stride = tl.multiple_of(shape >> 32, READ)
    dim = tl.multiple_of((shape & 0x7FFFFFFF).to(tl.int32), READ)
    c = first_column + tl.arange(0, BD)
    in_row = (c < dim)[None, :]
    acc = tl.full((BB, BD), float("-inf") if MODE == MAX else 0.0, tl.float32)
    used = tl.zeros((BB,), tl.int32)
    for j in range(0, longest, UNROLL):
        for u in tl.static_range(UNROLL):
            at = begin_at + (j + u)
            inside = at < end_at
            index = tl.load(indices + at, mask=inside, other=0).to(tl.int64)
            keep = inside & (index.to(tl.uint64) < rows.to(tl.uint64)) & (index != padding)
            where = weight + (index * row_stride)[:, None] + c[None, :]
            other = float("-inf") if MODE == MAX else 0.0
            row = tl.load(where, mask=keep[:, None] & in_row, other=other).to(tl.float32)
            if WEIGHTED:
                sample = tl.load(samples + at, mask=keep, other=0.0).to(tl.float32)
                row *= sample[:, None]
            if MODE == MAX:
                acc = tl.maximum(acc, row)
            else:
                acc += row
            if MODE != SUM:
                used += keep.to(tl.int32)
    if MODE == MEAN:
        acc /= tl.maximum(used, 1).to(tl.float32)[:, None]
    if MODE == MAX:
        acc = tl.where((used > 0)[:, None], acc, 0.0)
    return acc.to(DTYPE).to(tl.float32)


@triton.jit
def pool_any(
    table, begin_at, end_at, longest, first_column, padding, KINDS: tl.constexpr,
    INDEX: tl.constexpr, MODE: tl.constexpr, WEIGHTED: tl.constexpr, READ: tl.constexpr,
    BB: tl.constexpr, BD: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`pool` for a table whose dtype is one of KINDS."""
    kind = (tl.load(table + 7) >> 32).to(tl.int32)
    if KINDS == FP32 or (FP32 & KINDS and kind == FP32):
        acc = pool(
            table, begin_at, end_at, longest, first_column, padding,
            tl.float32, INDEX, MODE, WEIGHTED, READ, BB, BD, UNROLL,
        )  # fmt: skip
    elif KINDS == FP16 or (FP16 & KINDS and kind == FP16):
        acc = pool(
            table, begin_at, end_at, longest, first_column, padding,
            tl.float16, INDEX, MODE, WEIGHTED, READ, BB, BD, UNROLL,
        )  # fmt: skip
    else:
        acc = pool(
            table, begin_at, end_at, longest, first_column, padding,
            tl.bfloat16, INDEX, MODE, WEIGHTED, READ, BB, BD, UNROLL,
        )  # fmt: skip
    return acc


@triton.jit
def copy_piece(
    source_words, out, inbox, piece, first_bag, bags, groups, group_stride, col_blocks, WRITE: tl.constexpr,
    CR: tl.constexpr, CC: tl.constexpr,
):  # fmt: skip
    """Copy piece CR x CC of the rows that a source has stored here for `bags` bags, from `first_bag` on."""
    base = tl.multiple_of(tl.load(source_words).to(tl.int32), WRITE)
    cols = tl.multiple_of(tl.load(source_words + 1).to(tl.int32), WRITE)
    stride = tl.multiple_of(tl.load(source_words + 2).to(tl.int32), WRITE)
    row = piece // col_blocks * CR + tl.arange(0, CR)
    col = piece % col_blocks * CC + tl.arange(0, CC)
    starts = base + row // bags * (group_stride * WRITE) + (first_bag + row % bags) * stride
    where = tl.multiple_of(starts, [WRITE])[:, None] + col[None, :]
    mask = (row < groups * bags)[:, None] & (col < cols)[None, :]
    tl.store(out + where, tl.load(inbox + where, mask=mask), mask=mask)


@triton.jit(
    do_not_specialize=[
        "count", "b", "blocks", "slice_blocks", "slices", "pieces", "col_blocks", "stride", "groups",
        "group_stride", "padding", "rank", "site", "inbox_half", "signals_half",
    ]
)  # fmt: skip
def embedding_exchange(
    words, out, inbox, signals, done, state, trace,
    count, b, blocks, slice_blocks, slices, pieces, col_blocks, stride, groups, group_stride, padding, rank,
    site, inbox_half, signals_half,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, COPYING: tl.constexpr, W: tl.constexpr, SEND: tl.constexpr,
    KINDS: tl.constexpr, WIDE: tl.constexpr, MODE: tl.constexpr, WEIGHTED: tl.constexpr, LAST: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr, CB: tl.constexpr,
    UNROLL: tl.constexpr, CR: tl.constexpr, CC: tl.constexpr, LANES: tl.constexpr, MIXED: tl.constexpr,
    TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor, of which the last COPYING only copy.

    words: `Tables.words`; inbox, signals: int64 [W], addresses of the regions of all ranks; done: int32
    [(W - 1) * slices], 0; count: tables; blocks: of BB bags; slice_blocks: blocks in a slice; pieces: most
    pieces of CR x CC elements of a slice, col_blocks side by side; stride, group_stride: those of `Places`
    divided by WRITE; CB: blocks of BD columns of a table. SEND: out is [W, b, columns], a part for each rank,
    and nothing is exchanged.
    """
    program = tl.program_id(0)
    if not SEND:
        asked = claim(state, A, program, program)
        start(state)
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    WIRE: tl.constexpr = out.dtype.element_ty
    nbytes: tl.constexpr = WIRE.primitive_bitwidth // 8
    epoch = begin(state)
    tables = words + W * SOURCE
    per_step = blocks * count * CB
    stride *= WRITE
    event = 0
    event = stamp(trace, program, event, BEGUN, rank, 0, TRACE, EVENTS)
    POOLERS: tl.constexpr = PROGRAMS - COPYING
    items = W * per_step
    share = program
    if not SEND:
        share = first_share(asked, state, A, tl.minimum(POOLERS, items), program, PROGRAMS)
    item = tl.where(share >= 0, share, items)
    faults = tl.zeros((LANES,), tl.int32)
    stored = tl.full((), -1, tl.int32)
    while item < items:
        if not SEND:
            if item == 0:
                announce(state, rank, W, begin(state))
        step, block, t, strip, within = item_at(item, per_step, count, W, CB, MIXED)
        dest = (rank + 1 + step) % W
        table = tables + t * TABLE
        begin_at, end_at, bad, inside = bags_of(table, dest * b, block, b, W * b, INDEX, LAST, BB)
        longest = tl.max(tl.where(bad, ENDLESS, end_at - begin_at), axis=0).to(tl.int32)
        if longest == ENDLESS:
            faults |= 1
            longest = tl.max(end_at - begin_at, axis=0).to(tl.int32)
        if strip == 0:
            faults = find_faults(table, dest * b, block, b, W * b, faults, INDEX, LAST, BB)
        column = strip * BD
        dim = tl.multiple_of((tl.load(table + 6) & 0x7FFFFFFF).to(tl.int32), WRITE)
        at = tl.multiple_of((tl.load(table + 7) & 0x7FFFFFFF).to(tl.int32), WRITE)
        if SEND:
            to = out.to(tl.int64) + (dest * b).to(tl.int64) * stride * nbytes
        else:
            # The half is computed where it is used: registers are short while rows are pooled.
            to = tl.load(inbox + dest) + (half_of(begin(state)) * inbox_half).to(tl.int64) * nbytes
            to = tl.where(step == W - 1, out.to(tl.int64), to)
        acc = pool_any(
            table, begin_at, end_at, longest, column, padding, KINDS, INDEX, MODE, WEIGHTED, READ,
            BB, BD, UNROLL,
        )  # fmt: skip
        # The rows of the item before have arrived by now, so that counting it does not wait.
        if not SEND:
            if stored >= 0:
                count_item(
                    done, signals, stored, per_step, slice_blocks * count * CB, slices, rank,
                    half_of(begin(state)) * signals_half, W,
                )  # fmt: skip
        to = tl.multiple_of(to.to(tl.pointer_type(WIRE)), WRITE * nbytes)
        c = column + tl.arange(0, BD)
        bag = block * BB + tl.arange(0, BB)
        where = to + (at + bag * stride)[:, None] + c[None, :]
        tl.store(where, acc.to(WIRE), mask=inside[:, None] & (c < dim)[None, :])
        stored = tl.where(step == W - 1, -1, step * slices + block // slice_blocks)
        event = stamp(trace, program, event, COMPUTED, dest, within, TRACE, EVENTS)
        item += POOLERS
        if item >= items:
            if not SEND:
                if stored >= 0:
                    count_item(
                        done, signals, stored, per_step, slice_blocks * count * CB, slices, rank,
                        half_of(begin(state)) * signals_half, W,
                    )  # fmt: skip
                    stored = tl.full((), -1, tl.int32)
            if tl.max(faults, axis=0) != 0:
                report_faults(
                    tables, state, site, rank, b, count, item % POOLERS, items, per_step, POOLERS, W, INDEX,
                    LAST, BB, CB, MIXED,
                )  # fmt: skip
            if not SEND:
                shares = tl.minimum(POOLERS, items)
                share = further(look(state, STATE_STARTED), PROGRAMS, state, A, shares, tl.program_id(0))
                item = tl.where(share >= 0, share, items)
    epoch = begin(state)
    first_signal = half_of(epoch) * signals_half
    if not SEND:
        arrived = peer(signals, rank, tl.int32) + first_signal
        own = tl.multiple_of(peer(inbox, rank, WIRE) + half_of(epoch) * inbox_half, 16)
        units = tl.cast((W - 1) * slices * pieces, tl.int32)
        unit = units
        if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
            unit = drawn(draw(state + STATE_TICKETS))
        while unit < units:
            following = draw(state + STATE_TICKETS)
            away = unit // pieces % (W - 1) if MIXED else unit // (slices * pieces)
            number = unit // (pieces * (W - 1)) if MIXED else unit // pieces % slices
            source = (rank + W - 1 - away) % W
            code = site * CODES_PER_SITE + POOLING
            wait(arrived + source * slices + number, 1, state, code, source, number, epoch)
            event = stamp(trace, program, event, WAITED, source, number, TRACE, EVENTS)
            first_bag = number * slice_blocks * BB
            copy_piece(
                words + source * SOURCE, out, own, unit % pieces, first_bag,
                tl.minimum(slice_blocks * BB, b - first_bag), groups, group_stride, col_blocks, WRITE, CR, CC,
            )  # fmt: skip
            event = stamp(trace, program, event, COPIED, source, number, TRACE, EVENTS)
            unit = drawn(following)
    event = stamp(trace, program, event, ENDED, rank, 0, TRACE, EVENTS)
    if SEND:
        finish(state, epoch, PROGRAMS, False)  # no rank was waited for: the epoch stays
    else:
        tl.debug_barrier()
        if is_last(state, PROGRAMS):
            clear(peer(signals, rank, tl.int32) + first_signal, W * slices, 256)
            end_shares(state, epoch, PROGRAMS)


def launch_embedding_exchange(
    memory: PeerMemory,
    words: Tensor,
    tables: Tables,
    places: Places,
    out: Tensor,
    config: BagsConfig,
    send: bool = False,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
) -> None:
    """Pool all bags and exchange them into `out` on every rank, contiguous, of the exchanged dtype.

    words: int64, on the device, `tables.words(places)`. send: nothing is exchanged; out is [W, b, C], a part
    for each rank, and `places` are places in a part. memory.programs: multiprocessors.
    """
    world, rank, itemsize = memory.world, memory.rank, out.element_size()
    dims, b = tables.dims, places.b
    bd = config.columns(dims)
    bb = min(MOST_BAGS, config.tile // bd)
    cb, blocks = cdiv(max(1, *dims), bd), cdiv(b, bb)
    slice_bags = config.slice_bags(places, itemsize)
    widest = max(cols for _, cols, _ in places.sources)
    cc = min(4 * config.tile, triton.next_power_of_2(max(16, widest)))
    cr = 4 * config.tile // cc
    col_blocks = max(1, cdiv(widest, cc))
    pieces = cdiv(places.groups * min(slice_bags, b), cr) * col_blocks
    slices = cdiv(b, slice_bags)
    programs = memory.programs * config.per_sm
    write = place_aligned(places, dims, out.data_ptr() // itemsize)
    launch(
        embedding_exchange, programs, compile_only,
        words, out, memory.inbox.addresses, memory.signals.addresses, memory.done, memory.state,
        memory.state if trace is None else trace,
        len(dims), b, blocks, slice_bags // bb, slices, pieces, col_blocks, places.stride // write,
        places.groups, places.group_stride // write, tables.padding, rank, site, memory.inbox.half(out.dtype),
        memory.signals.half(torch.int32),
        PROGRAMS=programs, PER_SM=config.per_sm, COPYING=0 if send else config.copying * memory.programs,
        W=world, SEND=send,
        KINDS=tables.kinds(), WIDE=tables.indices[0].dtype == torch.int64, MODE=tables.mode,
        WEIGHTED=bool(tables.samples), LAST=int(tables.last), READ=tables.aligned(),
        WRITE=write, BB=bb, BD=bd, CB=cb,
        UNROLL=config.unroll, CR=cr, CC=cc, LANES=32 * config.warps, MIXED=config.mixed,
        TRACE=trace is not None, EVENTS=EVENTS,
        num_warps=config.warps, num_stages=1, maxnreg=config.registers,
    )  # fmt: skip
