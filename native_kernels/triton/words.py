"""Flag-in-payload: an element of 16 or 32 bits is its own flag (`cuda/include/words.cuh` has pairs of 16
bits).

    word_of     the words of elements, to be stored to a peer: no signal, no barrier
    value_of    the elements in words
    take        words of one rank, once they are there
    take_sum    the sum of the elements of all ranks, once they are there

A word is the bits of an element with the sign flipped. It is 0 for -0 only, which is sent as +0. Memory for
words is 0 between calls: who takes words sets them to 0. Two halves that calls use in turn are enough: a peer
stores to the half of call e again in call e + 2. It starts that call after it has taken words that this rank
sent in call e + 1, after the end of call e. So in each call every rank sends words to every other one.

Unlike a packet, which carries the epoch, a word may be sent once in a call, and taken once. So programs claim
what they send, and draw tickets for what they take.
"""

import triton
import triton.language as tl

from .comm import INTERPRET, UNTIMED, nanoseconds
from .patience import any_thread, gives_up

APART = tl.constexpr(64)
"""After a poll in vain, one group of words of so many is polled until all of these are there. Polls of all
words would take much of what the L2 cache can deliver."""
LINE = tl.constexpr(16)
"""Halves of the memory for words begin at multiples of so many bytes."""
LONGER_NS = tl.constexpr(1_000_000)
"""A wait for what an owner has made lasts so much longer than others: the owner may wait in vain for a rank,
and this rank for the same one. So it names that rank, and not the owner."""
POLLED_BITS = tl.constexpr(64)
"""Of several ranks, that `take_sum` loads at once for an element."""


@triton.jit
def flipped(bits):
    """Bits, as integers, with the other sign."""
    return bits ^ (-0x80000000 if bits.dtype.primitive_bitwidth == 32 else -0x8000)


@triton.jit
def word_of(values):
    """The words of floating-point values; never 0."""
    if values.dtype.primitive_bitwidth == 32:
        word = flipped(values.to(tl.int32, bitcast=True))
    else:
        word = flipped(values.to(tl.int16, bitcast=True))
    return tl.where(word == 0, flipped(word), word)


@triton.jit
def value_of(words, DTYPE: tl.constexpr):
    """The values that `word_of` got, with +0 for -0."""
    return flipped(words).to(DTYPE, bitcast=True)


@triton.jit
def place_of_words(region, begun, DTYPE: tl.constexpr):
    """A pointer to words for elements of DTYPE. region: an address; begun: bytes before them."""
    bits: tl.constexpr = tl.int32 if DTYPE.primitive_bitwidth == 32 else tl.int16
    return tl.multiple_of((region + begun).to(tl.pointer_type(bits)), 16)


@triton.jit
def take(at, sent, groups, source, world, longer, state, code, index, epoch):
    """The words at `at` of this rank's memory once they are there, which are then 0; and 1, or -1 if the wait
    gives up.

    sent: which of them `source` sends; groups: numbers of neighbours that a thread loads together; longer: ns
    that this wait lasts longer than others.
    """
    # The first poll stands in front of the loop: where the loop alone makes `words`, Triton 3.6 fails to
    # compile some kernels.
    words = tl.load(at, mask=sent, other=1, volatile=True)
    polls, timed = _no_polls()
    found, polls_all, polls, timed = _next_poll(
        tl.min(tl.where(words == 0, source, world)), world, 1, polls, timed, longer, state, code, index, epoch
    )
    while found == 0:
        words = tl.load(at, mask=_polled(sent, groups, polls_all), other=1, volatile=True)
        late = tl.min(tl.where(words == 0, source, world))
        found, polls_all, polls, timed = _next_poll(
            late, world, polls_all, polls, timed, longer, state, code, index, epoch
        )
    tl.store(at, 0, mask=sent)
    return words, found


@triton.jit
def take_sum(
    at, stride, own, sent, groups, rank, state, code, index, epoch, W: tl.constexpr, DTYPE: tl.constexpr,
    IS_STORED: tl.constexpr,
):  # fmt: skip
    """The sum over all ranks, in their order, fp32, and 1, or -1 if the wait gives up.

    at: pointers to the words of rank 0; those of the next rank lie `stride` behind; own: the elements of this
    rank; IS_STORED: they lie there like those of peers. All else is as `take` has it.
    """
    at_once: tl.constexpr = POLLED_BITS // (DTYPE.primitive_bitwidth * (1 if W <= 4 else 2))
    total = tl.zeros(at.shape, tl.float32)
    arrived = tl.full((), 1, tl.int32)
    for first in tl.static_range(0, W, at_once):
        before = total
        total, late = _poll_sum(before, at, stride, own, sent, rank, first, at_once, W, DTYPE, IS_STORED)
        polls, timed = _no_polls()
        found, polls_all, polls, timed = _next_poll(late, W, 1, polls, timed, 0, state, code, index, epoch)
        while found == 0:
            wanted = _polled(sent, groups, polls_all)
            total, late = _poll_sum(
                before, at, stride, own, wanted, rank, first, at_once, W, DTYPE, IS_STORED
            )
            found, polls_all, polls, timed = _next_poll(
                late, W, polls_all, polls, timed, 0, state, code, index, epoch
            )
        arrived = tl.minimum(arrived, found)
    for r in tl.static_range(W):
        tl.store(at + r * stride, 0, mask=sent if IS_STORED else sent & (r != rank))
    return total, arrived


@triton.jit
def _poll_sum(
    total, at, stride, own, wanted, rank, FIRST: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr,
    DTYPE: tl.constexpr, IS_STORED: tl.constexpr,
):  # fmt: skip
    """Adds the elements of COUNT ranks, from rank FIRST on, to `total`. Returns the sum, and the lowest of
    these ranks whose words are missing, or W."""
    late = tl.full(at.shape, W, tl.int32)
    for i in tl.static_range(COUNT):
        if FIRST + i < W:
            there = at + (FIRST + i) * stride
            if IS_STORED:
                word = tl.load(there, mask=wanted, other=1, volatile=True)
                value = value_of(word, DTYPE)
            else:
                is_own = FIRST + i == rank
                word = tl.load(there, mask=wanted & (is_own == 0), other=1, volatile=True)
                value = tl.where(is_own, own, value_of(word, DTYPE))
            late = tl.where(word == 0, tl.minimum(late, FIRST + i), late)
            total += value.to(tl.float32)
    return total, tl.min(late)


@triton.jit
def _no_polls():
    """How many polls there were, and when the first of them was timed."""
    return tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)


@triton.jit
def _polled(sent, groups, polls_all):
    """The words that the next poll loads."""
    return sent & ((polls_all != 0) | (groups % APART == 0))


@triton.jit
def _next_poll(late, world, polls_all, polls, timed, longer, state, code, index, epoch):
    """The state of a wait after a poll. late: the lowest rank whose words are missing, or `world`; threads
    may see different values; polls_all: whether all words were polled.

    Returns 1 if all words are there, -1 if the wait gives up, or 0; whether the next poll loads all; how many
    polls there were; when the first of them was timed.
    """
    absent = any_thread(late < world)
    found = tl.where(absent, 0, polls_all)
    polls += 1
    if absent & (polls % UNTIMED == 0):
        now = nanoseconds()
        if polls == UNTIMED:
            timed = now
        waited = now - timed
        if INTERPRET:
            waited = polls * now
        if gives_up(state, waited - longer, polls, code, late, index, epoch):
            found = tl.full((), -1, tl.int32)
    return found, tl.where(absent, 0, 1), polls, timed
