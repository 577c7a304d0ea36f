"""Sums over the ranks of a matrix in ordinary memory, row by row, and the tail behind them in one kernel.

    V = sum over ranks of P, fp32, in rank order, rounded once      results = tail(V), `tails.py`

cuBLAS computes P. An item is some whole rows, so that a program holds all that a norm reads. Who adds up and
applies the tail:

    all_reduce, ONCE      every rank, all rows: each rank sends its P to all peers
    all_reduce            the owner of a row, which sends the results to all peers
    reduce_scatter        the owner of a row, for itself

A. A program stores an item of its P in the inbox of its owner, with ONCE in the inbox of every peer, and
   signals.
B. Tickets, in the order of the own items: wait for the item from all ranks, add, apply the tail, and store
   the results; in the second form also in `finished` of all peers, and signal all.
C. Tickets behind those, in the second form: wait for an item of a peer, and copy its results.

A waits for nobody, B for A of the peers, C for B.

A rank has two halves each of the inbox [W, items, ROWS, N], of `finished`, where the results lie one behind
the other, and of the counters [2 * W, items]: parts, then results, by their source.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import Need, PeerMemory, cdiv, launch
from autofuse.native_kernels.gpu.state import MOST_TAIL_RESULTS

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
    signal,
    signal_all,
    wait_all,
)
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
from .slices import clear
from .tails import (
    NO_TAIL,
    UNIT,
    TailSpec,
    apply_tail,
    places,
    read,
    read_operands,
    shape_of_items,
    write,
)

WARPS_PER_SM = 16
"""Of all programs of a multiprocessor: a thread then has 128 registers."""

ALIGNED = tl.constexpr(16)
"""Bytes at whose multiples the results lie in `finished`."""


@dataclass(frozen=True)
class RowsConfig:
    """once: every rank adds up everything; length: least elements of an item, if rows are short."""

    once: bool = False
    length: int = 4096

    def items(self, rows: int, columns: int, world: int, all_ranks: bool) -> tuple[int, int]:
        """Rows of an owner, and items of these."""
        owned = rows if self.once and all_ranks else cdiv(rows, world)
        return owned, cdiv(owned, shape_of_items(columns, self.length)[0])


def rows_needs(
    rows: int, columns: int, itemsize: int, world: int, all_ranks: bool, config: RowsConfig, written: int = 0
) -> Need:
    """The memory of a call on `[rows, columns]`. written: bytes of a row of the results that owners send; 0
    for V alone."""
    _, items = config.items(rows, columns, world, all_ranks)
    padded_rows = world * items * shape_of_items(columns, config.length)[0]
    sends = all_ranks and not config.once
    region = 2 * (padded_rows * (written or columns * itemsize) + MOST_TAIL_RESULTS * ALIGNED.value)
    return Need(
        inbox=2 * padded_rows * columns * itemsize,
        finished=region if sends else 0,
        signals=2 * 4 * 2 * world * items,
    )


@triton.jit
def result_slot(
    region, offset, source, item, items, result, columns, ROWS: tl.constexpr, WHOLE: tl.constexpr
):
    """Where the rows of an item of a result lie in `finished`; offset: of the result. `result`: a pointer of
    its dtype."""
    length = ROWS * (columns if WHOLE else 1)
    return slot(region + offset, 0, source, item, items, length, result.dtype.element_ty)


@triton.jit(
    do_not_specialize=[
        "rows", "owned", "items", "units", "rank", "site", "inbox_half", "finished_half", "signals_half",
        "f0", "f1", "f2", "f3",
    ]
)  # fmt: skip
def exchange_rows(
    product, o0, o1, o2, o3, o4, o5, r0, r1, r2, r3, inbox, finished, signals, state,
    rows, owned, items, units, rank, site, inbox_half, finished_half, signals_half, f0, f1, f2, f3,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, ALL: tl.constexpr, ONCE: tl.constexpr,
    MEAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    OPERANDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor.

    product: [rows, units * UNIT]; owned: rows of an owner; items: of these; r0 to r3: [rows, .], without ALL
    the own rows; inbox, finished, signals: int64 [W], addresses of those of all ranks. inbox_half counts in
    units; finished_half, and f0 to f3, where results lie in a half, in multiples of ALIGNED bytes.
    """
    dtype: tl.constexpr = product.dtype.element_ty
    TWICE: tl.constexpr = ALL and not ONCE
    operands, results, offsets = (o0, o1, o2, o3, o4, o5), (r0, r1, r2, r3), (f0, f1, f2, f3)
    columns = units * UNIT
    column = tl.arange(0, COLUMNS)
    line = tl.arange(0, ROWS)
    length = ROWS * columns
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    half = half_of(epoch) * tl.cast(inbox_half, tl.int64) * UNIT
    found_half = half_of(epoch) * tl.cast(finished_half, tl.int64) * ALIGNED
    first_signal = half_of(epoch) * signals_half
    share = first_share(asked, state, A, PROGRAMS, program, PROGRAMS)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, begin(state))
        for unit in range(share, items if ONCE else (W - 1) * items, PROGRAMS):
            item = unit % items
            owner = (rank + 1 + unit // items) % W
            within = item * ROWS + line
            row = (0 if ONCE else owner * owned) + within
            exists = (within < owned) & (row < rows)
            values = read(product, row, exists, column, columns, True, True)
            counter = first_signal + rank * items + item
            if ONCE:
                for p in tl.static_range(1, W):
                    there = slot(tl.load(inbox + (rank + p) % W), half, rank, item, items, length, dtype)
                    write(there, values, line, exists, column, columns, True)
                signal_all(signals, W, counter, rank)
            else:
                there = slot(tl.load(inbox + owner), half, rank, item, items, length, dtype)
                write(there, values, line, exists, column, columns, True)
                signal(peer(signals, owner, tl.int32) + counter)
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, PROGRAMS, program)
    count = tl.cast(items * (W if TWICE else 1), tl.int32)
    unit = count
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        unit = drawn(draw(state + STATE_TICKETS))
    arrived = peer(signals, rank, tl.int32) + first_signal
    own = tl.load(inbox + rank)
    code = site * CODES_PER_SITE + REDUCING
    while unit < items:
        item = unit
        ticket = draw(state + STATE_TICKETS)
        wait_all(arrived + item, items, rank, 1, state, code, 0, item, epoch)
        behind = arrived + (rank + 1) * items + item
        wait_all(behind, items, W - 1 - rank, 1, state, code, rank + 1, item, epoch)
        within = item * ROWS + line
        first = 0 if ONCE else rank * owned
        row = first + within
        exists = (within < owned) & (row < rows)
        mine = product + (first + item * ROWS).to(tl.int64) * columns
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for r in tl.static_range(W):
            part = tl.where(r == rank, mine, slot(own, half, r, item, items, length, dtype))
            total += read(part, line, exists, column, columns, True, True).to(tl.float32)
        if MEAN:
            total /= W
        at = row if ALL else within
        blocks = read_operands(operands, at, exists, column, columns, OPERANDS)
        values = apply_tail(total.to(dtype), blocks, exists, column, columns, STAGES)
        for i in tl.static_range(len(WHOLE)):
            write(results[i], values[i], at, exists, column, columns, WHOLE[i])
            if TWICE:
                for p in tl.static_range(1, W):
                    there = tl.load(finished + (rank + p) % W) + found_half
                    place = tl.cast(offsets[i], tl.int64) * ALIGNED
                    to = result_slot(there, place, rank, item, items, results[i], columns, ROWS, WHOLE[i])
                    write(to, values[i], line, exists, column, columns, WHOLE[i])
        if TWICE:
            signal_all(signals, W, first_signal + (W + rank) * items + item, rank)
        unit = drawn(ticket)
    if TWICE:
        own = tl.load(finished + rank) + found_half
        code = site * CODES_PER_SITE + COPYING
        while unit < count:
            item = (unit - items) // (W - 1)
            source = (rank + 1 + (unit - items) % (W - 1)) % W
            ticket = draw(state + STATE_TICKETS)
            wait_all(arrived + (W + source) * items + item, 0, 1, 1, state, code, source, item, epoch)
            within = item * ROWS + line
            row = source * owned + within
            exists = (within < owned) & (row < rows)
            for i in tl.static_range(len(WHOLE)):
                place = tl.cast(offsets[i], tl.int64) * ALIGNED
                at = result_slot(own, place, source, item, items, results[i], columns, ROWS, WHOLE[i])
                value = read(at, line, exists, column, columns, True, WHOLE[i])
                write(results[i], value, row, exists, column, columns, WHOLE[i])
            unit = drawn(ticket)
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        clear(peer(signals, rank, tl.int32) + first_signal, 2 * W * items, 256)
        end_shares(state, epoch, PROGRAMS)


def launch_exchange_rows(
    memory: PeerMemory,
    product: Tensor,
    results: Sequence[Tensor],
    mean: bool,
    all_ranks: bool,
    config: RowsConfig,
    site: int = 0,
    compile_only: bool = False,
    operands: Sequence[Tensor] = (),
    tail: TailSpec = NO_TAIL,
) -> None:
    """`results = tail(sum (mean) over ranks of product)`: all rows, or this rank's of equally many.

    product: contiguous, of 16 or 32 bits, of columns that `rows_fit`. operands: contiguous, with the rows of
    the results; results: as `TailSpec.empty` makes them, without a tail V alone. memory: at least what
    `rows_needs` says. Every rank of the group makes the same calls; tails may differ where every rank applies
    its own.
    """
    (rows, columns), world, dtype = product.shape, memory.world, product.dtype
    tail = tail if tail.results else tail._replace(results=((dtype, True),))
    owned, items = config.items(rows, columns, world, all_ranks)
    high, wide, warps = shape_of_items(columns, config.length)
    per_sm = WARPS_PER_SM // warps
    offsets = [0]
    for nbytes in tail.row_bytes(columns):
        offsets.append(offsets[-1] + cdiv(world * items * high * nbytes, ALIGNED.value))
    offsets = (offsets[:-1] + [0] * MOST_TAIL_RESULTS)[:MOST_TAIL_RESULTS]
    programs = memory.programs * per_sm
    launch(
        exchange_rows, programs, compile_only,
        product, *places(operands, results),
        memory.inbox.addresses, memory.finished.addresses, memory.signals.addresses, memory.state,
        rows, owned, items, columns // UNIT.value, memory.rank, site, memory.inbox.half(dtype) // UNIT.value,
        memory.finished.half(torch.uint8) // ALIGNED.value, memory.signals.half(torch.int32), *offsets,
        PROGRAMS=programs, PER_SM=per_sm, W=world, ALL=all_ranks, ONCE=config.once and all_ranks, MEAN=mean,
        ROWS=high, COLUMNS=wide, **tail.constants, num_warps=warps, num_stages=1,
        maxnreg=65536 // (32 * WARPS_PER_SM),
    )  # fmt: skip
