"""Parts that the kernels of LAMB share.

direction_of   the direction u of an element; its states are stored
span_of        the buckets of a tensor
step_of        the rate of a tensor, by the norms of its parameter and its direction
"""

import triton
import triton.language as tl

from .update_parts import FIELDS, NUMBERS, ratio

EXCLUDED, GUARDED = tl.constexpr(0), tl.constexpr(1)
"""How a tensor is adapted, as `update_rules` has it."""


@triton.jit
def direction_of(p, g, m, v, rates, row, m_of, v_of, place, mask):
    """g: the gradient with all its factors; m, v: the states before, which lie at `place`."""
    m += ratio(rates, row, 2) * (g - m)
    v = ratio(rates, row, 3) * v + ratio(rates, row, 4) * g * g
    tl.store(m_of + place, m, mask=mask)
    tl.store(v_of + place, v, mask=mask)
    root = tl.sqrt_rn(v) * ratio(rates, row, 5) + ratio(rates, row, 6)
    return tl.div_rn(ratio(rates, row, 7) * m, root) + ratio(rates, row, 1) * p


@triton.jit
def span_of(words, buckets, number, W: tl.constexpr):
    """The buckets of a tensor, first and end."""
    firsts = buckets + tl.load(words + W) + number
    return tl.load(firsts), tl.load(firsts + 1)


@triton.jit
def step_of(words, rates, number, of_p, of_u, W: tl.constexpr):
    """The rate of a tensor by its trust; of_p, of_u: squares of its norms."""
    of_row = rates + tl.load(words + W + 1 + number * FIELDS + 4) * NUMBERS
    adapts, most = tl.load(of_row + 9), tl.load(of_row).to(tl.float64)
    norm = tl.minimum(tl.sqrt(of_p), most, tl.PropagateNan.ALL)
    unguarded = (adapts != GUARDED) | ((of_p > 0) & (of_u > 0))
    trust = tl.where((adapts != EXCLUDED) & unguarded, norm / tl.sqrt(of_u), 1.0)
    return (tl.load(of_row + 8).to(tl.float64) * trust).to(tl.float32)
