"""all_to_all_embedding_bag_backward and -_update: one persistent kernel that sends the gradients of bags to
the ranks of their tables and adds them up there.

    G = the gradients of all bags of this rank's tables [B, C]
    dweights[t][i] = sum over the entries of row i of scale * G[bag of the entry, columns of t]

The update does not store the sum of row i, but changes row i of the table and its state. One program changes
a row, once, and no gradient is set to 0.

Programs push gradients for r + 1, then r + 2, ..., those of this rank last, in pieces. They count the pieces,
and the last program signals. Then they set the gradients of the tables to 0. A row adds up bags of all ranks,
so all ranks' gradients must have arrived before the first addition.

The sorted entries of a table are cut into strips. A row of a tile walks along a strip and stores a sum when
the index changes. If an index is in several strips, `parts`, [strips, 2], holds the partial sum of each
strip: in slot 0 of the index that began in an earlier strip, in slot 1 of the index that continues in the
next. When all programs are through, the partial sums are added up in the order of the strips. So every row is
stored once, and the order of its terms depends only on the entries: every run gets the same bits.

A rank has two halves each of the inbox, G, and the counters arrived [W].
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
    ENDED,
    GRADIENTS,
    PUSHED,
    STATE_JOINED,
    STATE_THROUGH,
    STATE_ZEROED,
    WAITED,
    begin,
    finish,
    half_of,
    peer,
    stamp,
    wait,
    wait_all,
)
from .embedding_entries import ENTRY, FIRST_BLOCK, FIRST_CHUNK, KEY, WORK, Entries, is_scaled
from .embedding_exchange import FP16, FP32, SOURCE, TABLE, clear, count_item
from .embedding_tables import BackwardConfig, Places, Tables, place_aligned
from .embedding_update import RULE, kept, put


@triton.jit
def table_of(work, word: tl.constexpr, item, count, TABLES: tl.constexpr):
    """The table of an item; `word`: the word of WORDS_WORK that has the first item of each table."""
    t = tl.arange(0, TABLES)
    begun = (t < count) & (tl.load(work + t * WORK + word, mask=t < count, other=0) <= item)
    return tl.sum(begun.to(tl.int32), axis=0) - 1


@triton.jit
def columns_of(table):
    return (tl.load(table + 6) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def set_zero(tables, work, item, count, DTYPE: tl.constexpr, ALIGN: tl.constexpr, TABLES: tl.constexpr,
             CHUNK: tl.constexpr):  # fmt: skip
    """Set a chunk of the gradient of a table to 0."""
    nbytes: tl.constexpr = DTYPE.primitive_bitwidth // 8
    t = table_of(work, FIRST_CHUNK, item, count, TABLES)
    gradient = tl.multiple_of(tl.load(tables + t * TABLE).to(tl.pointer_type(DTYPE)), ALIGN * nbytes)
    size = tl.multiple_of(tl.load(tables + t * TABLE + 1) * columns_of(tables + t * TABLE), ALIGN)
    at = (item - tl.load(work + t * WORK + FIRST_CHUNK)) * CHUNK + tl.arange(0, CHUNK)
    tl.store(gradient + at, tl.zeros((CHUNK,), DTYPE), mask=at < size)


@triton.jit
def rows_at(keys, at, mask, lowest):
    """The rows, in their table, of the entries `at`; -1 outside of the mask."""
    return tl.where(mask, tl.load(keys + at, mask=mask, other=0).to(tl.int64) - lowest, -1).to(tl.int32)


@triton.jit
def take(keys, bags, scales, gradient, at, end, lowest, rows, count, stride, c, in_row, SCALED: tl.constexpr):
    """Of the entries `at`: their rows (-1 from `end` on), the gradients of their bags, and the scales."""
    inside = at < end
    index = rows_at(keys, at, inside, lowest)
    bag = tl.load(bags + at, mask=inside, other=0)
    keep = (index >= 0) & (index < rows) & (bag >= 0) & (bag < count)
    row = tl.load(gradient + (bag * stride)[:, None] + c[None, :], mask=keep[:, None] & in_row, other=0.0)
    scale = tl.load(scales + at, mask=keep, other=0.0) if SCALED else 1.0
    return index, row, scale


@triton.jit
def turn(entry, current, opened, rows):
    """Whether an entry begins another row, and whether the sum before it is complete; the current row, and
    whether it began in an earlier strip."""
    index, _, _ = entry
    new = (index >= 0) & (index != current)
    own = new & (opened == 0) & (current >= 0) & (current < rows)
    return new, own, tl.where(new, index, current), opened & (new == 0)


@triton.jit
def add(entry, acc, head, new, opened, SCALED: tl.constexpr):
    """Add one entry of every strip; the sum begins again where the row is another one."""
    _, row, scale = entry
    row = row.to(tl.float32)
    if SCALED:
        row *= scale[:, None]
    head = tl.where((new & opened)[:, None], acc, head)
    return tl.where(new[:, None], row, acc + row), head


@triton.jit
def strips_of(table, work, block, BR: tl.constexpr, STRIP: tl.constexpr):
    """The strips of a block: numbers through all tables, begins and ends, and the table's entries."""
    first = tl.load(work + FIRST_BLOCK).to(tl.int32)
    strip = (block - first) * BR + tl.arange(0, BR)
    entries = tl.load(table + 3).to(tl.int32)
    begin_at = strip * STRIP
    return first * BR + strip, begin_at, tl.minimum(begin_at + STRIP, entries), entries


@triton.jit
def add_strips(
    table, work, rule, block, column, keys, bags, scales, gradient, parts, count, stride, width,
    DTYPE: tl.constexpr, SCALED: tl.constexpr, ALIGN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    STRIP: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """Put the complete sums of a block of strips, columns from `column` on, and partial ones in `parts`."""
    nbytes: tl.constexpr = DTYPE.primitive_bitwidth // 8
    to = tl.multiple_of(tl.load(table).to(tl.pointer_type(DTYPE)), ALIGN * nbytes)
    rows = tl.load(table + 1).to(tl.int32)
    dim = tl.multiple_of(columns_of(table).to(tl.int64), ALIGN)
    lowest = tl.load(work + KEY)
    first_entry = tl.load(work + ENTRY)
    keys += first_entry
    bags += first_entry
    scales += first_entry
    wire: tl.constexpr = gradient.dtype.element_ty.primitive_bitwidth // 8
    gradient = tl.multiple_of(gradient + (tl.load(table + 7) & 0x7FFFFFFF).to(tl.int32), ALIGN * wire)
    c = column + tl.arange(0, BD)
    in_row = (c < dim)[None, :]
    strip, at, end, entries = strips_of(table, work, block, BR, STRIP)
    some = at < end
    current = rows_at(keys, at, some, lowest)
    before = rows_at(keys, at - 1, some & (at > 0), lowest)
    after = rows_at(keys, end, some & (end < entries), lowest)
    begun = some & (before == current)
    opened = begun
    acc = tl.zeros((BR, BD), tl.float32)
    head = tl.zeros((BR, BD), tl.float32)
    for _ in range(0, STRIP, 4):
        # All entries are loaded before the first is added, since loads do not overtake stores.
        e0 = take(keys, bags, scales, gradient, at, end, lowest, rows, count, stride, c, in_row, SCALED)
        e1 = take(keys, bags, scales, gradient, at + 1, end, lowest, rows, count, stride, c, in_row, SCALED)
        e2 = take(keys, bags, scales, gradient, at + 2, end, lowest, rows, count, stride, c, in_row, SCALED)
        e3 = take(keys, bags, scales, gradient, at + 3, end, lowest, rows, count, stride, c, in_row, SCALED)
        new0, done0, row1, opened1 = turn(e0, current, opened, rows)
        new1, done1, row2, opened2 = turn(e1, row1, opened1, rows)
        new2, done2, row3, opened3 = turn(e2, row2, opened2, rows)
        new3, done3, row4, opened4 = turn(e3, row3, opened3, rows)
        k0 = kept(rule, to, current, done0, dim, c, in_row, UPDATE)
        k1 = kept(rule, to, row1, done1, dim, c, in_row, UPDATE)
        k2 = kept(rule, to, row2, done2, dim, c, in_row, UPDATE)
        k3 = kept(rule, to, row3, done3, dim, c, in_row, UPDATE)
        put(acc, k0, rule, to, current, done0, dim, c, in_row, UPDATE)
        acc, head = add(e0, acc, head, new0, opened, SCALED)
        put(acc, k1, rule, to, row1, done1, dim, c, in_row, UPDATE)
        acc, head = add(e1, acc, head, new1, opened1, SCALED)
        put(acc, k2, rule, to, row2, done2, dim, c, in_row, UPDATE)
        acc, head = add(e2, acc, head, new2, opened2, SCALED)
        put(acc, k3, rule, to, row3, done3, dim, c, in_row, UPDATE)
        acc, head = add(e3, acc, head, new3, opened3, SCALED)
        current, opened = row4, opened4
        at += 4
    own = some & (opened == 0)
    goes_on = own & (after == current)
    last = own & (after != current) & (current >= 0) & (current < rows)
    have = kept(rule, to, current, last, dim, c, in_row, UPDATE)
    put(acc, have, rule, to, current, last, dim, c, in_row, UPDATE)
    part = parts + (strip.to(tl.int64) * 2 * width)[:, None] + c[None, :]
    tl.store(part, tl.where(opened[:, None], acc, head), mask=begun[:, None] & in_row)
    tl.store(part + width, acc, mask=goes_on[:, None] & in_row)


@triton.jit
def join_strips(
    table, work, rule, block, column, keys, parts, width,
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STRIP: tl.constexpr,
    UNROLL: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """Put the sums of the indices that begin in these strips and continue in later ones."""
    nbytes: tl.constexpr = DTYPE.primitive_bitwidth // 8
    to = tl.multiple_of(tl.load(table).to(tl.pointer_type(DTYPE)), ALIGN * nbytes)
    rows = tl.load(table + 1).to(tl.int32)
    dim = tl.multiple_of(columns_of(table).to(tl.int64), ALIGN)
    lowest = tl.load(work + KEY)
    keys += tl.load(work + ENTRY)
    strip, at, end, entries = strips_of(table, work, block, BR, STRIP)
    some = (at < end) & (end < entries)
    first = rows_at(keys, at, some, lowest)
    before = rows_at(keys, at - 1, some & (at > 0), lowest)
    current = rows_at(keys, end - 1, some, lowest)
    after = rows_at(keys, end, some, lowest)
    found = some & (after == current) & ((first != current) | (before != current))
    found &= (current >= 0) & (current < rows)
    if tl.max(found.to(tl.int32), axis=0) != 0:
        c = column + tl.arange(0, BD)
        in_row = (c < dim)[None, :]
        part = parts + (strip.to(tl.int64) * 2 * width)[:, None] + c[None, :]
        acc = tl.load(part + width, mask=found[:, None] & in_row, other=0.0)
        more = found
        left = tl.max(found.to(tl.int32), axis=0)
        while left != 0:
            for u in tl.static_range(UNROLL):
                next_at = end + u * STRIP
                more &= rows_at(keys, next_at, more & (next_at < entries), lowest) == current
                part += 2 * width
                acc += tl.load(part, mask=more[:, None] & in_row, other=0.0)
            end += UNROLL * STRIP
            left = tl.max(more.to(tl.int32), axis=0)
        have = kept(rule, to, current, found, dim, c, in_row, UPDATE)
        put(acc, have, rule, to, current, found, dim, c, in_row, UPDATE)


@triton.jit(
    do_not_specialize=[
        "count", "b", "pieces", "col_blocks", "groups", "group_stride", "copies", "stride", "width", "rank",
        "site", "inbox_half", "signals_half",
    ]
)  # fmt: skip
def embedding_backward(
    words, grad, exchanged, inbox, signals, done, keys, bags, scales, parts, state, trace,
    count, b, pieces, col_blocks, groups, group_stride, copies, stride, width, rank, site, inbox_half,
    signals_half,
    PROGRAMS: tl.constexpr, ADDING: tl.constexpr, W: tl.constexpr, PUSH: tl.constexpr, KEEP: tl.constexpr,
    KIND: tl.constexpr, SCALED: tl.constexpr, TABLES: tl.constexpr, ALIGN: tl.constexpr, WRITE: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, CB: tl.constexpr, STRIP: tl.constexpr, CR: tl.constexpr,
    CC: tl.constexpr, CHUNK: tl.constexpr, UPDATE: tl.constexpr, TRACE: tl.constexpr, EVENTS: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, of which the last ADDING add. words: `backward_words`; inbox, signals: int64 [W],
    addresses of the regions of all ranks; done: int32 [W], 0; parts: fp32 [all strips, 2, width].

    pieces: of CR x CC elements, for one rank, col_blocks side by side; copies: chunks of CHUNK elements of G;
    stride: C divided by ALIGN; width: the widest table divided by ALIGN; group_stride: that of `Places`
    divided by WRITE; BR: strips of a block, of STRIP entries each; CB: blocks of BD columns.
    KEEP: `exchanged` becomes G. Without PUSH `exchanged` is G, and nothing is exchanged. UPDATE:
    `Tables.update`.
    """
    program = tl.program_id(0)
    WIRE: tl.constexpr = grad.dtype.element_ty
    DTYPE: tl.constexpr = tl.float32 if KIND == FP32 else (tl.float16 if KIND == FP16 else tl.bfloat16)
    epoch = begin(state)
    tables = words + W * SOURCE
    work = tables + count * TABLE
    rules = work + (count + 1) * WORK
    stride *= ALIGN
    width *= ALIGN
    first_signal = half_of(epoch) * signals_half
    event = 0
    event = stamp(trace, program, event, BEGUN, rank, 0, TRACE, EVENTS)
    if PUSH:
        first = half_of(epoch) * inbox_half
        pushed = tl.full((), -1, tl.int32)
        for item in range(program, W * pieces, PROGRAMS):
            step = item // pieces
            dest = (rank + 1 + step) % W
            source = words + dest * SOURCE
            base = tl.multiple_of(tl.load(source).to(tl.int32), WRITE)
            cols = tl.multiple_of(tl.load(source + 1).to(tl.int32), WRITE)
            between = tl.multiple_of(tl.load(source + 2).to(tl.int32), WRITE)
            row = item % pieces // col_blocks * CR + tl.arange(0, CR)
            col = item % pieces % col_blocks * CC + tl.arange(0, CC)
            group, bag = row // b, row % b
            mask = (row < groups * b)[:, None] & (col < cols)[None, :]
            starts = base + group * (group_stride * WRITE) + bag * between
            values = tl.load(grad + tl.multiple_of(starts, [WRITE])[:, None] + col[None, :], mask=mask)
            if pushed >= 0:
                count_item(done, signals, pushed, 1, pieces, pieces, 1, rank, first_signal, W)
            to = tl.multiple_of(peer(inbox, dest, WIRE) + first, 16)
            starts = ((rank * b + bag) * groups + group) * cols
            tl.store(to + tl.multiple_of(starts, [WRITE])[:, None] + col[None, :], values, mask=mask)
            pushed = step
            event = stamp(trace, program, event, PUSHED, dest, item % pieces, TRACE, EVENTS)
        if pushed >= 0:
            count_item(done, signals, pushed, 1, pieces, pieces, 1, rank, first_signal, W)
    if UPDATE == 0:
        chunks = tl.load(work + count * WORK + FIRST_CHUNK).to(tl.int32)
        for item in range(program, chunks, PROGRAMS):
            set_zero(tables, work, item, count, DTYPE, ALIGN, TABLES, CHUNK)
        tl.debug_barrier()
        tl.atomic_add(state + STATE_ZEROED, 1, sem="release", scope="gpu")
    turn = PROGRAMS - 1 - program
    if turn < ADDING:
        code = site * CODES_PER_SITE + GRADIENTS
        zeroed = (state + STATE_ZEROED).to(tl.pointer_type(tl.int32))
        joined = (state + STATE_JOINED).to(tl.pointer_type(tl.int32))
        if UPDATE == 0:
            wait(zeroed, PROGRAMS, state, code, rank, 0, epoch)
        if PUSH:
            arrived = peer(signals, rank, tl.int32) + first_signal
            wait_all(arrived, 1, W, 1, state, code, 0, 0, epoch)
            gradient = tl.multiple_of(peer(inbox, rank, WIRE) + first, 16)
        else:
            gradient = exchanged
        event = stamp(trace, program, event, WAITED, -1, 0, TRACE, EVENTS)
        blocks = tl.load(work + count * WORK + FIRST_BLOCK).to(tl.int32)
        for item in range(turn, blocks * CB, ADDING):
            t = table_of(work, FIRST_BLOCK, item // CB, count, TABLES)
            if item % CB * BD < columns_of(tables + t * TABLE):
                add_strips(
                    tables + t * TABLE, work + t * WORK, rules + t * RULE, item // CB, item % CB * BD, keys,
                    bags, scales, gradient, parts, W * b, stride, width, DTYPE, SCALED, ALIGN, BR, BD, STRIP,
                    UPDATE,
                )  # fmt: skip
            event = stamp(trace, program, event, COMPUTED, rank, item, TRACE, EVENTS)
        tl.debug_barrier()
        tl.atomic_add(state + STATE_JOINED, 1, sem="release", scope="gpu")
        if KEEP:
            for item in range(turn, copies, ADDING):
                at = item * CHUNK + tl.arange(0, CHUNK)
                inside = at < W * b * stride
                tl.store(exchanged + at, tl.load(gradient + at, mask=inside), mask=inside)
        wait(joined, ADDING, state, code, rank, 1, epoch)
        for item in range(turn, blocks * CB, ADDING):
            t = table_of(work, FIRST_BLOCK, item // CB, count, TABLES)
            if item % CB * BD < columns_of(tables + t * TABLE):
                join_strips(
                    tables + t * TABLE, work + t * WORK, rules + t * RULE, item // CB, item % CB * BD, keys,
                    parts, width, DTYPE, ALIGN, BR, BD, STRIP, 4, UPDATE,
                )  # fmt: skip
    event = stamp(trace, program, event, ENDED, rank, 0, TRACE, EVENTS)
    if PUSH:
        tl.debug_barrier()
        if tl.atomic_add(state + STATE_THROUGH, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
            clear(peer(signals, rank, tl.int32) + first_signal, W, 32)
        finish(state, epoch, PROGRAMS)
    else:
        finish(state, epoch, PROGRAMS, False)  # no rank was waited for: the epoch stays


def launch_embedding_backward(
    memory: PeerMemory,
    words: Tensor,
    tables: Tables,
    places: Places,
    entries: Entries,
    grad: Tensor | None,
    exchanged: Tensor | None,
    config: BackwardConfig,
    site: int = 0,
    trace: Tensor | None = None,
    compile_only: bool = False,
) -> None:
    """Exchange `grad`, and add up the gradients of the tables, `tables.weights`, or update the tables; all
    are contiguous.

    words: int64, on the device, `backward_words`; entries: `sorted_entries`; exchanged: [B, C], set to G, or
    None. Without grad `exchanged` is G, and nothing is exchanged. memory.programs: multiprocessors.
    """
    world, rank, dims, b = memory.world, memory.rank, tables.dims, places.b
    wire = grad if grad is not None else exchanged
    assert wire is not None
    bd, br = config.width(tables), config.strips(tables)
    widest = max(cols for _, cols, _ in places.sources)
    cc = min(4 * config.tile, triton.next_power_of_2(max(16, widest)))
    cr = 4 * config.tile // cc
    col_blocks = max(1, cdiv(widest, cc))
    # At most as many as are stored at once: else sums move between threads before every store.
    align, width = min(tables.aligned(), 16 // tables.weights[0].element_size()), max(dims)
    parts = torch.empty(2 * br * sum(config.blocks(tables)) * width, dtype=torch.float32, device=wire.device)
    programs = memory.programs * config.per_sm
    write = place_aligned(places, dims, wire.data_ptr() // wire.element_size())
    launch(
        embedding_backward, programs, compile_only,
        words, wire, wire if exchanged is None else exchanged, memory.inbox.addresses,
        memory.signals.addresses, memory.done, entries.keys, entries.bags, entries.scales, parts,
        memory.state, memory.state if trace is None else trace,
        len(dims), b, cdiv(places.groups * b, cr) * col_blocks, col_blocks, places.groups,
        places.group_stride // write, cdiv(world * b * places.stride, config.chunk), places.stride // align,
        width // align, rank, site, memory.inbox.half(wire.dtype), memory.signals.half(torch.int32),
        PROGRAMS=programs, ADDING=config.adding or programs, W=world, PUSH=grad is not None,
        KEEP=grad is not None and exchanged is not None, KIND=tables.kinds(), SCALED=is_scaled(tables),
        TABLES=triton.next_power_of_2(len(dims)), ALIGN=align, WRITE=write, BR=br, BD=bd,
        CB=cdiv(max(1, *dims), bd), STRIP=config.strip, CR=cr, CC=cc, CHUNK=config.chunk,
        UPDATE=tables.update, TRACE=trace is not None, EVENTS=EVENTS,
        num_warps=config.warps, num_stages=1, maxnreg=config.registers,
    )  # fmt: skip
