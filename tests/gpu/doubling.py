"""A Triton kernel as users write them."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _double(source, target, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(target + at, 2 * tl.load(source + at, at < count), at < count)


def doubled(x: Tensor) -> Tensor:
    found = torch.empty_like(x)
    _double[(triton.cdiv(x.numel(), 1024),)](x, found, x.numel(), block=1024)
    return found
