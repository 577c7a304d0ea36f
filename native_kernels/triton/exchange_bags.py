"""Sums over the ranks of pooled rows: each rank has some rows of every table, and pools those.

    Y = sum over ranks of P, fp32, in rank order, rounded once;  P: [bags, columns], this rank's pooled rows

The bags are cut into chunks, one an owner; with ONCE every rank owns all bags. A slice is some bags that one
signal covers.

A. An item is up to BB bags of one table. A program pools it, rounds it to the exchanged dtype, and stores it
   in the inbox of the owner of these bags, its own too, with ONCE in that of every rank. The program that
   counts the last item of a slice signals. Owners come from the next rank on, this rank last.

In `sum_up` an item is LENGTH elements, and a slice as many as its bags have:

B. Programs draw tickets in the order of the own items. A program waits for the slice from all ranks, adds,
   and stores the sum in the output. For an all_reduce that is not ONCE it also stores the sum in `finished`
   of all peers, and the program that counts the last item of the slice signals all peers.
C. Later tickets are for items of the peers' chunks. A program waits for the slice and copies an item to the
   output.

Part A needs no wait. Part B waits for part A of the peers, and part C for part B of the peers.

A rank has two halves each of the inbox [W, items, LENGTH], `finished` likewise, and of the counters
[2 * W, slices]: parts, then sums, by their source.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import Need, PeerMemory, cdiv, launch

from .comm import (
    CODES_PER_SITE,
    COPYING,
    REDUCING,
    STATE_TICKETS,
    begin,
    draw,
    drawn,
    half_of,
    is_last,
    peer,
    wait_all,
)
from .embedding_bags import TABLE, bags_of, find_faults, item_at, report_faults
from .embedding_exchange import pool_any
from .embedding_tables import MOST_BAGS, Places, Tables, Tiles, place_aligned
from .exchange_sums import UNIT, place
from .inboxes import slot
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
from .slices import clear, count_for_all, count_item

FEW_RANKS = tl.constexpr(4)
"""A program reads the parts of an item of so many ranks at once."""
HELD = tl.constexpr(32)
"""Of more ranks, a thread reads so many elements at once: those of 8 ranks would not fit in its registers."""


class Cut(NamedTuple):
    """How bags are cut, alike on all ranks. chunk, slice_bags: bags; items: of a chunk, of `tile` elements;
    slice_items: items of a slice; slices: of a chunk."""

    chunk: int
    slice_bags: int
    items: int
    slice_items: int
    slices: int


@dataclass(frozen=True)
class BagSumsConfig(Tiles):
    """once: every rank adds up everything; tile: elements that a program pools, or adds up, at once, a power
    of two; unroll: rows of a bag that it reads at once; per_sm: programs of a multiprocessor; slice_kib: KiB
    that one signal covers, about."""

    once: bool = False
    tile: int = 1024
    unroll: int = 4
    warps: int = 4
    per_sm: int = 8
    slice_kib: int = 64

    def cut(self, bags: int, columns: int, itemsize: int, world: int) -> Cut:
        chunk = bags if self.once else cdiv(bags, world)
        # A slice is a multiple of an item, so that all ranks have equally many items in a slice. It is also
        # a multiple of MOST_BAGS: ranks with other tables may pool other numbers of bags at once.
        least = math.lcm(MOST_BAGS, self.tile // math.gcd(self.tile, columns))
        slice_bags = max(1, self.slice_kib * 1024 // (columns * itemsize * least)) * least
        items, slice_items = cdiv(chunk * columns, self.tile), slice_bags * columns // self.tile
        return Cut(chunk, slice_bags, items, slice_items, cdiv(chunk, slice_bags))


def bag_sums_needs(
    bags: int, columns: int, itemsize: int, world: int, all_ranks: bool, config: BagSumsConfig
) -> Need:
    """The memory of a call on so many bags, of so many columns of all tables."""
    cut = config.cut(bags, columns, itemsize, world)
    region = 2 * world * cut.items * config.tile * itemsize
    return Need(
        inbox=region,
        finished=region if all_ranks and not config.once else 0,
        signals=2 * 4 * 2 * world * cut.slices,
        done=(world + 1) * cut.slices,
    )


@triton.jit
def sum_up(
    out, inbox, finished, signals, summed, state,
    elements, chunk, items, slice_items, slices, rank, site, half, summed_half, first_signal, epoch,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, ALL: tl.constexpr, ONCE: tl.constexpr,
    MEAN: tl.constexpr, LENGTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Parts B and C, and the end of the call.

    The own part lies in the own inbox like those of peers, and is signalled. elements, chunk: in units;
    summed: counters of the items of each slice whose sums peers have; half, summed_half: elements before this
    call's half of the inbox and of `finished`; first_signal: the first counter of its half.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    TWICE: tl.constexpr = ALL and not ONCE
    lane = tl.arange(0, LENGTH)
    units = tl.cast(items * (W if TWICE else 1), tl.int32)
    unit = units
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        unit = drawn(draw(state + STATE_TICKETS))
    arrived = peer(signals, rank, tl.int32) + first_signal
    own = tl.load(inbox + rank)
    code = site * CODES_PER_SITE + REDUCING
    known, counted = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
    mine = (0 if ONCE else rank) * chunk
    first_sum = first_signal + (W + rank) * slices
    while unit < items:
        item = unit
        ticket = draw(state + STATE_TICKETS)
        piece = item // slice_items
        if piece != known:
            wait_all(arrived + piece, slices, W, 1, state, code, 0, piece, epoch)
            known = piece
        begun, inside = place(mine, item, chunk, elements, LENGTH)
        total = tl.zeros((LENGTH,), tl.float32)
        if W <= FEW_RANKS:
            for r in tl.static_range(W):
                theirs = slot(own, half, r, item, items, LENGTH, dtype)
                part = tl.load(theirs + lane, mask=inside, other=0.0)
                total += part.to(tl.float32)
        else:
            ranks: tl.constexpr = HELD * LANES // LENGTH
            for first in range(0, W, ranks):
                for i in tl.static_range(ranks):
                    theirs = slot(own, half, first + i, item, items, LENGTH, dtype)
                    part = tl.load(theirs + lane, mask=inside & (first + i < W), other=0.0)
                    total += part.to(tl.float32)
        if MEAN:
            total /= W
        value = total.to(dtype)
        tl.store(out + (begun if ALL else item * LENGTH) + lane, value, mask=inside)
        if TWICE:
            if counted >= 0:
                count_for_all(summed, signals, counted, items, slice_items, rank, first_sum, W)
            for p in tl.static_range(1, W):
                there = tl.load(finished + (rank + p) % W)
                to = slot(there, summed_half, rank, item, items, LENGTH, dtype)
                tl.store(to + lane, value, mask=inside)
            counted = item
        unit = drawn(ticket)
    if TWICE:
        if counted >= 0:  # before it waits for what peers send after they have this
            count_for_all(summed, signals, counted, items, slice_items, rank, first_sum, W)
        own = tl.load(finished + rank)
        code = site * CODES_PER_SITE + COPYING
        while unit < units:
            item = (unit - items) // (W - 1)
            source = (rank + 1 + (unit - items) % (W - 1)) % W
            ticket = draw(state + STATE_TICKETS)
            piece = item // slice_items
            wait_all(arrived + (W + source) * slices + piece, 0, 1, 1, state, code, source, piece, epoch)
            begun, inside = place(source * chunk, item, chunk, elements, LENGTH)
            value = tl.load(slot(own, summed_half, source, item, items, LENGTH, dtype) + lane, mask=inside)
            tl.store(out + begun + lane, value, mask=inside)
            unit = drawn(ticket)
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        clear(peer(signals, rank, tl.int32) + first_signal, 2 * W * slices, 256)
        end_shares(state, epoch, PROGRAMS)


@triton.jit(
    do_not_specialize=[
        "count", "bags", "chunk", "columns", "blocks", "slice_blocks", "items", "slice_items", "slices",
        "padding", "rank", "site", "inbox_half", "finished_half", "signals_half",
    ]
)  # fmt: skip
def exchange_bags(
    words, out, inbox, finished, signals, done, state,
    count, bags, chunk, columns, blocks, slice_blocks, items, slice_items, slices, padding, rank, site,
    inbox_half, finished_half, signals_half,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, ALL: tl.constexpr, ONCE: tl.constexpr,
    MEAN: tl.constexpr, KINDS: tl.constexpr, WIDE: tl.constexpr, MODE: tl.constexpr, WEIGHTED: tl.constexpr,
    LAST: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr,
    CB: tl.constexpr, UNROLL: tl.constexpr, LENGTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor.

    words: `Tables.words` without sources; out: [bags, columns], without ALL the own chunk; inbox, finished,
    signals: int64 [W], addresses of those of all ranks; done: int32 [(W + 1) * slices], 0; count: tables;
    chunk: bags of an owner; blocks: of BB bags, of a chunk; slice_blocks: blocks of a slice; CB: blocks of
    BD columns of a table. columns, inbox_half and finished_half count in units.
    """
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    WIRE: tl.constexpr = out.dtype.element_ty
    nbytes: tl.constexpr = WIRE.primitive_bitwidth // 8
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    first_signal = half_of(begin(state)) * signals_half
    per_owner, per_slice = blocks * count * CB, slice_blocks * count * CB
    faults = tl.full((), 0, tl.int32)
    share = first_share(asked, state, A, PROGRAMS, program, PROGRAMS)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, begin(state))
        counted = tl.full((), -1, tl.int32)
        for unit in range(share, per_owner * (1 if ONCE else W), PROGRAMS):
            step, block, t, strip, _ = item_at(unit, per_owner, count, W, CB, False)
            owner = (rank + 1 + step) % W
            first = (0 if ONCE else owner) * chunk
            b = tl.maximum(tl.minimum(chunk, bags - first), 0)
            table = words + t * TABLE
            begin_at, end_at, bad, inside = bags_of(table, first, block, b, bags, INDEX, LAST, BB)
            if (strip == 0) & (block * BB < b):
                wrong = tl.full((LANES,), 0, tl.int32) + tl.max(bad.to(tl.int32), axis=0)
                wrong = find_faults(table, first, block, b, bags, wrong, INDEX, LAST, BB)
                faults |= tl.max(wrong, axis=0)
            pooled = pool_any(
                table, begin_at, end_at, tl.max(end_at - begin_at, axis=0).to(tl.int32), strip * BD, padding,
                KINDS, INDEX, MODE, WEIGHTED, READ, BB, BD, UNROLL,
            ).to(WIRE)  # fmt: skip
            # The stores of the item before have arrived by now, so that counting it does not wait.
            if counted >= 0:
                count_pooled(
                    done, signals, counted, per_owner, per_slice, slices, rank, first_signal, W, ONCE
                )
            dim = tl.multiple_of((tl.load(table + 6) & 0x7FFFFFFF).to(tl.int32), WRITE)
            at = tl.multiple_of((tl.load(table + 7) & 0x7FFFFFFF).to(tl.int32), WRITE)
            column = strip * BD + tl.arange(0, BD)
            rows = at + (block * BB + tl.arange(0, BB)) * (columns * UNIT)
            mask = inside[:, None] & (column < dim)[None, :]
            half = half_of(begin(state)) * tl.cast(inbox_half, tl.int64) * UNIT
            begun = half + (rank * items).to(tl.int64) * LENGTH
            for p in tl.static_range(W if ONCE else 1):
                there = tl.load(inbox + (owner + p) % W) + begun * nbytes
                there = tl.multiple_of(there.to(tl.pointer_type(WIRE)), WRITE * nbytes)
                tl.store(there + rows[:, None] + column[None, :], pooled, mask=mask)
            counted = unit if ONCE else step * slices + block // slice_blocks
        if counted >= 0:
            count_pooled(done, signals, counted, per_owner, per_slice, slices, rank, first_signal, W, ONCE)
        if faults != 0:  # one of all bags is told
            every = tl.cdiv(bags, BB) * count
            report_faults(
                words, state, site, 0, bags, count, 0, every, every, 1, 1, INDEX, LAST, BB, 1, False
            )
            faults = tl.full((), 0, tl.int32)
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, PROGRAMS, program)
    epoch = begin(state)  # again: registers are short while rows are pooled
    half = half_of(epoch) * tl.cast(inbox_half, tl.int64) * UNIT
    summed_half = half_of(epoch) * tl.cast(finished_half, tl.int64) * UNIT
    sum_up(
        out, inbox, finished, signals, done + W * slices, state,
        bags * columns, chunk * columns, items, slice_items, slices, rank, site, half, summed_half,
        half_of(epoch) * signals_half, epoch,
        PROGRAMS, PER_SM, W, ALL, ONCE, MEAN, LENGTH, LANES,
    )  # fmt: skip


@triton.jit
def count_pooled(
    done, signals, counted, items, slice_items, slices, rank, first_signal, W: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """Count an item that is stored: its number with ONCE, else its slice, as `count_item` has it. Its owners,
    of which this rank may be one, are signalled."""
    if ONCE:
        count_for_all(done, signals, counted, items, slice_items, -1, first_signal + rank * slices, W)
    else:
        count_item(done, signals, counted, items, slice_items, slices, rank, first_signal, W)


def launch_exchange_bags(
    memory: PeerMemory,
    words: Tensor,
    tables: Tables,
    places: Places,
    out: Tensor,
    mean: bool,
    all_ranks: bool,
    config: BagSumsConfig,
    site: int = 0,
    compile_only: bool = False,
) -> None:
    """`out = sum (mean) over ranks of the pooled rows of all bags`: all of it, or this rank's chunk.

    words: int64, on the device, `tables.words(places)`; places: of all bags, without sources;
    out: contiguous, of rows of a multiple of 8 elements, and of the dtype that is exchanged. Every rank of
    the group makes the same calls, on as many bags and columns. memory.programs: multiprocessors.
    """
    world, dims, dtype = memory.world, tables.dims, out.dtype
    bags, columns = places.b, places.stride
    cut = config.cut(bags, columns, dtype.itemsize, world)
    bd = config.columns(dims)
    bb = min(MOST_BAGS, config.tile // bd)
    programs, unit = memory.programs * config.per_sm, UNIT.value
    launch(
        exchange_bags, programs, compile_only,
        words, out, memory.inbox.addresses, memory.finished.addresses, memory.signals.addresses,
        memory.done, memory.state,
        len(dims), bags, cut.chunk, columns // unit, cdiv(cut.chunk, bb), cut.slice_bags // bb, cut.items,
        cut.slice_items, cut.slices, tables.padding, memory.rank, site, memory.inbox.half(dtype) // unit,
        memory.finished.half(dtype) // unit, memory.signals.half(torch.int32),
        PROGRAMS=programs, PER_SM=config.per_sm, W=world, ALL=all_ranks, ONCE=config.once, MEAN=mean,
        KINDS=tables.kinds(), WIDE=tables.indices[0].dtype == torch.int64, MODE=tables.mode,
        WEIGHTED=bool(tables.samples), LAST=int(tables.last), READ=tables.aligned(),
        WRITE=place_aligned(places, dims, 0), BB=bb, BD=bd, CB=cdiv(max(1, *dims), bd), UNROLL=config.unroll,
        LENGTH=config.tile, LANES=32 * config.warps,
        num_warps=config.warps, num_stages=1, maxnreg=config.registers,
    )  # fmt: skip
