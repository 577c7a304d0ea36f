"""How a kernel goes on if some of its programs are not placed, because others hold multiprocessors.

A *share* is what one program does in a static scheme; share p is for program p. Its part A waits for no
peer, its part B may. Programs claim shares: a word behind `state` for each part of each share says which
program has it. A program that has done its own part looks whether all programs have started, and does what
those would do that have not: part A before it waits without a bound, part B before it ends. So any programs
that are placed do all that peers wait for. A program that is placed late finds its share taken.

    claim, won      take a share; the answer is needed only before the first store to a peer
    unclaimed       take a share that no program has taken
    look, further   whether there may be such a share, at the end of a part
    try_all         wait for peers for a while
    stays           whether a program may wait: those of the margin only if all peers have started the call

The margin: programs from number `state[FIRM]` on. They leave rather than hold a multiprocessor for a peer
that has not started: it may wait for a kernel that finds no other place here.
"""

import triton
import triton.language as tl

from autofuse.native_kernels.gpu import state as state_words
from autofuse.native_kernels.gpu.state import State

from .comm import (
    INTERPRET,
    STATE_FIRM,
    STATE_GIVEN_UP,
    end,
    fence_copies,
)
from .patience import any_thread

STATE_STARTED = tl.constexpr(State.STARTED.value)
STATE_LEFT = tl.constexpr(State.LEFT.value)
STATE_CLAIMED_B = tl.constexpr(State.CLAIMED_B.value)
STATE_PRESENCE = tl.constexpr(State.PRESENCE.value)
CLAIMS = tl.constexpr(state_words.STATE_WORDS)
MOST_SHARES = tl.constexpr(state_words.MOST_SHARES)
YIELD_NS = tl.constexpr(state_words.YIELD_NS)

A, B = tl.constexpr(0), tl.constexpr(1)
PLACED_NS = tl.constexpr(100_000)
"""How long programs that have no part A wait for the others to start before they do their work."""


@triton.jit
def claims_of(state, part: tl.constexpr):
    return (state + CLAIMS).to(tl.pointer_type(tl.int32)) + part * MOST_SHARES


@triton.jit
def start(state):
    """Count this program as started; nobody waits."""
    add_one(state + STATE_STARTED)


@triton.jit
def add_one(word):
    """Add 1 to a word of `state`; nobody waits."""
    if INTERPRET:
        tl.atomic_add(word, 1)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .b32 t;
            mov.u32 t, %tid.x;
            setp.eq.u32 p, t, 0;
            @p red.relaxed.gpu.global.add.u64 [$1], 1;
            mov.u32 $0, 0;
            }""",
            "=r,l", [word.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def claim(state, part: tl.constexpr, share, program):
    """Ask for a share, whose answer is `won`. No thread waits: one of each warp asks, and all get one answer,
    since a program finds its own number where another of its warps has been first."""
    word = claims_of(state, part) + share
    if INTERPRET:
        return tl.atomic_cas(word, 0, program + 1)
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 t;
        mov.u32 t, %laneid;
        setp.eq.u32 p, t, 0;
        mov.u32 $0, 0;
        @p atom.relaxed.gpu.global.cas.b32 $0, [$1], 0, $2;
        }""",
        "=&r,l,r", [word.to(tl.int64), program + 1], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def won(asked, program):
    """Whether the share that `claim` asked for is this program's."""
    found = asked
    if not INTERPRET:
        found = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [asked], dtype=tl.int32, is_pure=False, pack=1
        )
    return (found == 0) | (found == program + 1)


@triton.jit
def unclaimed(state, part: tl.constexpr, shares, program):
    """Claim one of `shares` shares that no program has claimed; -1 if there is none."""
    claims = claims_of(state, part)
    found = tl.full((), -1, tl.int32)
    at = 0
    while (found < 0) & (at < shares):
        offset = at + tl.arange(0, 128)
        taken = tl.load(claims + offset, mask=offset < shares, other=1, volatile=True)
        free = tl.min(tl.where(taken == 0, offset, shares), axis=0)
        at = tl.where(free < shares, at, at + 128)
        if free < shares:
            found = tl.where(won(claim(state, part, free, program), program), free, -1)
    return found


@triton.jit
def multiprocessor(multiprocessors):
    """The number of the multiprocessor that the program runs on."""
    if INTERPRET:
        return tl.program_id(0) % multiprocessors
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def stays(state, place, per_place, rank, world, epoch):
    """Whether the program may wait for peers: all but those of the margin, if a rank is not present and
    enough other programs stay. place: number of the program or, if `per_place` programs share it, of its
    multiprocessor."""
    firm_places = tl.load(state + STATE_FIRM)
    found = place < firm_places
    if found == 0:
        found = present(state, rank, world, epoch)
        if found == 0:
            found = leaves(state, firm_places * per_place) == 0
    return found


@triton.jit
def leaves(state, firm):
    """Whether more than `firm` programs run; if so, this one no longer counts."""
    left = tl.atomic_add(state + STATE_LEFT, 1, sem="relaxed", scope="gpu")
    found = tl.atomic_add(state + STATE_STARTED, 0, sem="relaxed", scope="gpu") - left > firm
    if found == 0:
        tl.atomic_add(state + STATE_LEFT, -1, sem="relaxed", scope="gpu")
    return found


@triton.jit
def firm(state, programs):
    """How many of the programs wait for a peer that has not started the call."""
    return tl.minimum(tl.load(state + STATE_FIRM), programs).to(tl.int32)


@triton.jit
def look(state, word: tl.constexpr):
    """A word of `state` as it is now; threads may see different values. Nobody waits before `further`."""
    return tl.load(state + word, volatile=True)


@triton.jit
def further(seen, enough, state, part: tl.constexpr, shares, program):
    """Another share for this program; -1 if there is none. seen: what `look` saw, at least `enough` if all
    shares are claimed. Also a barrier."""
    found = tl.full((), -1, tl.int32)
    if any_thread(seen < enough):
        found = unclaimed(state, part, shares, program)
    return found


@triton.jit
def first_share(asked, state, part: tl.constexpr, shares, program, programs):
    """The share that this program has asked for, or else another; -1 if there is none.

    Programs that have no share give the others time to start: they would compute, and others wait for them.
    """
    share = program
    mine = won(asked, program)
    if (program >= shares) | (mine == 0):
        if program >= shares:
            all_started(state, programs)
            fence_copies()  # as after every wait
        share = further(look(state, STATE_STARTED), programs, state, part, shares, program)
    return share


_TRY_ALL = tl.constexpr(
    f"""{{
    .reg .pred p, q; .reg .b32 t, v, polls; .reg .b64 a, r, now, limit;
    mov.u32 t, %tid.x;
    setp.ne.u32 q, t, t;
    setp.ge.u32 p, t, $3;
    @p bra DONE;
    mul.wide.u32 a, t, $2;
    add.u64 a, a, $1;
    mov.u32 polls, 0;
    POLL:
    ld.acquire.sys.global.s32 v, [a];
    sub.s32 v, v, $4;
    setp.ge.s32 p, v, 0;
    @p bra DONE;
    add.u32 polls, polls, 1;
    and.b32 v, polls, 63;
    setp.ne.u32 p, v, 0;
    @p bra POLL;
    setp.gt.u32 p, polls, 64;
    @p bra LOOK;
    mov.u64 limit, %globaltimer;
    cvt.u64.u32 now, $6;
    add.u64 limit, limit, now;
    LOOK:
    ld.volatile.global.u64 r, [$5+{8 * State.GIVEN_UP}];
    setp.ne.u64 p, r, 0;
    @p bra DONE;
    mov.u64 now, %globaltimer;
    setp.lt.u64 p, now, limit;
    @p bra POLL;
    setp.eq.u32 q, t, t;
    DONE:
    bar.red.or.pred q, 0, q;
    selp.u32 $0, 0, 1, q;
    }}"""
)


@triton.jit
def try_all(counters, stride, count, target, state, ns):
    """As `wait_all`, for about `ns` nanoseconds; whether all have arrived, or a wait has given up."""
    if INTERPRET:
        arrived = tl.full((), 1, tl.int32)
        for i in range(count):
            polls = 0
            counter = counters + i * stride
            less = tl.atomic_add(counter, 0, sem="acquire", scope="sys") - tl.cast(target, tl.int32)
            while (less < 0) & (polls * 20000 <= ns):
                seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
                less = seen - tl.cast(target, tl.int32)
                polls += 1
            if (less < 0) & (tl.load(state + STATE_GIVEN_UP) == 0):
                arrived *= 0
        return arrived != 0
    return tl.inline_asm_elementwise(
        _TRY_ALL,
        "=r,l,r,r,r,l,r",
        [counters.to(tl.int64), tl.cast(stride * 4, tl.int32), tl.cast(count, tl.int32),
         tl.cast(target, tl.int32), state.to(tl.int64), tl.cast(ns, tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    ) != 0  # fmt: skip


@triton.jit
def end_shares(state, epoch, shares, ENDS: tl.constexpr = True):
    """The last program ends the call, in which `shares` shares could be claimed; ENDS: as `finish` has it."""
    for part in tl.static_range(2):
        for at in range(0, shares, 256):
            share = at + tl.arange(0, 256)
            tl.store(claims_of(state, part) + share, 0, mask=share < shares)
    end(state, epoch, ENDS)


@triton.jit
def announce(state, rank, world, epoch):
    """Tell all ranks that this one has started the call: what the program does that has share 0."""
    if INTERPRET:
        for r in range(world):
            there = tl.load(state + STATE_PRESENCE + r).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(there + rank, epoch.to(tl.int32), sem="relaxed", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p; .reg .b32 t; .reg .b64 a, o;
            mov.u32 t, %tid.x;
            setp.lt.u32 p, t, $2;
            mul.wide.u32 a, t, 8;
            add.u64 a, a, $1;
            @p ld.global.u64 a, [a];
            mul.wide.u32 o, $3, 4;
            add.u64 a, a, o;
            @p st.relaxed.sys.global.u32 [a], $4;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r,r",
            [(state + STATE_PRESENCE).to(tl.int64), tl.cast(world, tl.int32), tl.cast(rank, tl.int32),
             tl.cast(epoch, tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def present(state, rank, world, epoch):
    """Whether all ranks have started the call; waits for them for YIELD_NS."""
    words = tl.load(state + STATE_PRESENCE + rank).to(tl.pointer_type(tl.int32))
    return try_all(words, 1, world, epoch, state, YIELD_NS)


@triton.jit
def all_started(state, programs):
    """Whether all programs of this rank have started; waits for them for PLACED_NS."""
    return try_all((state + STATE_STARTED).to(tl.pointer_type(tl.int32)), 0, 1, programs, state, PLACED_NS)
