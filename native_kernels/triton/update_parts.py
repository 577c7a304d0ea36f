"""Parts that the kernels of optimizers share: elements, parameters and states. Pieces and items are those of
`update_exchange`; `update_moves.py` has what travels.

buckets_of, elements_of   the buckets and the elements of an item
lengths_of, at            how many elements count, and where they lie
lanes                     the elements of a bucket, as threads have them
parameters_of             the parameters of an item, and where their states lie
clip_factor               the factor of all gradients that follows from their norm
states_of, updated        the states, and the parameter after a step
item_and_peer             the moves between this rank and its peers
"""

import triton
import triton.language as tl

LENGTH = tl.constexpr(1024)
"""Elements of a bucket."""
FIELDS = tl.constexpr(5)
"""Words of a tensor: addresses of gradient (0: none) and parameter, number of its first element among the
states of this rank, length, row of its numbers. Elements count in units of UNIT."""
TENSOR_BIT = tl.constexpr(40)
"""A bucket is a word: its number in its tensor, and the tensor from this bit on."""
VECTOR = tl.constexpr(4)
"""Elements of a thread that lie next to each other."""
BUCKET_MASK = tl.constexpr((1 << 40) - 1)
NUMBERS = tl.constexpr(12)
FP32, FP16 = tl.constexpr(4), tl.constexpr(2)
"""Codes of dtypes; bfloat16 has 1."""
AMSGRAD, MOMENTUM, LAMB = tl.constexpr(1), tl.constexpr(3), tl.constexpr(4)
"""Codes of rules; adam has 0, sgd 2."""


@triton.jit
def buckets_of(words, buckets, owner, item, first, items, COUNT: tl.constexpr):
    """The words of the buckets of COUNT items; -1 where there is none. They are loaded for the next item
    while the elements of this one are on their way: a load for its own item would be one latency more."""
    number = first + item + tl.arange(0, COUNT)
    begun = tl.load(words + owner)
    end = tl.minimum(tl.load(words + owner + 1), begun + first + items)
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
def ratio(rates, row, j: tl.constexpr):
    return tl.load(rates + row * NUMBERS + j)[:, None]


@triton.jit
def elements_of(words, word, W: tl.constexpr, UNIT: tl.constexpr):
    """What lies behind the words of buckets that `buckets_of` has loaded. Returns for each bucket the number
    of its tensor, a pointer to the words of that tensor, the number of the bucket in the tensor, and whether
    there is a bucket; and a mask of the elements that count, [COUNT, LENGTH]."""
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
def clip_factor(norm, max_norm):
    """1 if `max_norm` is 0."""
    factor = tl.full((), 1.0, tl.float32)
    if max_norm != 0:
        limit = max_norm / (tl.load(norm).to(tl.float64) + 1e-6)
        factor = tl.minimum(limit, tl.full((), 1.0, tl.float64), tl.PropagateNan.ALL).to(tl.float32)
    return factor


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
def item_and_peer(unit, rank, W: tl.constexpr):
    """The item and the peer of number `unit` of the moves between this rank and its peers. Consecutive moves
    are for different peers, so that no peer waits until another one has all its items."""
    return unit // (W - 1), (rank + 1 + unit % (W - 1)) % W
