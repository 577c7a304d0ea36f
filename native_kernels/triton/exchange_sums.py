"""Sums over the ranks of a matrix that is in ordinary memory: cuBLAS multiplies, this kernel exchanges.

    Y = sum over ranks of P, fp32, in rank order, rounded once

The elements are cut into items, and the items into chunks, one an owner; with ONCE every rank owns all items.
A slice is some items that one signal covers.

A. A program stores items of its P in the inbox of their owner, with ONCE in the inbox of every peer. The
   program that counts the last item of a slice signals.
B. Programs draw tickets in the order of the own items. A program waits for the slice from all ranks, adds,
   and stores the sum in the output. For an all_reduce that is not ONCE it also stores the sum in `finished`
   of all peers, and the program that counts the last item of the slice signals all peers.
C. Later tickets are for slices of the peers' chunks. A program waits for the slice and copies its items to
   the output.

Part A needs no wait. Part B waits for part A of the peers, and part C for part B of the peers. Between two
ranks ONCE sends as many bytes as the other form, in one exchange instead of two.

A rank has two halves each of the inbox [W, items, length], `finished` likewise, and of the counters
[2 * W, slices]: parts, then sums, by their source.
"""

from dataclasses import dataclass

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
from .dependent import grid_wait
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

UNIT = tl.constexpr(8)
"""Elements that are loaded and stored together: 16 bytes."""


@dataclass(frozen=True)
class SumsConfig:
    """once: every rank adds up everything; length: elements of an item; slice_items: items of a slice."""

    once: bool = False
    length: int = 2048
    slice_items: int = 16
    warps: int = 4
    per_sm: int = 4

    @property
    def registers(self) -> int:
        """Of a thread, such that all programs fit."""
        return min(255, 65536 // (32 * self.warps * self.per_sm) // 8 * 8)

    def items(self, elements: int, world: int, all_ranks: bool) -> int:
        """Of a chunk."""
        if not all_ranks:
            return cdiv(elements // world, self.length)
        return cdiv(elements, self.length * (1 if self.once else world))

    def slices(self, items: int) -> int:
        """Of a chunk."""
        return cdiv(items, self.slice_items)


def sums_needs(elements: int, itemsize: int, world: int, all_ranks: bool, config: SumsConfig) -> Need:
    """The memory of a call on a matrix of so many elements."""
    items = config.items(elements, world, all_ranks)
    slices, region = config.slices(items), 2 * world * items * config.length * itemsize
    return Need(
        inbox=region,
        finished=region if all_ranks and not config.once else 0,
        signals=2 * 4 * 2 * world * slices,
        done=world * slices,
    )


@triton.jit
def slot(region, half, source, item, items, length, DTYPE: tl.constexpr):
    """The place of an item of `source` in the memory of a rank."""
    at = (source * items + item).to(tl.int64) * length
    return tl.multiple_of(region.to(tl.pointer_type(DTYPE)), 16) + half + at


@triton.jit
def place(first, item, chunk, elements, LENGTH: tl.constexpr):
    """Where an item of a chunk begins, in elements, and which of its elements exist. Units count `first`,
    where the chunk begins, `chunk`, its length, and `elements`, that of the matrix."""
    skipped = item * (LENGTH // UNIT)
    begun = first + skipped
    count = tl.minimum(chunk - skipped, elements - begun) * UNIT
    return begun * UNIT, tl.arange(0, LENGTH) < count


@triton.jit
def sum_up(
    product, out, inbox, finished, signals, summed, state,
    elements, chunk, items, slice_items, slices, rank, site, half, summed_half, first_signal, epoch,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, ALL: tl.constexpr, ONCE: tl.constexpr,
    MEAN: tl.constexpr, LENGTH: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Parts B and C, and the end of the call.

    product: the own part, [elements]; STORED: it lies in the own inbox like those of peers, and is signalled;
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
            wait_all(arrived + piece, slices, W if STORED else rank, 1, state, code, 0, piece, epoch)
            if not STORED:
                others = W - 1 - rank
                wait_all(
                    arrived + (rank + 1) * slices + piece, slices, others, 1, state, code, rank + 1, piece,
                    epoch,
                )  # fmt: skip
            known = piece
        begun, inside = place(mine, item, chunk, elements, LENGTH)
        total = tl.zeros((LENGTH,), tl.float32)
        for r in tl.static_range(W):
            theirs = slot(own, half, r, item, items, LENGTH, dtype)
            if not STORED:
                theirs = tl.where(r == rank, product + begun, theirs)
            part = tl.load(theirs + lane, mask=inside, other=0.0)
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
        "elements", "chunk", "items", "slice_items", "slices", "rank", "site", "inbox_half",
        "finished_half", "signals_half",
    ]
)  # fmt: skip
def exchange_sums(
    product, out, inbox, finished, signals, done, state,
    elements, chunk, items, slice_items, slices, rank, site, inbox_half, finished_half, signals_half,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, ALL: tl.constexpr, ONCE: tl.constexpr,
    MEAN: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor.

    product: [elements]; chunk: elements of an owner; items: of a chunk; out: [elements], without ALL the own
    chunk; inbox, finished, signals: int64 [W], addresses of those of all ranks. elements, chunk, inbox_half
    and finished_half count in units.
    """
    dtype: tl.constexpr = product.dtype.element_ty
    program = tl.program_id(0)
    grid_wait()
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    half = half_of(epoch) * tl.cast(inbox_half, tl.int64) * UNIT
    summed_half = half_of(epoch) * tl.cast(finished_half, tl.int64) * UNIT
    first_signal = half_of(epoch) * signals_half
    first_part = first_signal + rank * slices
    lane = tl.arange(0, LENGTH)
    share = first_share(asked, state, A, PROGRAMS, program, PROGRAMS)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, begin(state))
        counted = tl.full((), -1, tl.int32)
        for unit in range(share, items if ONCE else (W - 1) * items, PROGRAMS):
            step, item = unit // items, unit % items
            owner = (rank + 1 + step) % W
            begun, inside = place((0 if ONCE else owner) * chunk, item, chunk, elements, LENGTH)
            values = tl.load(product + begun + lane, mask=inside)
            # The stores of the item before have arrived by now, so that counting it does not wait.
            if counted >= 0:
                if ONCE:
                    count_for_all(done, signals, counted, items, slice_items, rank, first_part, W)
                else:
                    count_item(done, signals, counted, items, slice_items, slices, rank, first_signal, W)
            if ONCE:
                for p in tl.static_range(1, W):
                    there = tl.load(inbox + (rank + p) % W)
                    tl.store(slot(there, half, rank, item, items, LENGTH, dtype) + lane, values, mask=inside)
                counted = item
            else:
                there = tl.load(inbox + owner)
                tl.store(slot(there, half, rank, item, items, LENGTH, dtype) + lane, values, mask=inside)
                counted = step * slices + item // slice_items
        if counted >= 0:
            if ONCE:
                count_for_all(done, signals, counted, items, slice_items, rank, first_part, W)
            else:
                count_item(done, signals, counted, items, slice_items, slices, rank, first_signal, W)
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, PROGRAMS, program)
    sum_up(
        product, out, inbox, finished, signals, done + (W - 1) * slices, state,
        elements, chunk, items, slice_items, slices, rank, site, half, summed_half, first_signal, epoch,
        PROGRAMS, PER_SM, W, ALL, ONCE, MEAN, LENGTH, False,
    )  # fmt: skip


def launch_exchange_sums(
    memory: PeerMemory,
    product: Tensor,
    out: Tensor,
    mean: bool,
    all_ranks: bool,
    config: SumsConfig,
    site: int = 0,
    compile_only: bool = False,
) -> None:
    """`out = sum (mean) over ranks of product`: all of it, or this rank's chunk of equally many elements.

    product, out: contiguous, of one dtype of 16 or 32 bits; they and the chunks begin and end at multiples of
    16 bytes. memory: at least what `sums_needs` says. Every rank of the group makes the same calls.
    """
    world, elements, dtype, unit = memory.world, product.numel(), product.dtype, UNIT.value
    items, programs = config.items(elements, world, all_ranks), memory.programs * config.per_sm
    if not all_ranks:
        chunk = elements // world
    else:
        chunk = elements if config.once else items * config.length
    launch(
        exchange_sums, programs, compile_only,
        product, out, memory.inbox.addresses, memory.finished.addresses, memory.signals.addresses,
        memory.done, memory.state,
        elements // unit, chunk // unit, items, config.slice_items, config.slices(items), memory.rank, site,
        memory.inbox.half(dtype) // unit, memory.finished.half(dtype) // unit,
        memory.signals.half(torch.int32),
        PROGRAMS=programs, PER_SM=config.per_sm, W=world, ALL=all_ranks, ONCE=config.once,
        MEAN=mean, LENGTH=config.length, num_warps=config.warps, num_stages=1, maxnreg=config.registers,
    )  # fmt: skip
