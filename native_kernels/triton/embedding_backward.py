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
    STATE_TICKETS,
    STATE_ZEROED,
    WAITED,
    begin,
    draw,
    drawn,
    half_of,
    is_last,
    peer,
    stamp,
    wait,
    wait_all,
)
from .embedding_bags import TABLE
from .embedding_entries import FIRST_BLOCK, FIRST_CHUNK, WORK, Entries, is_scaled
from .embedding_exchange import FP16, FP32, SOURCE
from .embedding_strips import add_strips, columns_of, join_strips
from .embedding_tables import BackwardConfig, Places, Tables, place_aligned
from .embedding_update import RULE
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


@triton.jit
def table_of(work, word: tl.constexpr, item, count, TABLES: tl.constexpr):
    """The table of an item; `word`: the word of WORDS_WORK that has the first item of each table."""
    t = tl.arange(0, TABLES)
    begun = (t < count) & (tl.load(work + t * WORK + word, mask=t < count, other=0) <= item)
    return tl.sum(begun.to(tl.int32), axis=0) - 1


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
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, ADDING: tl.constexpr, W: tl.constexpr, PUSH: tl.constexpr,
    KEEP: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, TABLES: tl.constexpr, ALIGN: tl.constexpr,
    WRITE: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, CB: tl.constexpr, STRIP: tl.constexpr,
    CR: tl.constexpr, CC: tl.constexpr, CHUNK: tl.constexpr, UPDATE: tl.constexpr, TRACE: tl.constexpr,
    EVENTS: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor, of which the last ADDING add. words: `backward_words`; inbox,
    signals: int64 [W], addresses of the regions of all ranks; done: int32 [W], 0; parts: fp32 [all strips,
    2, width].

    pieces: of CR x CC elements, for one rank, col_blocks side by side; copies: chunks of CHUNK elements of G;
    stride: C divided by ALIGN; width: the widest table divided by ALIGN; group_stride: that of `Places`
    divided by WRITE; BR: strips of a block, of STRIP entries each; CB: blocks of BD columns.
    KEEP: `exchanged` becomes G. Without PUSH `exchanged` is G, and nothing is exchanged. UPDATE:
    `Tables.update`.
    """
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
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
    first = half_of(epoch) * inbox_half
    share = first_share(asked, state, A, PROGRAMS, program, PROGRAMS)
    while share >= 0:
        if PUSH:
            if share == 0:
                announce(state, rank, W, begin(state))
            pushed = tl.full((), -1, tl.int32)
            for item in range(share, W * pieces, PROGRAMS):
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
                    count_item(done, signals, pushed, pieces, pieces, 1, rank, first_signal, W)
                to = tl.multiple_of(peer(inbox, dest, WIRE) + first, 16)
                starts = ((rank * b + bag) * groups + group) * cols
                tl.store(to + tl.multiple_of(starts, [WRITE])[:, None] + col[None, :], values, mask=mask)
                pushed = step
                event = stamp(trace, program, event, PUSHED, dest, item % pieces, TRACE, EVENTS)
            if pushed >= 0:
                count_item(done, signals, pushed, pieces, pieces, 1, rank, first_signal, W)
        if UPDATE == 0:
            chunks = tl.load(work + count * WORK + FIRST_CHUNK).to(tl.int32)
            for item in range(share, chunks, PROGRAMS):
                set_zero(tables, work, item, count, DTYPE, ALIGN, TABLES, CHUNK)
            tl.debug_barrier()
            tl.atomic_add(state + STATE_ZEROED, 1, sem="release", scope="gpu")
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, PROGRAMS, program)
    # Tickets: blocks of strips to add up, then chunks of G to keep, then the same blocks to join.
    blocks = tl.load(work + count * WORK + FIRST_BLOCK).to(tl.int32) * CB
    kept_to = blocks + copies if KEEP else blocks
    tickets = kept_to + blocks
    stay = PROGRAMS - 1 - program < ADDING
    if PUSH and ADDING == PROGRAMS:
        stay = stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch)
    ticket = tickets
    code = site * CODES_PER_SITE + GRADIENTS
    gradient = exchanged
    if PUSH:
        gradient = tl.multiple_of(peer(inbox, rank, WIRE) + first, 16)
    if stay:
        ticket = drawn(draw(state + STATE_TICKETS))
        if UPDATE == 0:
            zeroed = (state + STATE_ZEROED).to(tl.pointer_type(tl.int32))
            wait(zeroed, PROGRAMS, state, code, rank, 0, epoch)
        if PUSH:
            arrived = peer(signals, rank, tl.int32) + first_signal
            wait_all(arrived, 1, W, 1, state, code, 0, 0, epoch)
        event = stamp(trace, program, event, WAITED, -1, 0, TRACE, EVENTS)
    while ticket < blocks:
        t = table_of(work, FIRST_BLOCK, ticket // CB, count, TABLES)
        if ticket % CB * BD < columns_of(tables + t * TABLE):
            add_strips(
                tables + t * TABLE, work + t * WORK, rules + t * RULE, ticket // CB, ticket % CB * BD, keys,
                bags, scales, gradient, parts, W * b, stride, width, DTYPE, SCALED, ALIGN, BR, BD, STRIP,
                UPDATE,
            )  # fmt: skip
        event = stamp(trace, program, event, COMPUTED, rank, ticket, TRACE, EVENTS)
        tl.debug_barrier()
        tl.atomic_add(state + STATE_JOINED, 1, sem="release", scope="gpu")
        ticket = drawn(draw(state + STATE_TICKETS))
    while ticket < kept_to:
        at = (ticket - blocks) * CHUNK + tl.arange(0, CHUNK)
        inside = at < W * b * stride
        tl.store(exchanged + at, tl.load(gradient + at, mask=inside), mask=inside)
        ticket = drawn(draw(state + STATE_TICKETS))
    if ticket < tickets:
        joined = (state + STATE_JOINED).to(tl.pointer_type(tl.int32))
        wait(joined, blocks, state, code, rank, 1, epoch)
    while ticket < tickets:
        item = ticket - kept_to
        t = table_of(work, FIRST_BLOCK, item // CB, count, TABLES)
        if item % CB * BD < columns_of(tables + t * TABLE):
            join_strips(
                tables + t * TABLE, work + t * WORK, rules + t * RULE, item // CB, item % CB * BD, keys,
                parts, width, DTYPE, ALIGN, BR, BD, STRIP, 4, UPDATE,
            )  # fmt: skip
        ticket = drawn(draw(state + STATE_TICKETS))
    event = stamp(trace, program, event, ENDED, rank, 0, TRACE, EVENTS)
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        if PUSH:
            clear(peer(signals, rank, tl.int32) + first_signal, W, 32)
            end_shares(state, epoch, PROGRAMS)
        else:
            end_shares(state, epoch, PROGRAMS, False)  # no rank was waited for: the epoch stays


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
        PROGRAMS=programs, PER_SM=config.per_sm, ADDING=config.adding or programs, W=world,
        PUSH=grad is not None, KEEP=grad is not None and exchanged is not None, KIND=tables.kinds(),
        SCALED=is_scaled(tables),
        TABLES=triton.next_power_of_2(len(dims)), ALIGN=align, WRITE=write, BR=br, BD=bd,
        CB=cdiv(max(1, *dims), bd), STRIP=config.strip, CR=cr, CC=cc, CHUNK=config.chunk,
        UPDATE=tables.update, TRACE=trace is not None, EVENTS=EVENTS,
        num_warps=config.warps, num_stages=1, maxnreg=config.registers,
    )  # fmt: skip
