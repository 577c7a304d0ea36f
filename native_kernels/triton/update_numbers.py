"""The numbers of an optimizer's next update, from how often each tensor has been updated.

    numbers[i, j] = (constant + of_lr * lr) / (1 - beta^t)^power,  t = counts[i] + 1

`lowering.update_rules.Term` has what they stand for. A graph that replays a step computes them anew.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import cdiv, launch

from .update_parts import NUMBERS

TERM = tl.constexpr(5)
"""Numbers of a term."""
COLUMNS = tl.constexpr(16)
"""NUMBERS, up to a power of two."""
BLOCK = 8
"""Tensors of a program, a number a thread: the numbers wait for memory together, and fp64 is slow."""


@triton.jit(do_not_specialize=["tensors"])
def update_numbers(counts, added, order, terms, numbers, tensors, BLOCK: tl.constexpr):
    """Grid: a program for BLOCK tensors. order: int32, which of `terms` a tensor has; terms: fp64
    [., 1 + NUMBERS * TERM], a learning rate, then the terms, of beta its logarithm; added: None, or what is
    added to counts."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)[None, :]
    exists = at < tensors
    inside = exists[:, None] & (column < NUMBERS)
    before = tl.load(counts + at, mask=exists, other=0.0)
    t = (before + 1.0)[:, None]
    own = terms + (tl.load(order + at, mask=exists, other=0) * (1 + NUMBERS * TERM))[:, None]
    term = own + 1 + column * TERM
    constant = tl.load(term, mask=inside, other=0.0)
    of_lr = tl.load(term + 1, mask=inside, other=0.0)
    log_beta = tl.load(term + 2, mask=inside, other=0.0)
    power = tl.load(term + 3, mask=inside, other=0.0)
    first = tl.load(term + 4, mask=inside, other=0.0)
    value = constant + of_lr * tl.load(own)
    rest = tl.where(power > 0.0, 1.0 - tl.exp(t * log_beta), 1.0)
    value = value / tl.where(power == 0.5, tl.sqrt(rest), rest)
    value = tl.where((t == 1.0) & (first == first), first, value)
    tl.store(numbers + at[:, None] * NUMBERS + column, value.to(numbers.dtype.element_ty), mask=inside)
    if added is not None:
        tl.store(counts + at, before + tl.load(added + at, mask=exists, other=0.0), mask=exists)


def launch_update_numbers(
    counts: Tensor, added: Tensor | None, order: Tensor, terms: Tensor, numbers: Tensor,
    compile_only: bool = False,
) -> None:  # fmt: skip
    """counts, added: fp64 [T]; numbers: fp32 or fp64 [T, NUMBERS], written."""
    assert numbers.dtype in (torch.float32, torch.float64)
    tensors = len(counts)
    launch(
        update_numbers, cdiv(tensors, BLOCK), compile_only,
        counts, added, order, terms, numbers, tensors, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
