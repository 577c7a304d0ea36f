"""Device functions for Triton kernels that talk to the other GPUs of a node, for kernels of your own too.

    put           tl.store to a pointer that `peer` made; follow it with `signal`
    signal        add to a counter of a peer, after everything that this program stored before
    signal_all    the same for a counter of every rank at once
    wait          until counters have arrived; what was stored before their signals can be read then
    wait_all      the same for one counter of every rank at once
    count_and_signal
                  add to a counter of this rank; the program that counts the last item signals
    draw, drawn   the next ticket of this rank: `draw` asks for it, and nobody waits before `drawn`
    fence_copies  between a wait and TMA loads of what a peer stored
    put_packets   payload and epoch in one 8-byte store: no signal, no barrier
    take_packets  read such packets as soon as they carry the epoch of this call

Counters are int32 in memory that peers map (torch symmetric memory). They count from 0 in every call, and the
program that waited for a counter sets it back to 0. A call uses half `half_of(epoch)` of the memory. Every
rank waits, in every call, for a signal of every peer, so that a rank that runs ahead never overwrites data
that a peer still reads.

Waits are bounded. `state` is local int64 memory with the limit, the address of the failure record, the epoch
and counters of programs; `native_kernels.gpu.state` names its words and those of the record. After a wait has
given up, later waits return at once, and the host reads the record and raises.

Ordering in PTX: a signal is a CTA barrier, then `red.release.sys` by one thread; a wait is `ld.acquire.sys`
by one thread, then a CTA barrier. TMA stores need `stored` before the signal. Under TRITON_INTERPRET=1 the
same functions run on atomics, and waits are bounded by the number of polls.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

from autofuse.native_kernels.gpu import state as state_words
from autofuse.native_kernels.gpu.state import Event, State, Wait

from .patience import INTERPRET, WAIT_ALL, any_thread, gives_up

# Words of `state` and of the failure record, and codes of waits; `native_kernels.gpu.state` explains them.
STATE_LIMIT = tl.constexpr(State.LIMIT.value)
STATE_RECORD = tl.constexpr(State.RECORD.value)
STATE_GIVEN_UP = tl.constexpr(State.GIVEN_UP.value)
STATE_EPOCH = tl.constexpr(State.EPOCH.value)
STATE_FINISHED = tl.constexpr(State.FINISHED.value)
STATE_TICKETS = tl.constexpr(State.TICKETS.value)
STATE_COPIES = tl.constexpr(State.COPIES.value)
STATE_THROUGH = tl.constexpr(State.THROUGH.value)
STATE_ZEROED = tl.constexpr(State.ZEROED.value)
STATE_JOINED = tl.constexpr(State.JOINED.value)
STATE_FIRM = tl.constexpr(State.FIRM.value)
STATE_WORDS = tl.constexpr(state_words.STATE_WORDS)
BAD_INPUT = tl.constexpr(state_words.BAD_INPUT_WORD)
REDUCING = tl.constexpr(Wait.REDUCING.value)
COPYING = tl.constexpr(Wait.COPYING.value)
GATHERING = tl.constexpr(Wait.GATHERING.value)
POOLING = tl.constexpr(Wait.POOLING.value)
BAD_INDEX = tl.constexpr(Wait.BAD_INDEX.value)
BAD_BAG = tl.constexpr(Wait.BAD_BAG.value)
GRADIENTS = tl.constexpr(Wait.GRADIENTS.value)
OVERLAP = tl.constexpr(Wait.OVERLAP.value)
CODES_PER_SITE = tl.constexpr(state_words.CODES_PER_SITE)

# Polls between two looks at the clock: reading the clock takes longer than a poll.
UNTIMED = tl.constexpr(1 if INTERPRET.value else 64)

# Kinds of events in a trace; `autofuse.timeline` reads them.
BEGUN = tl.constexpr(Event.BEGUN.value)
WAITED = tl.constexpr(Event.WAITED.value)
COMPUTED = tl.constexpr(Event.COMPUTED.value)
DRAINED = tl.constexpr(Event.DRAINED.value)
REDUCED = tl.constexpr(Event.REDUCED.value)
COPIED = tl.constexpr(Event.COPIED.value)
PUSHED = tl.constexpr(Event.PUSHED.value)
ENDED = tl.constexpr(Event.ENDED.value)


@triton.jit
def peer(addresses, rank, dtype: tl.constexpr):
    """The memory of `rank` as a pointer to `dtype`; `addresses` is an int64 array with an entry a rank."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(dtype)), 16)


# Thread t signals rank t. $1 to $4 are `addresses`, `world`, `offset` and `skip` of `signal_all`.
_SIGNAL_RANKS = """
    setp.lt.u32 p, t, $2;
    setp.ne.and.u32 p, t, $4, p;
    mul.wide.u32 a, t, 8;
    add.u64 a, a, $1;
    mul.wide.s32 o, $3, 4;
    @p ld.global.u64 a, [a];
    add.u64 a, a, o;
    @p red.release.sys.global.add.u32 [a], 1;"""
_SIGNAL_ALL = tl.constexpr(f"""{{
    .reg .pred p; .reg .b32 t; .reg .b64 a, o;
    bar.sync 0;
    mov.u32 t, %tid.x;{_SIGNAL_RANKS}
    mov.u32 $0, 0;
    }}""")
_COUNT_AND_SIGNAL = tl.constexpr(f"""{{
    .reg .pred p, q; .reg .b32 t, n; .reg .b64 a, o;
    bar.sync 0;
    mov.u32 t, %tid.x;
    setp.gt.u32 p, t, 31;
    @p bra DONE;
    setp.eq.u32 p, $6, 1;
    @p bra SIGNAL;
    setp.eq.u32 q, t, 0;
    mov.u32 n, 0;
    @q atom.release.gpu.global.add.u32 n, [$5], 1;
    shfl.sync.idx.b32 n, n, 0, 31, -1;
    add.u32 n, n, 1;
    setp.ne.u32 p, n, $6;
    @p bra DONE;
    neg.s32 n, n;
    @q atom.acquire.gpu.global.add.u32 n, [$5], n;
    bar.warp.sync -1;
    SIGNAL:{_SIGNAL_RANKS}
    DONE:
    mov.u32 $0, 0;
    }}""")


@triton.jit
def signal(counter):
    """Add 1 to `counter` (of a peer or of this rank), after all earlier stores of this program."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit
def signal_all(addresses, world, offset, skip):
    """`signal` the counters at element `offset` (int32) of the memory of every rank but `skip`, all at once.

    addresses: int64, an entry for each rank; skip: -1 skips none.
    """
    if INTERPRET:
        for r in range(world):
            if r != skip:
                counter = tl.load(addresses + r).to(tl.pointer_type(tl.int32)) + offset
                tl.atomic_add(counter, 1, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            _SIGNAL_ALL,
            "=r,l,r,r,r",
            [addresses.to(tl.int64), tl.cast(world, tl.int32), tl.cast(offset, tl.int32),
             tl.cast(skip, tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def draw(tickets):
    """Ask for the next ticket of a word of `state`. Nobody waits before `drawn`."""
    if INTERPRET:
        return tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu").to(tl.int32)
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 t; .reg .b64 v;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        mov.u64 v, 0;
        @p atom.relaxed.gpu.global.add.u64 v, [$1], 1;
        cvt.u32.u64 $0, v;
        }""",
        "=r,l,r", [tickets.to(tl.int64), tl.arange(0, num_threads())], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def drawn(asked):
    """The ticket that `draw` has asked for. Also a barrier."""
    if INTERPRET:
        return asked
    return tl.max(asked, axis=0)


@triton.jit
def count_and_signal(word, count, addresses, world, offset, skip):
    """Add 1 to `word` of this rank, after all earlier stores of this program. The program that makes it
    `count` sets it back to 0, and signals the ranks as `signal_all` does.

    Only the first warp waits for the count. Only the last program acquires, which empties the L1 cache. An
    item alone is not counted.
    """
    if INTERPRET:
        tl.debug_barrier()
        if tl.atomic_add(word, 1, sem="release", scope="gpu") == count - 1:
            tl.atomic_add(word, -count, sem="acquire", scope="gpu")
            signal_all(addresses, world, offset, skip)
    else:
        tl.inline_asm_elementwise(
            _COUNT_AND_SIGNAL,
            "=r,l,r,r,r,l,r",
            [addresses.to(tl.int64), tl.cast(world, tl.int32), tl.cast(offset, tl.int32),
             tl.cast(skip, tl.int32), word.to(tl.int64), tl.cast(count, tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def barrier():
    """A barrier of the program's threads that may stand in a pipelined loop: the compiler does not see it."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def stored():
    """Wait until all TMA stores of this program have reached their memory."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async; mov.u32 $0, 0;",
            "=r", [], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def signal_stored(counter):
    """`stored`, then `signal`; nothing if the address `counter` (int64) is 0.

    It may stand in a software-pipelined loop, since the compiler sees neither an atomic nor a barrier.
    """
    if INTERPRET:
        if counter != 0:
            tl.atomic_add(counter.to(tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .b32 t;
            cp.async.bulk.wait_group 0;
            fence.proxy.async;
            bar.sync 0;
            mov.u32 t, %tid.x;
            setp.eq.u32 p, t, 0;
            setp.ne.and.u64 p, $1, 0, p;
            @p red.release.sys.global.add.u32 [$1], 1;
            mov.u32 $0, 0;
            }""",
            "=r,l", [counter], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def wait(counter, target, state, code, source, index, epoch):
    """Wait until `counter`, which `source` signals, is at least `target`."""
    wait_all(counter, 0, 1, target, state, code, source, index, epoch)


@triton.jit
def wait_all(counters, stride, count, target, state, code, source, index, epoch):
    """Wait until each of `count` (at most 32) counters, `stride` apart, is at least `target`.

    `gives_up` says how long; counter i is a wait for rank `source + i`.
    """
    if INTERPRET:
        for i in range(count):
            polls = 0
            counter = counters + i * stride
            stop = tl.load(state + STATE_GIVEN_UP) != 0
            seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
            while (seen < target) & (stop == 0):
                seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
                polls += 1
                if seen < target:
                    waited = polls * nanoseconds()
                    stop = gives_up(state, waited, polls, code, source + i, index, epoch)
    else:
        tl.inline_asm_elementwise(
            WAIT_ALL,
            "=r,l,r,r,r,l,r,r,r,r",
            [counters.to(tl.int64), tl.cast(stride * 4, tl.int32), tl.cast(count, tl.int32),
             tl.cast(target, tl.int32), state.to(tl.int64), tl.cast(code, tl.int32),
             tl.cast(source, tl.int32), tl.cast(index, tl.int32), tl.cast(epoch, tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def begin(state):
    """The epoch of this call, int64, which no number of calls wraps. Every program calls it before its first
    signal."""
    return tl.load(state + STATE_EPOCH) + 1


@triton.jit
def half_of(epoch):
    """The half of the memory that this call uses: 0 or 1."""
    return (epoch & 1).to(tl.int32)


@triton.jit
def tag_of(epoch):
    """The 32 bits that stand for the epoch in a packet: `epoch % (2**32 - 1)`, with all bits set for 0.

    Never 0, which is what memory holds before its first packet. The period is odd, so that equal tags in one
    half are twice as many calls apart.
    """
    folded = (epoch & 0xFFFFFFFF) + (epoch >> 32)
    return ((folded & 0xFFFFFFFF) + (folded >> 32)).to(tl.int32)


@triton.jit
def finish(state, epoch, programs, ENDS: tl.constexpr = True):
    """Ends a program. The last program advances the epoch and sets the counters in `state` to 0.

    It tells if another launch has ended the epoch before: two calls of a group on one GPU ran at once. ENDS:
    whether the epoch ends; it stays where no rank was waited for.
    """
    tl.debug_barrier()
    if is_last(state, programs):
        end(state, epoch, ENDS)


@triton.jit
def is_last(state, programs):
    """Counts this program as through, after a barrier; whether all others are."""
    return tl.atomic_add(state + STATE_FINISHED, 1, sem="acq_rel", scope="gpu") == programs - 1


@triton.jit
def end(state, epoch, ENDS: tl.constexpr):
    """What the last program does."""
    clear(state)
    if ENDS:
        if tl.atomic_xchg(state + STATE_EPOCH, epoch, sem="relaxed", scope="gpu") != epoch - 1:
            tell_overlap(state, epoch)


@triton.jit
def clear(state):
    """Set the words of a call back to 0."""
    for word in tl.static_range(STATE_FINISHED, STATE_FIRM):
        tl.store(state + word, 0)


@triton.jit
def tell_overlap(state, epoch):
    """Tell the host that another launch has run in this epoch."""
    record = tl.load(state + STATE_RECORD).to(tl.pointer_type(tl.int64))
    what = tl.full((), OVERLAP, tl.int64) << 48
    tl.store(record + BAD_INPUT, what | (epoch & 0xFFFFFFFF))


@triton.jit
def fence_copies():
    """Later TMA loads see what peers stored before the signal of an earlier `wait`."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def nanoseconds():
    """The device's clock; under the interpreter, the assumed duration of a poll."""
    if INTERPRET:
        return tl.full((), 20000, tl.int64)
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def put_packets(to, pairs, epoch, mask):
    """Store pairs (uint32) with the epoch's tag to int64 memory of a peer. Both arrive together."""
    tl.store(to, pairs.to(tl.int64) | (tag_of(epoch).to(tl.int64) << 32), mask=mask)


@triton.jit
def are_missing(packets, tag):
    """Whether any thread holds a packet with another tag. Warps with the same packets have loaded them at
    different times."""
    return any_thread(tl.max(((packets >> 32) != tag).to(tl.int32), axis=None) != 0)


@triton.jit
def poll_packets(at, tag, mask):
    """The packets at `at` as they are now, and whether any of them has another tag."""
    packets = tl.load(at, mask=mask, other=tag.to(tl.int64) << 32, volatile=True)
    return packets, are_missing(packets, tag)


@triton.jit
def take_packets(at, epoch, mask, state, code, sources, index):
    """The packets at `at` (int64, memory of this rank) once all carry the epoch's tag; bounded as `wait` is.

    sources: the rank that each packet comes from.
    """
    tag = tag_of(epoch)
    packets, missing = poll_packets(at, tag, mask)
    begun = tl.full((), 0, tl.int64)
    polls = 0
    while missing:
        packets, missing = poll_packets(at, tag, mask)
        polls += 1
        if missing & (polls % UNTIMED == 0):
            if polls == UNTIMED:
                begun = nanoseconds()
            if late_since(begun, polls, packets, tag, state, code, sources, index, epoch):
                missing = missing & False
    return packets


@triton.jit
def late_since(begun, polls, packets, tag, state, code, sources, index, epoch):
    """Whether a wait for packets that began at `begun` gives up."""
    waited = nanoseconds() - begun
    if INTERPRET:
        waited = polls * nanoseconds()
    late = tl.min(tl.where((packets >> 32) != tag, sources, 1 << 30), axis=None)
    return gives_up(state, waited, polls, code, late, index, epoch)


@triton.jit
def stamp(trace, program, event, kind, rank, tile, TRACE: tl.constexpr, EVENTS: tl.constexpr):
    """With TRACE, write event number `event` of a program: the time, and kind << 32 | rank << 24 | tile.

    trace: int64 [programs, EVENTS, 2], 0 at first; events beyond EVENTS overwrite the last. rank: the owner
    of the tile, or the rank that was waited for; -1: all ranks. Returns the number of the next event.
    """
    if TRACE:
        at = trace + (program * EVENTS + tl.minimum(event, EVENTS - 1)) * 2
        tl.store(at, nanoseconds())
        what = (
            (tl.cast(kind, tl.int64) << 32)
            | ((tl.cast(rank, tl.int64) & 0xFF) << 24)
            | tl.cast(tile, tl.int64)
        )
        tl.store(at + 1, what)
        event += 1
    return event
