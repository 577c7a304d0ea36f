"""Parts of kernels in which every rank updates all elements of its parameters by sums over the ranks.

elements_of    what lies behind the word of a bucket
pointers       to the elements of a bucket
payload_of     the payloads of packets, of elements
places_of      where a bucket's parameters, states and sum lie
load_values    the parameters and states of a bucket
store_values   keep the sum of a bucket, and update its parameters and states
"""

import triton
import triton.language as tl

from .gemm import pack
from .update_packet_parts import bits_of
from .update_parts import BUCKET_MASK, LENGTH, TENSOR_BIT, lanes, states_of, updated

FIELDS = tl.constexpr(8)
"""Words of a tensor: addresses of gradient, parameter, three states, and the sum that is kept, 0 where there
is none; length in units of UNIT; row of its numbers. All but that of the sum are multiples of 16."""
GRADIENT, PARAMETER, STATES, SUM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(5)
UNITS, ROW = tl.constexpr(6), tl.constexpr(7)


@triton.jit
def elements_of(words, word, UNIT: tl.constexpr):
    """What lies behind the word of a bucket: a pointer to the words of its tensor, the number of its first
    element in the tensor, and a mask of the elements that count, [1, LENGTH]."""
    tensor = words + (word >> TENSOR_BIT) * FIELDS
    bucket = word & BUCKET_MASK
    units = tl.load(tensor + UNITS) - bucket * (LENGTH // UNIT)
    mask = lanes() < tl.minimum(units, LENGTH // UNIT).to(tl.int32) * UNIT
    return tensor, bucket * LENGTH, mask


@triton.jit
def pointers(address, first, DTYPE: tl.constexpr, ALIGNED: tl.constexpr = 16):
    """To the elements of a bucket, [1, LENGTH], whose tensor begins at a multiple of so many bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGNED) + (first + lanes())


@triton.jit
def payload_of(values):
    """The payloads of packets, uint32, of elements [1, LENGTH]: two elements of 16 bits, or one of 32."""
    if values.dtype.primitive_bitwidth == 32:
        found = bits_of(values)
    else:
        found = pack(values)
    return found


@triton.jit
def places_of(tensor, first, PARAMS: tl.constexpr):
    """Pointers to the parameters of a bucket and to its three states; the address of the sum of the tensor,
    and the row of its numbers, [1]. They are loaded before a program waits."""
    param = pointers(tl.load(tensor + PARAMETER), first, PARAMS)
    m = pointers(tl.load(tensor + STATES), first, tl.float32)
    v = pointers(tl.load(tensor + STATES + 1), first, tl.float32)
    most = pointers(tl.load(tensor + STATES + 2), first, tl.float32)
    return param, m, v, most, tl.load(tensor + SUM), tl.load(tensor + ROW + tl.arange(0, 1))


@triton.jit
def load_values(places, mask, RULE: tl.constexpr):
    """The parameters of a bucket, in fp32, and its states."""
    m, v, most = states_of(places[1], places[2], places[3], 0, mask, RULE)
    return tl.load(places[0], mask=mask, other=0.0).to(tl.float32), m, v, most


@triton.jit
def store_values(
    places, values, total, scale, first, mask, rates,
    GRADS: tl.constexpr, UNIT: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Round the sum of a bucket, keep it, and update parameters and states by it.

    places, values: what `places_of` and `load_values` have returned; total: fp32 [1, LENGTH]; scale: 1, or
    1 / W of a mean, which graphs have of a sum that is rounded.
    """
    rounded = (total.to(GRADS).to(tl.float32) * scale).to(GRADS)
    to = pointers(places[4], first, GRADS, UNIT * GRADS.primitive_bitwidth // 8)
    tl.store(to, rounded, mask=mask & (places[4] != 0))
    p, m, v, most = values
    g = rounded.to(tl.float32)
    p = updated(p, g, m, v, most, rates, places[5], 1.0, places[1], places[2], places[3], 0, mask, RULE)
    tl.store(places[0], p.to(places[0].dtype.element_ty), mask=mask)
