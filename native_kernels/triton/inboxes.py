"""Where items lie in memory that peers store to before they signal."""

import triton
import triton.language as tl


@triton.jit
def slot(region, half, source, item, items, length, DTYPE: tl.constexpr):
    """The place of an item of `source` in the memory of a rank."""
    at = (source * items + item).to(tl.int64) * length
    return tl.multiple_of(region.to(tl.pointer_type(DTYPE)), 16) + half + at
