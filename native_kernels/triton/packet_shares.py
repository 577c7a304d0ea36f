"""Shares of kernels that send packets (`shares.py` has what a share is).

What a program sends is the same whoever computes it, so a share may be done twice. A program therefore
marks its own share and asks nobody; it claims only shares of others. A mark is the tag of the call's epoch,
so there is nothing to set back after a call.

    mark            say that this program does a share; nobody waits
    unmarked        take a share that no program has marked
    further         the same at the end of a part, if some programs may not have started
    try_packets     wait for packets for a while
    through         count a program that ends; what one of the margin leaves is for the last program
    next_left       for the last program: whose columns were left
"""

import triton
import triton.language as tl

from autofuse.native_kernels.gpu import state as state_words

from .comm import INTERPRET, STATE_FINISHED, UNTIMED, are_missing, tag_of
from .patience import any_thread

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
def further(started, programs, state, part: tl.constexpr, shares, epoch):
    """`unmarked`, or -1 if all programs have started. started: as `shares.look` saw it. Also a barrier."""
    found = tl.full((), -1, tl.int32)
    if any_thread(started < programs):
        found = unmarked(state, part, shares, epoch)
    return found


@triton.jit
def try_packets(at, epoch, mask):
    """The packets at `at` as `take_packets` has them, and whether they have not arrived after a while."""
    tag = tag_of(epoch)
    nothing = tag.to(tl.int64) << 32
    packets = tl.load(at, mask=mask, other=nothing, volatile=True)
    missing = are_missing(packets, tag)
    polls = 0
    while missing & (polls < UNTIMED):
        packets = tl.load(at, mask=mask, other=nothing, volatile=True)
        missing = are_missing(packets, tag)
        polls += 1
    return packets, missing


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
