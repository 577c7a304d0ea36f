"""The words of `state` and of the failure record, the codes of waits, and the kinds of trace events.

One list for the host, for Triton (`triton/comm.py` makes constexprs of it) and for CUDA C++, where NVRTC gets
each as a macro, such as STATE_EPOCH, WAIT_REDUCING and EVENT_ENDED (`macros`).
"""

from enum import IntEnum
from typing import Final


class State(IntEnum):
    """Words of `PeerMemory.state`, int64. A kernel finds words FINISHED to HELD_ODD 0, and leaves them 0,
    but for one of the last two, which the next call clears."""

    LIMIT = 0
    """Nanoseconds that a wait may take."""
    RECORD = 1
    """Address of the failure record."""
    GIVEN_UP = 2
    """1 once a wait has given up: later waits return at once."""
    EPOCH = 3
    """Number of the last call that ended."""
    FINISHED = 4
    """Programs that `finish` has counted."""
    TICKETS = 5
    """Tickets that were drawn beyond the first one of every program."""
    THROUGH = 6
    """Programs that no longer read counters of peers; the last one clears these counters."""
    JOINED = 7
    """Blocks of strips that `embedding_backward` has added up."""
    CLAIMED_A = 8
    """Shares of which a program has claimed the part that waits for no peer."""
    CLAIMED_B = 9
    """The same of the part that may wait for peers."""
    STARTED = 10
    """Programs that run or have run: the others have not been placed yet."""
    SLOW = 11
    """1 once a wait of the call has told the host that it takes long."""
    HELD_EVEN = 12
    """Of `matmul_words`, which ends its epoch early: what it has claimed in calls with an even epoch."""
    HELD_ODD = 13
    FIRM = 14
    """Programs from this number on are the margin: they leave where a peer is missing."""
    PRESENCE = 16
    """Addresses of the int32 `presence` [W] of every rank, as this rank maps them; up to MOST_RANKS words."""

    LEFT = 8
    """Programs of the margin that have left, of kernels in Triton, which do not count claims of part A."""
    COPIES = 7
    """Tickets for copies of parameters, of kernels of optimizers."""
    ZEROED = 6
    """Shares of `embedding_backward` whose gradients are cleared."""


STATE_WORDS: Final = 24
"""Words of `PeerMemory.state` before the claims."""

MOST_SHARES: Final = 8192
"""Most programs of a kernel that claims shares. The claims, int32 [2, MOST_SHARES], lie behind the words of
`state`: the first row for the parts of shares that wait for no peer, the second one for those that may. 0
between calls, and while nobody has claimed. Behind them the same two rows of kernels whose claims are tags of
the call's epoch, which nobody sets back."""

STATE_LENGTH: Final = STATE_WORDS + MOST_SHARES * 2
"""Length of `PeerMemory.state`."""

MOST_TERMS: Final = 4
"""Most products that a kernel adds up in one accumulator."""

MOST_WEIGHTS: Final = 4
"""Most weights by which a kernel of all_gather_matmul multiplies while the parts arrive."""

MOST_TAIL_OPERANDS: Final = 6
MOST_TAIL_RESULTS: Final = 4
"""Most operands and results of a tail that a kernel applies."""

MOST_TAIL_COLUMNS: Final = 16384
"""Most columns of a row to which one program applies a tail."""

MOST_TOKEN_ROWS: Final = 16
"""Most rows of experts that a kernel adds up for a token."""

TAIL_UNIT: Final = 8
"""The columns of a row with a tail are a multiple of this: 16 bytes of 16-bit values."""

YIELD_NS: Final = 1_000_000
"""How long programs of the margin wait for a peer that has not started the call."""


class Record(IntEnum):
    """Words of the failure record, int32 in pinned host memory; RAISED is written last."""

    RAISED = 0
    CODE = 1
    """`site * CODES_PER_SITE` + one of `Wait`."""
    SOURCE = 2
    """The rank that did not come."""
    INDEX = 3
    """The number of the tile, part or slice that was waited for."""
    EPOCH = 4
    STOP = 5
    """The host sets bit r to make waits for rank r give up. Waits read it now and then."""
    SLOW = 8
    """Code + 1 of a wait that takes long and goes on, with the rank from bit SLOW_SOURCE_BIT on. The host
    sets it back to 0."""
    WAITED = 16
    """The first of one word for each rank: code + 1 of a wait for that rank that gave up, after LONG_NS at
    least. The lost rank is the one for which others wait and that waits for no rank itself."""


RECORD_WORDS: Final = 32
"""Length of `PeerMemory.record`."""

BAD_INPUT_WORD: Final = 3
"""The word of the record, counted in int64, in which kernels of embedding bags report invalid input, and all
kernels report calls that overlap."""

SLOW_SOURCE_BIT: Final = 28
LONG_NS: Final = 1_000_000
"""A wait that gives up after less time began when other waits of its rank had given up. It does not count."""
SLOW_NS: Final = 60_000_000_000
"""A wait tells the host that it takes long after this time, or after half of its limit."""
POLLS_PER_STOP: Final = 4096
"""Polls between two reads of STOP, which lies in host memory. So many polls take LONG_NS at least."""


class Wait(IntEnum):
    """What a wait is for, or what is wrong with the input."""

    TELLING = 0
    """The rows of a peer's send buffer or inbox that belong to this rank."""
    REDUCING = 1
    """Partial sums."""
    COPYING = 2
    """Sums that another rank computes, which may wait itself."""
    GATHERING = 3
    """A slice of x, or a tile of the product of another rank."""
    POOLING = 4
    """Pooled rows."""
    BAD_INDEX = 5
    COMBINING = 6
    """Rows that a peer's experts computed."""
    GRADIENTS = 7
    """Gradients of bags."""
    DISPATCHING = 8
    """Rows for the experts of this rank."""
    BAD_BAG = 9
    OVERLAP = 10
    """Another call of the group ran on this GPU at the same time."""


CODES_PER_SITE: Final = 16


class Event(IntEnum):
    """Kinds of events in a trace; an event is the end of what it names."""

    BEGUN = 1
    WAITED = 2
    COMPUTED = 3
    DRAINED = 4
    REDUCED = 5
    COPIED = 6
    PUSHED = 7
    ENDED = 8


def macros() -> dict[str, int]:
    """All names for CUDA C++."""
    lists = {"STATE": State, "RECORD": Record, "WAIT": Wait, "EVENT": Event}
    named = {
        f"{prefix}_{name}": int(value)
        for prefix, words in lists.items()
        for name, value in words.__members__.items()
    }
    return named | {
        "STATE_WORDS": STATE_WORDS,
        "MOST_SHARES": MOST_SHARES,
        "CODES_PER_SITE": CODES_PER_SITE,
        "BAD_INPUT_WORD": BAD_INPUT_WORD,
        "YIELD_NS": YIELD_NS,
        "SLOW_SOURCE_BIT": SLOW_SOURCE_BIT,
        "LONG_NS": LONG_NS,
        "SLOW_NS": SLOW_NS,
        "POLLS_PER_STOP": POLLS_PER_STOP,
    }
