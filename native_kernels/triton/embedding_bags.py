"""Bags as `embedding_exchange` reads them, and the search for bags and indices that are invalid."""

import triton
import triton.language as tl

from .comm import BAD_BAG, BAD_INDEX, BAD_INPUT, CODES_PER_SITE, STATE_RECORD
from .embedding_tables import WORDS_TABLE

TABLE = tl.constexpr(WORDS_TABLE)


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
def item_at(item, per_step, count, W: tl.constexpr, CB: tl.constexpr, MIXED: tl.constexpr):
    """Of an item: its rank, in steps from the next one; its block of bags, table and columns; its number."""
    step = item % W if MIXED else item // per_step
    within = item // W if MIXED else item % per_step
    return step, within // (CB * count), within // CB % count, within % CB, within


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
