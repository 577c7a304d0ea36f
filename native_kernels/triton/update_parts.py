"""Parts that the kernels of a step in several launches share. Pieces, items and slices are those of
`update_exchange`.

    elements_of       the elements of an item
    tell_started      the part A of a kernel that sends nothing before its first ticket
    send_gradients    part A: store items of gradients in the inbox of their owner
    wait_for_peers    wait for a signal of each peer
    sum_of            add the gradients of all ranks, in rank order
    clip_factor       the factor of all gradients that follows from their norm
    count_kept        count an item whose result is kept on this rank
    copy_parameters   copy what other owners have stored to the parameters
"""

import triton
import triton.language as tl

from .comm import CODES_PER_SITE, COPYING, REDUCING, STATE_TICKETS, begin, wait_all
from .embedding_exchange import count_item
from .shares import STATE_STARTED, A, announce, first_share, further, look
from .update_exchange import (
    BUCKET_MASK,
    FIELDS,
    LENGTH,
    TENSOR_BIT,
    at,
    buckets_of,
    lengths_of,
    slots,
)


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
