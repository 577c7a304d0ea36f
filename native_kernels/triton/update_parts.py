"""Parts that the kernels of optimizers share. Pieces, items and slices are those of `update_exchange`.

buckets_of, elements_of   the buckets and the elements of an item
lengths_of, at, slots     how many elements count, and where they lie
tell_started              the part A of a kernel that sends nothing before its first ticket
send_gradients            part A: store items of gradients in the inbox of their owner
wait_for_peers            wait for a signal of each peer
sum_of                    add the gradients of all ranks, in rank order
clip_factor               the factor of all gradients that follows from their norm
updated                   the parameter after a step
hand_round                store parameters here and to all peers
count_kept, count_sums    count an item whose result is kept on this rank, or stored to all peers
copy_parameters           copy what other owners have stored to the parameters
"""

import triton
import triton.language as tl

from .comm import CODES_PER_SITE, COPYING, REDUCING, STATE_TICKETS, begin, signal_all, wait_all
from .embedding_exchange import count_item
from .shares import STATE_STARTED, A, announce, first_share, further, look

LENGTH = tl.constexpr(1024)
"""Elements of a bucket."""
FIELDS = tl.constexpr(5)
"""Words of a tensor: addresses of gradient (0: none) and parameter, number of its first element among the
states of this rank, length, row of its numbers. Elements count in units of UNIT."""
TENSOR_BIT = tl.constexpr(40)
"""A bucket is a word: its number in its tensor, and the tensor from this bit on."""
LINE = tl.constexpr(16)
"""Halves begin at multiples of so many elements."""
BUCKET_MASK = tl.constexpr((1 << 40) - 1)
NUMBERS = tl.constexpr(12)
FP32, FP16 = tl.constexpr(4), tl.constexpr(2)
"""Codes of dtypes; bfloat16 has 1."""
AMSGRAD, MOMENTUM, LAMB = tl.constexpr(1), tl.constexpr(3), tl.constexpr(4)
"""Codes of rules; adam has 0, sgd 2."""


@triton.jit
def buckets_of(words, buckets, owner, item, first, most, W: tl.constexpr, G: tl.constexpr):
    """The buckets of an item: their words, and whether there are any."""
    number = first + item * G + tl.arange(0, G)
    begun = tl.load(words + owner)
    end = tl.minimum(tl.load(words + owner + 1), begun + first + most)
    inside = begun + number < end
    return tl.load(buckets + begun + number, mask=inside, other=0), inside


@triton.jit
def lengths_of(tensor, bucket, inside, UNIT: tl.constexpr):
    """How many elements of buckets count: none of a tensor without a gradient."""
    given = inside & (tl.load(tensor, mask=inside, other=0) != 0)
    units = tl.load(tensor + 3, mask=given, other=0) - bucket * (LENGTH // UNIT)
    return tl.minimum(units, LENGTH // UNIT).to(tl.int32) * UNIT


@triton.jit
def at(address, first, DTYPE: tl.constexpr):
    """Pointers to LENGTH elements each, from numbers `first` on behind 16-byte aligned addresses."""
    of = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), [16])
    return (of + first)[:, None] + tl.arange(0, LENGTH)[None, :]


@triton.jit
def slots(region, half, source, item, most, DTYPE: tl.constexpr, G: tl.constexpr):
    """Pointers to the places of an item of `source` in memory of a rank."""
    to = tl.multiple_of(region.to(tl.pointer_type(DTYPE)), 16) + half
    bucket = source * most + item * G + tl.arange(0, G)
    return to + (bucket.to(tl.int64) * LENGTH)[:, None] + tl.arange(0, LENGTH)[None, :]


@triton.jit
def ratio(rates, row, j: tl.constexpr):
    return tl.load(rates + row * NUMBERS + j)[:, None]


@triton.jit
def elements_of(
    words, buckets, owner, item, first, most, W: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr
):
    """Of each bucket of an item: the number of its tensor, where the words of the tensor lie, its number in
    the tensor, whether there is a bucket; and [G, LENGTH], which elements count."""
    word, inside = buckets_of(words, buckets, owner, item, first, most, W, G)
    number, bucket = word >> TENSOR_BIT, word & BUCKET_MASK
    tensor = words + W + 1 + number * FIELDS
    mask = tl.arange(0, LENGTH)[None, :] < lengths_of(tensor, bucket, inside, UNIT)[:, None]
    return number, tensor, bucket, inside, mask


@triton.jit
def tell_started(state, asked, rank, program, PROGRAMS: tl.constexpr, W: tl.constexpr):
    """A share is nothing but to tell that this rank has started. asked: what `claim` has returned."""
    share = first_share(asked, state, A, PROGRAMS, program, PROGRAMS)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, begin(state))
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, PROGRAMS, program)


@triton.jit
def send_gradients(
    words, buckets, inbox, signals, done, state, asked, first, most, items, slice_items, slices, rank, half,
    first_signal, program,
    PROGRAMS: tl.constexpr, W: tl.constexpr, GRADS: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """A share is every PROGRAMS-th item. GRADS: the dtype of gradients; half: where they go in the inbox."""
    share = first_share(asked, state, A, PROGRAMS, program, PROGRAMS)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, begin(state))
        pushed = tl.full((), -1, tl.int32)
        for unit in range(share, (W - 1) * items, PROGRAMS):
            step, item = unit // items, unit % items
            owner = (rank + 1 + step) % W
            _, tensor, bucket, inside, mask = elements_of(
                words, buckets, owner, item, first, most, W, UNIT, G
            )
            given = at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, GRADS)
            values = tl.load(given, mask=mask, other=0.0)
            # The stores of the item before have arrived by now, so that counting it does not wait.
            if pushed >= 0:
                count_item(done, signals, pushed, slices, slice_items, items, 1, rank, first_signal, W)
            tl.store(slots(tl.load(inbox + owner), half, rank, item, most, GRADS, G), values, mask=mask)
            pushed = step * slices + item // slice_items
        if pushed >= 0:
            count_item(done, signals, pushed, slices, slice_items, items, 1, rank, first_signal, W)
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, PROGRAMS, program)


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
def count_sums(done, signals, item, items, slice_items, slices, rank, first_signal, W: tl.constexpr):
    """Count an item whose parameters are stored; the last one of a slice signals all."""
    tl.debug_barrier()
    piece = item // slice_items
    count = tl.minimum(slice_items, items - piece * slice_items)
    word = done + (W - 1) * slices + piece
    if tl.atomic_add(word, 1, sem="release", scope="gpu") == count - 1:
        tl.atomic_add(word, -count, sem="acquire", scope="gpu")
        signal_all(signals, W, first_signal + (W + rank) * slices + piece, rank)


@triton.jit
def updated(
    p, g, rates, row, scale, m_of, v_of, most_of, place, mask, RULE: tl.constexpr,
):  # fmt: skip
    """The parameter after a step by any rule but LAMB's; the states change. scale: of the gradient, besides
    its sign; place: of the elements among the states."""
    g = g * (scale * ratio(rates, row, 10)) + ratio(rates, row, 1) * p
    if RULE <= AMSGRAD:
        m = tl.load(m_of + place, mask=mask, other=0.0)
        v = tl.load(v_of + place, mask=mask, other=0.0)
        m += ratio(rates, row, 2) * (g - m)
        v = ratio(rates, row, 3) * v + ratio(rates, row, 4) * g * g
        tl.store(m_of + place, m, mask=mask)
        tl.store(v_of + place, v, mask=mask)
        if RULE == AMSGRAD:
            v = tl.maximum(tl.load(most_of + place, mask=mask, other=0.0), v, tl.PropagateNan.ALL)
            tl.store(most_of + place, v, mask=mask)
        root = tl.sqrt_rn(v) * ratio(rates, row, 5) + ratio(rates, row, 6)
        p = ratio(rates, row, 0) * p - ratio(rates, row, 7) * tl.div_rn(m, root)
    else:
        if RULE == MOMENTUM:
            m = tl.load(m_of + place, mask=mask, other=0.0)
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
def copy_parameters(
    words, buckets, finished, arrived, state, unit, first, most, items, slice_items, slices, rank, site, half,
    epoch,
    W: tl.constexpr, PARAMS: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Tickets behind those of the own items. unit: the first of them, which this program has drawn; half:
    where parameters lie in `finished`."""
    own = tl.load(finished + rank)
    code = site * CODES_PER_SITE + COPYING
    while unit < items * W:
        item = (unit - items) // (W - 1)
        source = (rank + 1 + (unit - items) % (W - 1)) % W
        unit = tl.atomic_add(state + STATE_TICKETS, 1).to(tl.int32)
        piece = item // slice_items
        wait_all(arrived + (W + source) * slices + piece, 0, 1, 1, state, code, source, piece, epoch)
        _, tensor, bucket, inside, mask = elements_of(words, buckets, source, item, first, most, W, UNIT, G)
        new = tl.load(slots(own, half, source, item, most, PARAMS, G), mask=mask, other=0.0)
        tl.store(at(tl.load(tensor + 1, mask=inside, other=0), bucket * LENGTH, PARAMS), new, mask=mask)
