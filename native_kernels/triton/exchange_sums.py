"""Sums over the ranks of a matrix that is in ordinary memory: cuBLAS multiplies, this kernel exchanges.

    Y = sum over ranks of P, fp32, in rank order, rounded once

The elements are cut into items, and the items into chunks, one an owner; with ONCE every rank owns all items.
What travels are words (`words.py`), so there is no signal.

A. A program sends items of its P to their owner, with ONCE to every peer.
B. Programs draw tickets in the order of the own items. A program takes the words of an item from all ranks,
   adds, and stores the sum in the output. For an all_reduce that is not ONCE it also sends the sum to all
   peers.
C. Later tickets are for items of the peers' chunks. A program takes the words of an item, and stores them in
   the output.

    a program     A   A   A, B   A   A, B   A, B   B   B   C   C

Part A needs no wait. Part B waits for part A of the peers, and part C for part B of the peers. Between two
items of A a program looks for the words of its ticket, and takes them if the first ones are there: links and
memory work at the same time. Between two ranks ONCE sends as many bytes as the other form, in one exchange
instead of two. The first UNIT elements of an
item are sent even if it is empty, so that every rank hears from every other one in each call.

A rank has two halves of words. A half begins with two regions [W, items, length]: parts, then sums, by their
source.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import Need, PeerMemory, cdiv, launch

from .by_turns import firm_program, first_ticket, first_unit, next_share
from .comm import CODES_PER_SITE, COPYING, REDUCING, STATE_TICKETS, begin, draw, drawn, half_of, is_last
from .dependent import grid_wait
from .patience import any_thread
from .shares import A, announce, claim, end_shares, start
from .words import LINE, LONGER_NS, place_of_words, take, take_sum, value_of, word_of

UNIT = tl.constexpr(8)
"""Elements that are loaded and stored together: 16 bytes."""


@dataclass(frozen=True)
class SumsConfig:
    """once: every rank adds up everything; length: elements of an item."""

    once: bool = False
    length: int = 2048
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

    def chunk(self, elements: int, world: int, all_ranks: bool) -> int:
        """Elements of an owner."""
        if not all_ranks:
            return elements // world
        return elements if self.once else self.items(elements, world, all_ranks) * self.length


def sums_needs(elements: int, itemsize: int, world: int, all_ranks: bool, config: SumsConfig) -> Need:
    """The memory of a call on a matrix of so many elements."""
    items = config.items(elements, world, all_ranks)
    regions = 2 if all_ranks and not config.once else 1
    return Need(words=2 * regions * world * items * config.length * itemsize)


@triton.jit
def slot(inboxes, owner, begun, source, item, items, LENGTH: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers to the words of an item of `source`, in memory of `owner`. begun: bytes before the region."""
    to = place_of_words(tl.load(inboxes + owner), begun, DTYPE)
    return to + (source * items + item).to(tl.int64) * LENGTH + tl.arange(0, LENGTH)


@triton.jit
def sent_of(inside, LENGTH: tl.constexpr):
    """The elements of an item that are sent: those that exist, `inside`, and the first UNIT ones in any
    case."""
    return inside | (tl.arange(0, LENGTH) < UNIT)


@triton.jit
def place(first, item, chunk, elements, LENGTH: tl.constexpr):
    """Where an item of a chunk begins, in elements, and which of its elements exist. Units count `first`,
    where the chunk begins, `chunk`, its length, and `elements`, that of the matrix."""
    skipped = item * (LENGTH // UNIT)
    begun = first + skipped
    count = tl.minimum(chunk - skipped, elements - begun) * UNIT
    return begun * UNIT, tl.arange(0, LENGTH) < count


@triton.jit
def is_there(
    ticket, units, inboxes, half, items, rank, W: tl.constexpr, LENGTH: tl.constexpr, DTYPE: tl.constexpr,
    STORED: tl.constexpr,
):  # fmt: skip
    """Whether the first words of what a ticket takes are there; threads may see different values. Not so
    behind the last ticket."""
    SOURCES: tl.constexpr = 2 if W <= 2 else (4 if W <= 4 else 8)
    source = tl.arange(0, SOURCES)
    is_sum, copy = ticket < items, tl.maximum(ticket - items, 0)
    item = tl.where(is_sum, ticket, copy // (W - 1))
    of_sum = (source < W) & (STORED | (source != rank))
    wanted = (is_sum & of_sum) | ((is_sum == 0) & (source == (rank + 1 + copy % (W - 1)) % W))
    begun = half + tl.where(is_sum, 0, sums_behind(items, W, LENGTH, DTYPE))
    first = place_of_words(tl.load(inboxes + rank), begun, DTYPE)
    at = first + (source * items + item).to(tl.int64) * LENGTH
    words = tl.load(at, mask=wanted & (ticket < units), other=1, volatile=True)
    return (ticket < units) & (tl.min((words != 0).to(tl.int32)) != 0)


@triton.jit
def sums_behind(items, W: tl.constexpr, LENGTH: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes of all parts; the sums lie behind them."""
    return tl.cast(items, tl.int64) * (LENGTH * W * (DTYPE.primitive_bitwidth // 8))


@triton.jit
def settle(
    ticket, product, out, inboxes, state, elements, chunk, items, rank, site, half, epoch,
    W: tl.constexpr, ALL: tl.constexpr, ONCE: tl.constexpr, MEAN: tl.constexpr, LENGTH: tl.constexpr,
    STORED: tl.constexpr,
):  # fmt: skip
    """Part B or C of a ticket. Returns the next ticket.

    product: the own part, [elements]; STORED: the words of it lie there like those of peers; half: bytes
    before this call's half of the words.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    TWICE: tl.constexpr = ALL and not ONCE
    lane = tl.arange(0, LENGTH)
    sums = half + sums_behind(items, W, LENGTH, dtype)
    further_ticket = draw(state + STATE_TICKETS)
    if ticket < items:
        begun, inside = place((0 if ONCE else rank) * chunk, ticket, chunk, elements, LENGTH)
        sent = sent_of(inside, LENGTH)
        own = 0.0
        if not STORED:
            own = tl.load(product + begun + lane, mask=inside, other=0.0)
        total, arrived = take_sum(
            slot(inboxes, rank, half, 0, ticket, items, LENGTH, dtype), tl.cast(items, tl.int64) * LENGTH,
            own, sent, lane // UNIT, rank, state, site * CODES_PER_SITE + REDUCING, ticket, epoch, W, dtype,
            STORED,
        )  # fmt: skip
        if MEAN:
            total /= W
        words = word_of(total.to(dtype))
        value = value_of(words, dtype)  # with +0 for -0, as the peers
        tl.store(out + (begun if ALL else ticket * LENGTH) + lane, value, mask=inside)
        if TWICE:
            for p in tl.static_range(1, W):
                to = slot(inboxes, (rank + p) % W, sums, rank, ticket, items, LENGTH, dtype)
                tl.store(to, words, mask=sent & (arrived > 0))
    elif TWICE:
        item, source = (ticket - items) // (W - 1), (rank + 1 + (ticket - items) % (W - 1)) % W
        begun, inside = place(source * chunk, item, chunk, elements, LENGTH)
        words, _ = take(
            slot(inboxes, rank, sums, source, item, items, LENGTH, dtype), sent_of(inside, LENGTH),
            lane // UNIT, source, W, LONGER_NS, state, site * CODES_PER_SITE + COPYING, item, epoch,
        )  # fmt: skip
        tl.store(out + begun + lane, value_of(words, dtype), mask=inside)
    return drawn(further_ticket)


@triton.jit
def take_turn(
    ticket, undrawn, units, sends, is_firm, product, out, inboxes, state, elements, chunk, items, rank, site,
    half, epoch, PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, ALL: tl.constexpr,
    ONCE: tl.constexpr, MEAN: tl.constexpr, LENGTH: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """The first ticket of a program, if it is `undrawn`; then `settle`, if the program has one of the `units`
    tickets. While it `sends`, it settles only if the first words of what the ticket takes are there. Returns
    the ticket that the program has then, and whether its first one is undrawn."""
    if undrawn:
        ticket, undrawn = first_ticket(sends, is_firm, state, units, rank, epoch, PROGRAMS, PER_SM, W)
    there = ticket < units
    if sends:
        there = is_there(ticket, units, inboxes, half, items, rank, W, LENGTH, out.dtype.element_ty, STORED)
    if any_thread(there):
        ticket = settle(
            ticket, product, out, inboxes, state, elements, chunk, items, rank, site, half, epoch,
            W, ALL, ONCE, MEAN, LENGTH, STORED,
        )  # fmt: skip
    return ticket, undrawn


@triton.jit(do_not_specialize=["elements", "chunk", "items", "rank", "site", "inbox_half"])
def exchange_sums(
    product, out, inboxes, state, elements, chunk, items, rank, site, inbox_half,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, ALL: tl.constexpr, ONCE: tl.constexpr,
    MEAN: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor.

    product: [elements]; chunk: elements of an owner; items: of a chunk; out: [elements], without ALL the own
    chunk; inboxes: int64 [W], addresses of the memory for words of all ranks. elements and chunk count in
    units, inbox_half in LINE bytes.
    """
    dtype: tl.constexpr = product.dtype.element_ty
    program = tl.program_id(0)
    grid_wait()
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    half = half_of(epoch) * tl.cast(inbox_half, tl.int64) * LINE
    end = items if ONCE else (W - 1) * items  # of part A
    units = tl.cast(items * (W if ALL and not ONCE else 1), tl.int32)
    unit = first_unit(asked, end, state, A, PROGRAMS, program)
    is_firm = firm_program(state, PROGRAMS, PER_SM)
    ticket, undrawn = units, tl.full((), True, tl.int1)
    while (unit < end) | (ticket < units) | undrawn:
        if unit < end:
            if unit == 0:
                announce(state, rank, W, epoch)
            item, step = unit, 0
            if not ONCE:
                item, step = unit // (W - 1), unit % (W - 1)
            owner = (rank + 1 + step) % W
            begun, inside = place((0 if ONCE else owner) * chunk, item, chunk, elements, LENGTH)
            lane = tl.arange(0, LENGTH)
            words = word_of(tl.load(product + begun + lane, mask=inside, other=0.0))
            for p in tl.static_range(W - 1 if ONCE else 1):
                to = slot(inboxes, (owner + p) % W, half, rank, item, items, LENGTH, dtype)
                tl.store(to, words, mask=sent_of(inside, LENGTH))
            unit += PROGRAMS
            if unit >= end:
                unit = next_share(end, state, A, PROGRAMS, program)
        ticket, undrawn = take_turn(
            ticket, undrawn, units, unit < end, is_firm, product, out, inboxes, state, elements, chunk, items,
            rank, site, half, epoch, PROGRAMS, PER_SM, W, ALL, ONCE, MEAN, LENGTH, False,
        )  # fmt: skip
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        end_shares(state, epoch, PROGRAMS)


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
    world, elements, unit = memory.world, product.numel(), UNIT.value
    items, programs = config.items(elements, world, all_ranks), memory.programs * config.per_sm
    launch(
        exchange_sums, programs, compile_only,
        product, out, memory.words.addresses, memory.state,
        elements // unit, config.chunk(elements, world, all_ranks) // unit, items, memory.rank, site,
        memory.words.half(torch.uint8) // LINE.value,
        PROGRAMS=programs, PER_SM=config.per_sm, W=world, ALL=all_ranks, ONCE=config.once,
        MEAN=mean, LENGTH=config.length, num_warps=config.warps, num_stages=1, maxnreg=config.registers,
    )  # fmt: skip
