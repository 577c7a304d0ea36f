"""How long a wait of a Triton kernel lasts: `gives_up`, and the same inside of `comm.wait_all` in PTX."""

import os

import triton
import triton.language as tl

from autofuse.native_kernels.gpu import state as state_words
from autofuse.native_kernels.gpu.state import Record, State

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")

STATE_GIVEN_UP = tl.constexpr(State.GIVEN_UP.value)
STATE_RECORD = tl.constexpr(State.RECORD.value)
STATE_LIMIT = tl.constexpr(State.LIMIT.value)
STATE_SLOW = tl.constexpr(State.SLOW.value)
RECORD_RAISED = tl.constexpr(Record.RAISED.value)
RECORD_CODE = tl.constexpr(Record.CODE.value)
RECORD_SOURCE = tl.constexpr(Record.SOURCE.value)
RECORD_INDEX = tl.constexpr(Record.INDEX.value)
RECORD_EPOCH = tl.constexpr(Record.EPOCH.value)
RECORD_STOP = tl.constexpr(Record.STOP.value)
RECORD_SLOW = tl.constexpr(Record.SLOW.value)
RECORD_WAITED = tl.constexpr(Record.WAITED.value)
SLOW_SOURCE = tl.constexpr(1 << state_words.SLOW_SOURCE_BIT)
LONG_NS = tl.constexpr(state_words.LONG_NS)
SLOW_NS = tl.constexpr(state_words.SLOW_NS)
POLLS_PER_STOP = tl.constexpr(1 if INTERPRET.value else state_words.POLLS_PER_STOP)

# `wait_all` in PTX: a poll is an acquire; all else, which `gives_up` explains, happens once in 64 polls.
WAIT_ALL = tl.constexpr(
    f"""{{
    .reg .pred p; .reg .b32 t, v, polls; .reg .b64 a, r, record, waited, begun, limit;
    mov.u32 t, %tid.x;
    setp.ge.u32 p, t, $3;
    @p bra DONE;
    mul.wide.u32 a, t, $2;
    add.u64 a, a, $1;
    add.u32 t, t, $7;
    mov.u32 polls, 0;
    POLL:
    ld.acquire.sys.global.s32 v, [a];
    setp.ge.s32 p, v, $4;
    @p bra DONE;
    add.u32 polls, polls, 1;
    and.b32 v, polls, 63;
    setp.ne.u32 p, v, 0;
    @p bra POLL;
    mov.u64 waited, %globaltimer;
    setp.gt.u32 p, polls, 64;
    @p bra LOOK;
    mov.u64 begun, waited;
    LOOK:
    sub.u64 waited, waited, begun;
    ld.global.u64 record, [$5+{8 * State.RECORD}];
    ld.volatile.global.u64 r, [$5+{8 * State.GIVEN_UP}];
    setp.ne.u64 p, r, 0;
    @p bra STOP;
    and.b32 v, polls, {state_words.POLLS_PER_STOP - 1};
    setp.ne.u32 p, v, 0;
    @p bra CLOCK;
    ld.volatile.global.u32 v, [record+{4 * Record.STOP}];
    shr.u32 v, v, t;
    and.b32 v, v, 1;
    setp.ne.u32 p, v, 0;
    @p bra STOP;
    CLOCK:
    ld.global.u64 limit, [$5+{8 * State.LIMIT}];
    setp.ge.u64 p, waited, limit;
    @p bra STOP;
    shr.u64 limit, limit, 1;
    min.u64 limit, limit, {state_words.SLOW_NS};
    setp.lt.u64 p, waited, limit;
    @p bra POLL;
    atom.relaxed.gpu.global.exch.b64 r, [$5+{8 * State.SLOW}], 1;
    setp.ne.u64 p, r, 0;
    @p bra POLL;
    shl.b32 v, t, {state_words.SLOW_SOURCE_BIT};
    add.u32 v, v, $6;
    add.u32 v, v, 1;
    st.volatile.global.u32 [record+{4 * Record.SLOW}], v;
    bra POLL;
    STOP:
    setp.lt.u64 p, waited, {state_words.LONG_NS};
    @p bra RAISE;
    mul.wide.u32 r, t, 4;
    add.u64 r, r, record;
    add.u32 v, $6, 1;
    st.volatile.global.u32 [r+{4 * Record.WAITED}], v;
    RAISE:
    atom.relaxed.gpu.global.exch.b64 r, [$5+{8 * State.GIVEN_UP}], 1;
    setp.ne.u64 p, r, 0;
    @p bra DONE;
    st.volatile.global.u32 [record+{4 * Record.CODE}], $6;
    st.volatile.global.u32 [record+{4 * Record.SOURCE}], t;
    st.volatile.global.u32 [record+{4 * Record.INDEX}], $8;
    st.volatile.global.u32 [record+{4 * Record.EPOCH}], $9;
    fence.acq_rel.sys;
    st.volatile.global.u32 [record+{4 * Record.RAISED}], 1;
    DONE:
    bar.sync 0;
    mov.u32 $0, 0;
    }}"""
)


@triton.jit
def any_thread(flag):
    """Whether the flag is set in any thread of the program; also a barrier."""
    if INTERPRET:
        return flag
    found = tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.u32 p, $1, 0;
        bar.red.or.pred p, 0, p;
        selp.u32 $0, 1, 0, p;
        }""",
        "=r,r", [flag.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return found != 0


@triton.jit
def gives_up(state, waited, polls, code, source, index, epoch):
    """Whether a wait that has taken `waited` ns gives up: after its limit, where another wait of this rank
    has given up, or where the host says so (STOP).

    The first one writes the failure record, and each says for whom it waited. A wait that takes long tells
    the host, and goes on. Threads may read different values; all get one answer.
    """
    limit = tl.load(state + STATE_LIMIT)
    record = tl.load(state + STATE_RECORD).to(tl.pointer_type(tl.int32))
    stop = (tl.load(state + STATE_GIVEN_UP, volatile=True) != 0) | (waited >= limit)
    if polls % POLLS_PER_STOP == 0:
        stop = stop | (((tl.load(record + RECORD_STOP, volatile=True) >> source) & 1) != 0)
    stop = any_thread(stop)
    slow = any_thread(waited >= tl.minimum(limit // 2, SLOW_NS))
    if stop:
        if waited >= LONG_NS:
            tl.store(record + RECORD_WAITED + source, code + 1)
        if tl.atomic_xchg(state + STATE_GIVEN_UP, 1, sem="relaxed") == 0:
            tl.store(record + RECORD_CODE, code)
            tl.store(record + RECORD_SOURCE, source)
            tl.store(record + RECORD_INDEX, index)
            tl.store(record + RECORD_EPOCH, epoch.to(tl.int32))
            tl.store(record + RECORD_RAISED, 1)
    elif slow:
        if tl.atomic_xchg(state + STATE_SLOW, 1, sem="relaxed") == 0:
            tl.store(record + RECORD_SLOW, source * SLOW_SOURCE + code + 1)
    return stop
