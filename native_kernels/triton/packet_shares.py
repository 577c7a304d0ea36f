"""Shares of kernels that send packets (`shares.py` has what a share is).

What a program sends is the same whoever computes it, so a share may be done twice. A program therefore
marks its own share and asks nobody; it claims only shares of others. A mark is the tag of the call's epoch,
so there is nothing to set back after a call.

    mark            say that this program does a share; nobody waits
    unmarked        take a share that no program has marked
    look, further   the same at the end of a part, if some programs have not started
    take_or_help    wait for packets, or do what has not been done
    through         count a program that ends; what one of the margin leaves is for the last program
    next_left       for the last program: whose columns were left
    next_item       the end of a turn of kernels whose programs take items
"""

import triton
import triton.language as tl

from autofuse.native_kernels.gpu import state as state_words

from .comm import (
    INTERPRET,
    STATE_EPOCH,
    STATE_FINISHED,
    UNTIMED,
    clear,
    late_since,
    nanoseconds,
    poll_packets,
    tag_of,
    tell_overlap,
)
from .patience import any_thread
from .shares import STATE_STARTED, A, B, stays

MARKS = tl.constexpr(state_words.STATE_WORDS + state_words.MOST_SHARES)
MOST_SHARES = tl.constexpr(state_words.MOST_SHARES)

MOST_PROGRAMS = tl.constexpr(1024)
"""Of a kernel that sends packets. At least the threads of a program, each of which has marks of its own."""


@triton.jit
def marks_of(state, part: tl.constexpr):
    return (state + MARKS).to(tl.pointer_type(tl.int32)) + part * MOST_SHARES


@triton.jit
def mark(state, part: tl.constexpr, share, epoch):
    """Say that this program does a share that may be done twice; nobody waits."""
    word = marks_of(state, part) + share
    if INTERPRET:
        tl.atomic_xchg(word, tag_of(epoch), sem="relaxed", scope="gpu")
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .b32 t;
            mov.u32 t, %tid.x;
            setp.eq.u32 p, t, 0;
            @p st.relaxed.gpu.global.s32 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r", [word.to(tl.int64), tag_of(epoch)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def unmarked(state, part: tl.constexpr, shares, epoch):
    """Mark one of `shares` shares that no program has marked; -1 if there is none. Also a barrier.

    The last ones come first: programs mark their shares when they have sent them, and GPUs place programs in
    the order of their numbers.
    """
    marks, tag = marks_of(state, part), tag_of(epoch)
    offset = tl.arange(0, MOST_PROGRAMS)
    found = tl.full((), -1, tl.int32)
    free = tl.full((), 0, tl.int32)
    while (found < 0) & (free >= 0):
        seen = tl.load(marks + offset, mask=offset < shares, other=tag, volatile=True)
        free = tl.max(tl.where(seen == tag, -1, offset), axis=0)
        if free >= 0:
            before = tl.atomic_xchg(marks + free, tag, sem="relaxed", scope="gpu")
            found = tl.where(before == tag, -1, free)
    return found


@triton.jit
def look(state, programs, epoch):
    """Whether some programs have not started, or another launch disturbs this call; threads may see different
    values. Nobody waits before `further`."""
    started = tl.load(state + STATE_STARTED, volatile=True)
    ended = tl.load(state + STATE_EPOCH, volatile=True)
    return (started != programs) | (ended != epoch - 1)


@triton.jit
def further(seen, programs, state, part: tl.constexpr, shares, epoch):
    """`unmarked`, or -1 if all programs have started. seen: what `look` saw. Also a barrier."""
    found = tl.full((), -1, tl.int32)
    if any_thread(seen):
        if (tl.load(state + STATE_STARTED) > programs) | (tl.load(state + STATE_EPOCH) != epoch - 1):
            tell_overlap(state, epoch)
        found = unmarked(state, part, shares, epoch)
    return found


@triton.jit
def take_or_help(
    at, epoch, mask, state, code, sources, index, program, programs, adding, rank, world, is_last,
    LEAVES: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """The packets at `at` as `comm.take_packets` has them, or what to do before they have arrived.

    When they are late the program stops waiting if it finds part A of a share that no program has marked,
    with ADDS part B of one of `adding` shares, or with LEAVES if it is of the margin and not the last, and a
    peer has not started. Returns the packets, the share of A or -1, that of B or -1, and 1 if it leaves.
    """
    tag = tag_of(epoch)
    share = tl.full((), -1, tl.int32)
    other = tl.full((), -1, tl.int32)
    left = tl.full((), 0, tl.int32)
    begun = tl.full((), 0, tl.int64)
    polls = 0
    packets, missing = poll_packets(at, tag, mask)
    while missing:
        packets, missing = poll_packets(at, tag, mask)
        polls += 1
        if missing & (polls % UNTIMED == 0):
            if polls == UNTIMED:
                share = unmarked(state, A, programs, epoch)
                if ADDS:
                    if share < 0:
                        other = unmarked(state, B, adding, epoch)
                if LEAVES:
                    if (share < 0) & (is_last == 0):
                        left = 1 - stays(state, program, 1, rank, world, epoch).to(tl.int32)
                begun = nanoseconds()
            missing = missing & (share < 0) & (other < 0) & (left == 0)
            if missing:
                missing = late_since(begun, polls, packets, tag, state, code, sources, index, epoch) == 0
    return packets, share, other, left


@triton.jit
def through(state, part: tl.constexpr, program, left, programs, epoch):
    """Count this program as through, after a barrier. left: 1 if it leaves its columns to the last one, which
    finds a mark for `part`.

    Whether it is the last, and whether it then has columns to take that were left: 1 or 0 each.
    """
    if left != 0:
        tl.atomic_xchg(marks_of(state, part) + program, tag_of(epoch), sem="relaxed", scope="gpu")
    # The upper half of the word counts the programs that have left.
    one = 1 + (left.to(tl.int64) << 32)
    before = tl.atomic_add(state + STATE_FINISHED, one, sem="acq_rel", scope="gpu")
    last = ((before & 0xFFFFFFFF) == programs - 1).to(tl.int32)
    return last, tl.where((left != 0) | (before >> 32 != 0), last, 0)


@triton.jit
def next_left(state, part: tl.constexpr, first, programs, epoch):
    """The first program from number `first` on that has left its columns; `programs` if none has. The last
    program asks, which no other disturbs."""
    marks, tag = marks_of(state, part), tag_of(epoch)
    found = first
    while (found < programs) & (tl.load(marks + found, volatile=True) != tag):
        found += 1
    return found


@triton.jit
def next_item(seen, item, left, last, behind, going, program, programs, state, epoch):
    """What a program goes on with that has taken its items; they are `programs` apart.

    It sends for a program that has not started, or ends. The last program takes the items that others have
    left. seen: what `look` saw; left: 1 if the program leaves its items; last: 1 for the last program;
    behind: where it looks for the next program that has left; going: 0 to end. Returns the share to send, or
    -1, and the new `item`, `left`, `last`, `behind` and `going`.
    """
    share = tl.full((), -1, tl.int32)
    if last == 0:
        share = further(seen, programs, state, A, programs, epoch)
        if share < 0:
            last, going = through(state, B, program, left, programs, epoch)
    if (last != 0) & (going != 0):
        behind = next_left(state, B, behind, programs, epoch)
        going = (behind < programs).to(tl.int32)
        if going != 0:
            item = behind
        left = tl.full((), 0, tl.int32)
        behind += 1
    return share, item, left, last, behind, going


@triton.jit
def end_packets(state, epoch):
    """What the last program does. Another launch in this epoch is found by `further`."""
    clear(state)
    tl.store(state + STATE_EPOCH, epoch)
