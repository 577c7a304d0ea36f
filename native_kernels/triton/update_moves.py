"""What travels between ranks in the kernels of optimizers, as words (`words.py`). Pieces and items are those
of `update_exchange`.

sent_of                 the elements of an item that are sent
slots                   where the words of an item lie
send_gradients          part A: send items of gradients to their owner
tell_started            part A of a kernel that sends nothing before its first ticket
sum_of                  take the gradients of all ranks, and add them in rank order
hand_round              store parameters here, and send them to all peers
first_copy, are_there   the first copy of a program, and whether a copy has arrived
copy_item               take an item of another owner, and store it to the parameters
copy_parameters         copy all that are left
count_kept              count what this rank keeps
wait_for_peers          wait for a signal of each peer, where ranks exchange numbers

A rank has two halves of words. A half begins with two regions [W, buckets of a piece, 1024]: gradients, then
parameters, by their source.
"""

import triton
import triton.language as tl

from .comm import (
    CODES_PER_SITE,
    COPYING,
    REDUCING,
    STATE_COPIES,
    STATE_TICKETS,
    begin,
    draw,
    drawn,
    wait_all,
)
from .embedding_exchange import ENDLESS
from .patience import any_thread
from .shares import STATE_STARTED, A, announce, first_share, further, look
from .update_parts import LENGTH, VECTOR, at, buckets_of, elements_of, item_and_peer, lanes
from .words import LONGER_NS, place_of_words, take, take_sum, value_of, word_of

MOVED = tl.constexpr(4)
"""Items that are sent, or copied, at once, since that takes few registers."""
MOST_POLLS = tl.constexpr(256)
"""Of a wait for sums: some 200 us."""


@triton.jit
def sent_of(mask, item, items, COUNT: tl.constexpr):
    """The elements that are sent of those that count: also the first ones of each item, so that every rank
    hears from every other one in each call."""
    has_place = item + tl.arange(0, COUNT) < items
    return mask | (has_place[:, None] & (lanes() < VECTOR))


@triton.jit
def slots(inboxes, owner, begun, source, item, items, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    """Pointers to the words of COUNT items of `source`, in memory of `owner`. begun: bytes before the
    region."""
    to = place_of_words(tl.load(inboxes + owner), begun, DTYPE)
    bucket = source * items + item + tl.arange(0, COUNT)
    return to + (bucket.to(tl.int64) * LENGTH)[:, None] + lanes()


@triton.jit
def wait_for_sums(state, item, ahead, most_polls):
    """Wait until this rank has begun to sum item `item - ahead`. Peers send at the same pace, so an item is
    still in the L2 cache when its owner sums it. Returns the most polls of the next wait: 0 after a wait in
    vain, since the sums may wait for a peer, or for a place on the GPU."""
    polls = 0
    while any_thread(look(state, STATE_TICKETS) + ahead < item) & (polls < most_polls):
        polls += 1
    return tl.where(polls < most_polls, most_polls, 0)


@triton.jit
def send_gradients(
    words, buckets, inboxes, state, asked, first, items, rank, begun, program,
    PROGRAMS: tl.constexpr, SENDERS: tl.constexpr, W: tl.constexpr, GRADS: tl.constexpr, UNIT: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """A unit is MOVED items for one owner, and a share is every SENDERS-th unit. GRADS: the dtype of
    gradients; begun: bytes before their words; AHEAD: items that are sent before as many are summed."""
    share = first_share(asked, state, A, SENDERS, program, PROGRAMS)
    units = tl.cdiv(items, MOVED)
    most_polls = tl.full((), MOST_POLLS, tl.int32)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, begin(state))
        item, owner = item_and_peer(share, rank, W)
        word = buckets_of(words, buckets, owner, item * MOVED, first, items, MOVED)
        for unit in range(share, (W - 1) * units, SENDERS):
            item, owner = item_and_peer(unit, rank, W)
            most_polls = wait_for_sums(state, item * MOVED, AHEAD, most_polls)
            _, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
            next_item, next_owner = item_and_peer(unit + SENDERS, rank, W)
            word = buckets_of(words, buckets, next_owner, next_item * MOVED, first, items, MOVED)
            given = at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, GRADS)
            values = tl.load(given, mask=mask, other=0.0)
            to = slots(inboxes, owner, begun, rank, item * MOVED, items, GRADS, MOVED)
            tl.store(to, word_of(values), mask=sent_of(mask, item * MOVED, items, MOVED))
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, SENDERS, program)


@triton.jit
def tell_started(state, asked, rank, program, PROGRAMS: tl.constexpr, W: tl.constexpr):
    """A share is nothing but to tell that this rank has started. asked: what `claim` has returned."""
    share = first_share(asked, state, A, PROGRAMS, program, PROGRAMS)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, begin(state))
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, PROGRAMS, program)


@triton.jit
def sum_of(
    inboxes, begun, mine, mask, item, items, state, rank, site, epoch, W: tl.constexpr, GRADS: tl.constexpr
):  # fmt: skip
    """The sum of the gradients of all ranks, fp32, once their words are there; then which elements may
    change, and which are sent: none if a wait gives up. mine: pointers to the gradients of this rank."""
    sent = sent_of(mask, item, items, 1)
    own = tl.load(mine, mask=mask, other=0.0)
    total, arrived = take_sum(
        slots(inboxes, rank, begun, 0, item, items, GRADS, 1), tl.cast(items, tl.int64) * LENGTH, own, sent,
        lanes() // VECTOR, rank, state, site * CODES_PER_SITE + REDUCING, item, epoch, W, GRADS, False,
    )  # fmt: skip
    mask &= arrived > 0
    return tl.where(mask, total, 0.0), mask, sent & (arrived > 0)


@triton.jit
def hand_round(
    new, param, mask, sent, item, inboxes, begun, rank, items, W: tl.constexpr, PARAMS: tl.constexpr
):  # fmt: skip
    """Store the parameters of an item here, and send them to all peers. begun: bytes before their words."""
    words = word_of(new)
    tl.store(param, value_of(words, PARAMS), mask=mask)  # with +0 for -0, as the peers
    for step in range(W - 1):
        to = slots(inboxes, (rank + 1 + step) % W, begun, rank, item, items, PARAMS, 1)
        tl.store(to, words, mask=sent)


@triton.jit
def first_copy(state, unit):
    """The first ticket of a copy; none for a program that has no ticket `unit` since it leaves."""
    copy = tl.full((), ENDLESS, tl.int32)
    if unit != ENDLESS:
        copy = drawn(draw(state + STATE_COPIES))
    return copy


@triton.jit
def are_there(inboxes, begun, ticket, items, rank, W: tl.constexpr, PARAMS: tl.constexpr):
    """Whether what `copy_item` waits for has probably arrived; threads may see different values. Not so
    behind the last ticket."""
    item, source = item_and_peer(ticket, rank, W)
    number = item * MOVED + tl.arange(0, MOVED)
    first = (
        place_of_words(tl.load(inboxes + rank), begun, PARAMS)
        + (source * items + number).to(tl.int64) * LENGTH
    )
    is_ticket = ticket < tl.cdiv(items, MOVED) * (W - 1)
    words = tl.load(first, mask=is_ticket & (number < items), other=1, volatile=True)
    return is_ticket & (tl.min((words != 0).to(tl.int32)) != 0)


@triton.jit
def copy_item(
    words, buckets, inboxes, state, ticket, first, items, rank, site, begun, epoch,
    W: tl.constexpr, PARAMS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Take MOVED items that a peer has sent, once they are there, and store them to the parameters. Returns
    the next ticket. begun: bytes before the words of parameters."""
    item, source = item_and_peer(ticket, rank, W)
    word = buckets_of(words, buckets, source, item * MOVED, first, items, MOVED)
    further_ticket = draw(state + STATE_COPIES)
    _, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
    there = slots(inboxes, rank, begun, source, item * MOVED, items, PARAMS, MOVED)
    new, found = take(
        there, sent_of(mask, item * MOVED, items, MOVED), lanes() // VECTOR, source, W, LONGER_NS, state,
        site * CODES_PER_SITE + COPYING, item, epoch,
    )  # fmt: skip
    param = at(tl.load(tensor + 1, mask=inside, other=0), bucket * LENGTH, PARAMS)
    tl.store(param, value_of(new, PARAMS), mask=mask & (found > 0))
    return drawn(further_ticket)


@triton.jit
def copy_parameters(
    words, buckets, inboxes, state, ticket, first, items, rank, site, begun, epoch,
    W: tl.constexpr, PARAMS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """All copies that are left. ticket: what this program has drawn."""
    while ticket < tl.cdiv(items, MOVED) * (W - 1):
        ticket = copy_item(
            words, buckets, inboxes, state, ticket, first, items, rank, site, begun, epoch, W, PARAMS, UNIT
        )


@triton.jit
def count_kept(word):
    """How many there were before."""
    tl.debug_barrier()
    return tl.atomic_add(word, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_peers(counters, state, rank, site, epoch, W: tl.constexpr):
    """Wait until all peers have signalled; a rank has one of the counters."""
    code = site * CODES_PER_SITE + REDUCING
    wait_all(counters, 1, rank, 1, state, code, 0, 0, epoch)
    wait_all(counters + rank + 1, 1, W - 1 - rank, 1, state, code, rank + 1, 0, epoch)
