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
    BAD_BAG,
    BAD_INDEX,
    BAD_INPUT,
    BEGUN,
    CODES_PER_SITE,
    COMPUTED,
    COPIED,
    ENDED,
    POOLING,
    STATE_RECORD,
    STATE_THROUGH,
    WAITED,
    begin,
    finish,
    half_of,
    peer,
    signal,
    stamp,
    wait,
)
from .embedding_tables import (
    MOST_BAGS,
    WORDS_SOURCE,
    WORDS_TABLE,
    BagsConfig,
    Places,
    Tables,
    place_aligned,
)

SUM, MEAN, MAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BF16, FP16, FP32 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
ENDLESS = tl.constexpr(0x7FFFFFFF)  # bags have fewer indices
SOURCE, TABLE = tl.constexpr(WORDS_SOURCE), tl.constexpr(WORDS_TABLE)


@triton.jit
def bags_of(table, first, block, b, total, INDEX: tl.constexpr, LAST: tl.constexpr, BB: tl.constexpr):
    """Of each bag of a block: where its indices begin and end (0 and 0 if invalid), whether it is
    invalid, and whether it exists."""
    offsets = tl.load(table + 4).to(tl.pointer_type(INDEX))
    count = tl.load(table + 3)
    in_block = block * BB + tl.arange(0, BB)
    inside = in_block < b
    bag = first + in_block
    followed = inside & (bag + 1 < total + LAST)
    start = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
    stop = tl.load(offsets + bag + 1, mask=followed, other=0).to(tl.int64)
    stop = tl.where(inside & (followed == 0), count, stop)
    bad = (start < 0) | (stop < start) | (stop > count)
    return tl.where(bad, 0, start), tl.where(bad, 0, stop), bad, inside


@triton.jit
def find_faults(
    table, first, block, b, total, faults, INDEX: tl.constexpr, LAST: tl.constexpr, BB: tl.constexpr
):
    """`faults`, raised where an index of these bags has no row. It also loads the indices into the cache."""
    offsets = tl.load(table + 4).to(tl.pointer_type(INDEX))
    count = tl.load(table + 3)
    rows = tl.load(table + 1)
    indices = tl.load(table + 2).to(tl.pointer_type(INDEX))
    lanes: tl.constexpr = faults.shape[0]
    after = first + tl.minimum((block + 1) * BB, b)
    start = tl.maximum(tl.load(offsets + first + block * BB).to(tl.int64), 0)
    stop = tl.load(offsets + after, mask=after < total + LAST, other=0).to(tl.int64)
    stop = tl.where(after < total + LAST, tl.minimum(stop, count), count)
    for j in range(0, (stop - start).to(tl.int32), lanes):
        at = start + (j + tl.arange(0, lanes))
        index = tl.load(indices + at, mask=at < stop, other=0).to(tl.int64)
        faults |= ((at < stop) & (index.to(tl.uint64) >= rows.to(tl.uint64))).to(tl.int32)
    return faults


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
def item_at(item, per_step, count, W: tl.constexpr, CB: tl.constexpr, MIXED: tl.constexpr):
    """Of an item: its rank, in steps from the next one; its block of bags, table and columns; its number."""
    step = item % W if MIXED else item // per_step
    within = item // W if MIXED else item % per_step
    return step, within // (CB * count), within // CB % count, within % CB, within


@triton.jit
def count_item(
    done, signals, slot, slices, slice_blocks, blocks, per_block, rank, first_signal, W: tl.constexpr
):
    """Count an item of slice number `slot` (step * slices + slice) as stored; the last one signals."""
    tl.debug_barrier()
    piece = slot % slices
    items = tl.minimum(slice_blocks, blocks - piece * slice_blocks) * per_block
    # An acquire empties the L1 cache, with indices of other programs: only the last program does it.
    if tl.atomic_add(done + slot, 1, sem="release", scope="gpu") == items - 1:
        tl.atomic_add(done + slot, -items, sem="acquire", scope="gpu")
        to = (rank + 1 + slot // slices) % W
        signal(peer(signals, to, tl.int32) + first_signal + rank * slices + piece)


@triton.jit
def report_faults(
    tables, state, site, rank, b, count, first, items, per_step, POOLING_PROGRAMS: tl.constexpr,
    W: tl.constexpr, INDEX: tl.constexpr, LAST: tl.constexpr, BB: tl.constexpr, CB: tl.constexpr,
    MIXED: tl.constexpr,
):  # fmt: skip
    """Search the items of this program for an invalid bag or index, and record one.

    One store of 8 bytes holds the record, code << 48 | table << 32 | index or bag, so that two never mix.
    """
    record = tl.load(state + STATE_RECORD).to(tl.pointer_type(tl.int64)) + BAD_INPUT
    for item in range(first, items, POOLING_PROGRAMS):
        step, block, t, _, _ = item_at(item, per_step, count, W, CB, MIXED)
        dest = (rank + 1 + step) % W
        table = tables + t * TABLE
        start, stop, bad, _ = bags_of(table, dest * b, block, b, W * b, INDEX, LAST, BB)
        bag = dest * b + block * BB + tl.arange(0, BB)
        worst = tl.max(tl.where(bad, bag, -1), axis=0)
        if worst >= 0:
            code = (site * CODES_PER_SITE + BAD_BAG).to(tl.int64)
            tl.store(record, (code << 48) | (t.to(tl.int64) << 32) | worst.to(tl.int64))
        rows = tl.load(table + 1)
        indices = tl.load(table + 2).to(tl.pointer_type(INDEX))
        for j in range(tl.max(stop - start, axis=0).to(tl.int32)):
            index = tl.load(indices + start + j, mask=start + j < stop, other=0).to(tl.int64)
            wrong = (start + j < stop) & ((index < 0) | (index >= rows))
            if tl.max(wrong.to(tl.int32), axis=0) != 0:
                shown = tl.minimum(tl.maximum(index, -(1 << 31)), (1 << 31) - 1)
                one = tl.max(tl.where(wrong, shown, -(1 << 31)), axis=0)
                code = (site * CODES_PER_SITE + BAD_INDEX).to(tl.int64)
                tl.store(record, (code << 48) | (t.to(tl.int64) << 32) | (one & 0xFFFFFFFF))


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


@triton.jit
def clear(counters, count, BLOCK: tl.constexpr):
    for at in range(0, count, BLOCK):
        o = at + tl.arange(0, BLOCK)
        tl.store(counters + o, 0, mask=o < count)


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
    PROGRAMS: tl.constexpr, COPYING: tl.constexpr, W: tl.constexpr, SEND: tl.constexpr, KINDS: tl.constexpr,
    WIDE: tl.constexpr, MODE: tl.constexpr, WEIGHTED: tl.constexpr, LAST: tl.constexpr, READ: tl.constexpr,
    WRITE: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr, CB: tl.constexpr, UNROLL: tl.constexpr,
    CR: tl.constexpr, CC: tl.constexpr, LANES: tl.constexpr, MIXED: tl.constexpr, TRACE: tl.constexpr,
    EVENTS: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, of which the last COPYING only copy; if COPYING is 0, all copy at the end.

    words: `Tables.words`; inbox, signals: int64 [W], addresses of the regions of all ranks; done: int32
    [(W - 1) * slices], 0; count: tables; blocks: of BB bags; slice_blocks: blocks in a slice; pieces: most
    pieces of CR x CC elements of a slice, col_blocks side by side; stride, group_stride: those of `Places`
    divided by WRITE; CB: blocks of BD columns of a table. SEND: out is [W, b, columns], a part for each rank,
    and nothing is exchanged.
    """
    program = tl.program_id(0)
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    WIRE: tl.constexpr = out.dtype.element_ty
    nbytes: tl.constexpr = WIRE.primitive_bitwidth // 8
    epoch = begin(state)
    first = half_of(epoch) * inbox_half
    first_signal = half_of(epoch) * signals_half
    tables = words + W * SOURCE
    per_step = blocks * count * CB
    stride *= WRITE
    event = 0
    event = stamp(trace, program, event, BEGUN, rank, 0, TRACE, EVENTS)
    faults = tl.zeros((LANES,), tl.int32)
    broken = tl.zeros((), tl.int32)
    stored = tl.full((), -1, tl.int32)
    POOLERS: tl.constexpr = PROGRAMS - COPYING
    start = tl.where(program < POOLERS, program, W * per_step)
    for item in range(start, W * per_step, POOLERS):
        step, block, t, strip, within = item_at(item, per_step, count, W, CB, MIXED)
        dest = (rank + 1 + step) % W
        table = tables + t * TABLE
        begin_at, end_at, bad, inside = bags_of(table, dest * b, block, b, W * b, INDEX, LAST, BB)
        longest = tl.max(tl.where(bad, ENDLESS, end_at - begin_at), axis=0).to(tl.int32)
        if longest == ENDLESS:
            broken = 1
            longest = tl.max(end_at - begin_at, axis=0).to(tl.int32)
        if strip == 0:
            faults = find_faults(table, dest * b, block, b, W * b, faults, INDEX, LAST, BB)
        column = strip * BD
        dim = tl.multiple_of((tl.load(table + 6) & 0x7FFFFFFF).to(tl.int32), WRITE)
        at = tl.multiple_of((tl.load(table + 7) & 0x7FFFFFFF).to(tl.int32), WRITE)
        if SEND:
            to = out.to(tl.int64) + (dest * b).to(tl.int64) * stride * nbytes
        else:
            to = tl.load(inbox + dest) + first.to(tl.int64) * nbytes
            to = tl.where(step == W - 1, out.to(tl.int64), to)
        acc = pool_any(
            table, begin_at, end_at, longest, column, padding, KINDS, INDEX, MODE, WEIGHTED, READ,
            BB, BD, UNROLL,
        )  # fmt: skip
        # The rows of the item before have arrived by now, so that counting it does not wait.
        if not SEND:
            if stored >= 0:
                count_item(
                    done, signals, stored, slices, slice_blocks, blocks, count * CB, rank, first_signal, W
                )
        to = tl.multiple_of(to.to(tl.pointer_type(WIRE)), WRITE * nbytes)
        c = column + tl.arange(0, BD)
        bag = block * BB + tl.arange(0, BB)
        where = to + (at + bag * stride)[:, None] + c[None, :]
        tl.store(where, acc.to(WIRE), mask=inside[:, None] & (c < dim)[None, :])
        stored = tl.where(step == W - 1, -1, step * slices + block // slice_blocks)
        event = stamp(trace, program, event, COMPUTED, dest, within, TRACE, EVENTS)
    if not SEND:
        if stored >= 0:
            count_item(done, signals, stored, slices, slice_blocks, blocks, count * CB, rank, first_signal, W)
    if (broken | tl.max(faults, axis=0)) != 0:
        report_faults(
            tables, state, site, rank, b, count, start, W * per_step, per_step, POOLERS, W, INDEX, LAST, BB,
            CB, MIXED,
        )  # fmt: skip
    COPIERS: tl.constexpr = COPYING if COPYING else PROGRAMS
    turn = PROGRAMS - 1 - program
    if not SEND and turn < COPIERS:
        arrived = peer(signals, rank, tl.int32) + first_signal
        own = tl.multiple_of(peer(inbox, rank, WIRE) + first, 16)
        for unit in range(turn, (W - 1) * slices * pieces, COPIERS):
            away = unit // pieces % (W - 1) if MIXED else unit // (slices * pieces)
            number = unit // (pieces * (W - 1)) if MIXED else unit // pieces % slices
            source = (rank + W - 1 - away) % W
            wait(
                arrived + source * slices + number,
                1,
                state,
                site * CODES_PER_SITE + POOLING,
                source,
                number,
                epoch,
            )
            event = stamp(trace, program, event, WAITED, source, number, TRACE, EVENTS)
            first_bag = number * slice_blocks * BB
            copy_piece(
                words + source * SOURCE, out, own, unit % pieces, first_bag,
                tl.minimum(slice_blocks * BB, b - first_bag), groups, group_stride, col_blocks, WRITE, CR, CC,
            )  # fmt: skip
            event = stamp(trace, program, event, COPIED, source, number, TRACE, EVENTS)
    event = stamp(trace, program, event, ENDED, rank, 0, TRACE, EVENTS)
    if SEND:
        finish(state, epoch, PROGRAMS, False)  # no rank was waited for: the epoch stays
    else:
        tl.debug_barrier()
        if tl.atomic_add(state + STATE_THROUGH, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
            clear(peer(signals, rank, tl.int32) + first_signal, W * slices, 256)
        finish(state, epoch, PROGRAMS)


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
        PROGRAMS=programs, COPYING=0 if send else config.copying * memory.programs, W=world, SEND=send,
        KINDS=tables.kinds(), WIDE=tables.indices[0].dtype == torch.int64, MODE=tables.mode,
        WEIGHTED=bool(tables.samples), LAST=int(tables.last), READ=tables.aligned(),
        WRITE=write, BB=bb, BD=bd, CB=cb,
        UNROLL=config.unroll, CR=cr, CC=cc, LANES=32 * config.warps, MIXED=config.mixed,
        TRACE=trace is not None, EVENTS=EVENTS,
        num_warps=config.warps, num_stages=1, maxnreg=config.registers,
    )  # fmt: skip
