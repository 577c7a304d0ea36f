"""Strips of entries, along which `embedding_backward` adds up rows, and sums that several strips share."""

import triton
import triton.language as tl

from .embedding_entries import ENTRY, FIRST_BLOCK, KEY
from .embedding_update import kept, put


@triton.jit
def columns_of(table):
    return (tl.load(table + 6) & 0x7FFFFFFF).to(tl.int32)


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
