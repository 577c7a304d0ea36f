"""Sums over the ranks of what packets hold, in the order of the ranks."""

import triton
import triton.language as tl


@triton.jit
def in_order(parts, source, W: tl.constexpr):
    """The sum over axis 0, one source after another."""
    total = tl.zeros((parts.shape[1],), tl.float32)
    for r in tl.static_range(W):
        total += tl.sum(tl.where(source == r, parts, 0.0), 0)
    return total


@triton.jit
def sum_of_payloads(packets, source, W: tl.constexpr, DTYPE: tl.constexpr):
    """The sum over the sources of the values in packets [SOURCES, .], fp32 [LENGTH]."""
    bits = packets.to(tl.uint32)
    if DTYPE.primitive_bitwidth == 32:
        total = in_order(bits.to(DTYPE, bitcast=True), source, W)
    else:
        low = (bits & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (bits >> 16).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        total = tl.interleave(in_order(low, source, W), in_order(high, source, W))
    return total
