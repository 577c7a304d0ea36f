"""Parts that the kernels of optimizers share. Pieces, items and slices are those of `update_exchange`.

buckets_of, elements_of   the buckets and the elements of an item
lengths_of, at, slots     how many elements count, and where they lie
lanes                     the elements of a bucket, as threads have them
parameters_of             the parameters of an item, and where their states lie
tell_started              the part A of a kernel that sends nothing before its first ticket
send_gradients            part A: store items of gradients in the inbox of their owner
wait_for_peers            wait for a signal of each peer
sum_of                    add the gradients of all ranks, in rank order
clip_factor               the factor of all gradients that follows from their norm
states_of, updated        the states, and the parameter after a step
hand_round                store parameters here and to all peers
first_copy, copy_item     copy an item that another owner has stored to the parameters
copy_parameters           copy all that are left
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
from .slices import count_item

LENGTH = tl.constexpr(1024)
"""Elements of a bucket."""
FIELDS = tl.constexpr(5)
"""Words of a tensor: addresses of gradient (0: none) and parameter, number of its first element among the
states of this rank, length, row of its numbers. Elements count in units of UNIT."""
TENSOR_BIT = tl.constexpr(40)
"""A bucket is a word: its number in its tensor, and the tensor from this bit on."""
VECTOR = tl.constexpr(4)
"""Elements of a thread that lie next to each other."""
MOVED = tl.constexpr(4)
"""Items that are sent, or copied, at once, since that takes few registers."""
MOST_POLLS = tl.constexpr(256)
"""Of a wait for sums: some 200 us."""
LINE = tl.constexpr(16)
"""Halves begin at multiples of so many elements."""
BUCKET_MASK = tl.constexpr((1 << 40) - 1)
NUMBERS = tl.constexpr(12)
FP32, FP16 = tl.constexpr(4), tl.constexpr(2)
"""Codes of dtypes; bfloat16 has 1."""
AMSGRAD, MOMENTUM, LAMB = tl.constexpr(1), tl.constexpr(3), tl.constexpr(4)
"""Codes of rules; adam has 0, sgd 2."""


@triton.jit
def buckets_of(words, buckets, owner, item, first, most, G: tl.constexpr):
    """The words of the buckets of an item; -1 where there is none. They are loaded for the next item while
    the elements of this one are on their way: a load for its own item would be one latency more."""
    number = first + item * G + tl.arange(0, G)
    begun = tl.load(words + owner)
    end = tl.minimum(tl.load(words + owner + 1), begun + first + most)
    return tl.load(buckets + begun + number, mask=begun + number < end, other=-1)


@triton.jit
def lengths_of(tensor, bucket, inside, UNIT: tl.constexpr):
    """How many elements of buckets count: none of a tensor without a gradient."""
    given = tl.load(tensor, mask=inside, other=0) != 0
    units = tl.load(tensor + 3, mask=inside, other=0) - bucket * (LENGTH // UNIT)
    return tl.where(given, tl.minimum(units, LENGTH // UNIT), 0).to(tl.int32) * UNIT


@triton.jit
def lanes():
    """The numbers of the elements of a bucket, [1, LENGTH]. A thread has VECTOR neighbours in every dtype, so
    that gradients and parameters of 2 bytes have the layout of their states."""
    return tl.max_contiguous(tl.arange(0, LENGTH), [VECTOR])[None, :]


@triton.jit
def at(address, first, DTYPE: tl.constexpr):
    """Pointers to LENGTH elements each, from numbers `first` on behind 16-byte aligned addresses."""
    of = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), [16])
    return (of + first)[:, None] + lanes()


@triton.jit
def slots(region, half, source, item, most, DTYPE: tl.constexpr, G: tl.constexpr):
    """Pointers to the places of an item of `source` in memory of a rank."""
    to = tl.multiple_of(region.to(tl.pointer_type(DTYPE)), 16) + half
    bucket = source * most + item * G + tl.arange(0, G)
    return to + (bucket.to(tl.int64) * LENGTH)[:, None] + lanes()


@triton.jit
def ratio(rates, row, j: tl.constexpr):
    return tl.load(rates + row * NUMBERS + j)[:, None]


@triton.jit
def elements_of(words, word, W: tl.constexpr, UNIT: tl.constexpr):
    """What lies behind the words of buckets that `buckets_of` has loaded. Returns for each bucket the number
    of its tensor, a pointer to the words of that tensor, the number of the bucket in the tensor, and whether
    there is a bucket; and a mask of the elements that count, [G, LENGTH]."""
    inside = word >= 0
    number, bucket = tl.where(inside, word >> TENSOR_BIT, 0), tl.where(inside, word & BUCKET_MASK, 0)
    tensor = words + W + 1 + number * FIELDS
    mask = tl.arange(0, LENGTH)[None, :] < lengths_of(tensor, bucket, inside, UNIT)[:, None]
    return number, tensor, bucket, inside, mask


@triton.jit
def parameters_of(
    tensor, bucket, inside, mask, master_of, PARAMS: tl.constexpr, UNIT: tl.constexpr, MASTER: tl.constexpr
):
    """What `elements_of` has found: pointers to the parameters, their numbers among the states of this rank,
    the row of the numbers, and the parameters in fp32, with MASTER the master weights."""
    param = at(tl.load(tensor + 1, mask=inside, other=0), bucket * LENGTH, PARAMS)
    begun = tl.load(tensor + 2, mask=inside, other=0) * UNIT + bucket * LENGTH
    place = begun[:, None] + lanes()
    row = tl.load(tensor + 4, mask=inside, other=0)
    if MASTER:
        p = tl.load(master_of + place, mask=mask, other=0.0)
    else:
        p = tl.load(param, mask=mask, other=0.0).to(tl.float32)
    return param, place, row, p


@triton.jit
def tell_started(state, asked, rank, program, PROGRAMS: tl.constexpr, W: tl.constexpr):
    """A share is nothing but to tell that this rank has started. asked: what `claim` has returned."""
    share = first_share(asked, state, A, PROGRAMS, program, PROGRAMS)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, begin(state))
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, PROGRAMS, program)


@triton.jit
def item_and_peer(unit, rank, W: tl.constexpr):
    """The item and the peer of number `unit` of the moves between this rank and its peers. Consecutive moves
    are for different peers, so that no peer waits until another one has all its items."""
    return unit // (W - 1), (rank + 1 + unit % (W - 1)) % W


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
    words, buckets, inbox, signals, done, state, asked, first, most, items, slice_items, slices, rank, half,
    first_signal, program,
    PROGRAMS: tl.constexpr, SENDERS: tl.constexpr, W: tl.constexpr, GRADS: tl.constexpr, UNIT: tl.constexpr,
    G: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A unit is MOVED items for one owner, and a share is every SENDERS-th unit. GRADS: the dtype of
    gradients; half: where they go in the inbox; AHEAD: items that are sent before as many are summed."""
    share = first_share(asked, state, A, SENDERS, program, PROGRAMS)
    units, slice_units = tl.cdiv(items, MOVED), slice_items // MOVED
    most_polls = tl.full((), MOST_POLLS, tl.int32)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, begin(state))
        pushed = tl.full((), -1, tl.int32)
        item, owner = item_and_peer(share, rank, W)
        word = buckets_of(words, buckets, owner, item, first, most, G * MOVED)
        for unit in range(share, (W - 1) * units, SENDERS):
            item, owner = item_and_peer(unit, rank, W)
            most_polls = wait_for_sums(state, item * MOVED, AHEAD, most_polls)
            _, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
            next_item, next_owner = item_and_peer(unit + SENDERS, rank, W)
            word = buckets_of(words, buckets, next_owner, next_item, first, most, G * MOVED)
            given = at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, GRADS)
            values = tl.load(given, mask=mask, other=0.0)
            # The stores of the item before have arrived by now, so that counting it does not wait.
            if pushed >= 0:
                count_item(done, signals, pushed, units, slice_units, slices, rank, first_signal, W)
            to = slots(tl.load(inbox + owner), half, rank, item, most, GRADS, G * MOVED)
            tl.store(to, values, mask=mask)
            pushed = unit % (W - 1) * slices + item // slice_units
        if pushed >= 0:
            count_item(done, signals, pushed, units, slice_units, slices, rank, first_signal, W)
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, SENDERS, program)


@triton.jit
def wait_for_peers(counters, stride, state, rank, site, index, epoch, W: tl.constexpr):
    """Wait until all peers have signalled; a rank has one of the counters, `stride` apart."""
    code = site * CODES_PER_SITE + REDUCING
    wait_all(counters, stride, rank, 1, state, code, 0, index, epoch)
    after = counters + (rank + 1) * stride
    wait_all(after, stride, W - 1 - rank, 1, state, code, rank + 1, index, epoch)


@triton.jit
def sum_of(own, half, mine, mask, item, most, rank, W: tl.constexpr, GRADS: tl.constexpr, G: tl.constexpr):
    """In fp32. own: the inbox of this rank; mine: pointers to its own gradients."""
    total = tl.zeros((G, LENGTH), tl.float32)
    for r in tl.range(0, W, loop_unroll_factor=2):
        theirs = slots(own, half, r, item, most, GRADS, G)
        total += tl.load(tl.where(r == rank, mine, theirs), mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def clip_factor(norm, max_norm):
    """1 if `max_norm` is 0."""
    factor = tl.full((), 1.0, tl.float32)
    if max_norm != 0:
        limit = max_norm / (tl.load(norm).to(tl.float64) + 1e-6)
        factor = tl.minimum(limit, tl.full((), 1.0, tl.float64), tl.PropagateNan.ALL).to(tl.float32)
    return factor


@triton.jit
def count_kept(word):
    """How many there were before."""
    tl.debug_barrier()
    return tl.atomic_add(word, 1, sem="release", scope="gpu")


@triton.jit
def states_of(m_of, v_of, most_of, place, mask, RULE: tl.constexpr):
    """The states of a rule, 0 where it has none. place: of the elements among the states."""
    m, v, most = 0.0, 0.0, 0.0
    if (RULE <= AMSGRAD) | (RULE == MOMENTUM):
        m = tl.load(m_of + place, mask=mask, other=0.0)
    if RULE <= AMSGRAD:
        v = tl.load(v_of + place, mask=mask, other=0.0)
    if RULE == AMSGRAD:
        most = tl.load(most_of + place, mask=mask, other=0.0)
    return m, v, most


@triton.jit
def updated(
    p, g, m, v, most, rates, row, scale, m_of, v_of, most_of, place, mask, RULE: tl.constexpr,
):  # fmt: skip
    """The parameter after a step by any rule but LAMB's; the states are stored. m, v, most: what `states_of`
    has loaded; scale: of the gradient, besides its sign."""
    g = g * (scale * ratio(rates, row, 10)) + ratio(rates, row, 1) * p
    if RULE <= AMSGRAD:
        m += ratio(rates, row, 2) * (g - m)
        v = ratio(rates, row, 3) * v + ratio(rates, row, 4) * g * g
        tl.store(m_of + place, m, mask=mask)
        tl.store(v_of + place, v, mask=mask)
        if RULE == AMSGRAD:
            v = tl.maximum(most, v, tl.PropagateNan.ALL)
            tl.store(most_of + place, v, mask=mask)
        root = tl.sqrt_rn(v) * ratio(rates, row, 5) + ratio(rates, row, 6)
        p = ratio(rates, row, 0) * p - ratio(rates, row, 7) * tl.div_rn(m, root)
    else:
        if RULE == MOMENTUM:
            m = ratio(rates, row, 2) * m + ratio(rates, row, 3) * g
            tl.store(m_of + place, m, mask=mask)
            g = ratio(rates, row, 4) * g + ratio(rates, row, 5) * m
        p -= ratio(rates, row, 0) * g
    return p


@triton.jit
def hand_round(
    new, param, mask, item, finished, half, rank, most, W: tl.constexpr, PARAMS: tl.constexpr, G: tl.constexpr
):
    """Store the parameters of an item, here and in `finished` of all peers."""
    tl.store(param, new, mask=mask)
    for step in range(W - 1):
        to = slots(tl.load(finished + (rank + 1 + step) % W), half, rank, item, most, PARAMS, G)
        tl.store(to, new, mask=mask)


@triton.jit
def first_copy(state, unit):
    """The first ticket of a copy; none for a program that has no ticket `unit` since it leaves."""
    copy = tl.full((), ENDLESS, tl.int32)
    if unit != ENDLESS:
        copy = drawn(draw(state + STATE_COPIES))
    return copy


@triton.jit
def are_there(arrived, ticket, items, slice_items, slices, rank, W: tl.constexpr):
    """Not 0 if what `copy_item` would wait for has arrived; threads may see different values. 0 behind the
    last ticket."""
    item, source = item_and_peer(ticket, rank, W)
    word = arrived + (W + source) * slices + item // (slice_items // MOVED)
    return tl.load(word, mask=ticket < tl.cdiv(items, MOVED) * (W - 1), other=0, volatile=True)


@triton.jit
def copy_item(
    words, buckets, finished, arrived, state, ticket, first, most, slice_items, slices, rank, site, half,
    epoch,
    W: tl.constexpr, PARAMS: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Copy MOVED items that a peer has stored to the parameters, once they are there. Returns the next
    ticket. half: where parameters lie in `finished`."""
    item, source = item_and_peer(ticket, rank, W)
    word = buckets_of(words, buckets, source, item, first, most, G * MOVED)
    further_ticket = draw(state + STATE_COPIES)
    piece, code = item // (slice_items // MOVED), site * CODES_PER_SITE + COPYING
    wait_all(arrived + (W + source) * slices + piece, 0, 1, 1, state, code, source, piece, epoch)
    _, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
    there = slots(tl.load(finished + rank), half, source, item, most, PARAMS, G * MOVED)
    new = tl.load(there, mask=mask, other=0.0)
    tl.store(at(tl.load(tensor + 1, mask=inside, other=0), bucket * LENGTH, PARAMS), new, mask=mask)
    return drawn(further_ticket)


@triton.jit
def copy_parameters(
    words, buckets, finished, arrived, state, ticket, first, most, items, slice_items, slices, rank, site,
    half, epoch,
    W: tl.constexpr, PARAMS: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """All copies that are left. ticket: what this program has drawn."""
    while ticket < tl.cdiv(items, MOVED) * (W - 1):
        ticket = copy_item(
            words, buckets, finished, arrived, state, ticket, first, most, slice_items, slices, rank, site,
            half, epoch, W, PARAMS, UNIT, G,
        )  # fmt: skip
