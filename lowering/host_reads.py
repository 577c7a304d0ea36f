"""Copies numbers from a GPU to the host, where a graph reads sizes from them.

    autofuse::begin_read(values)            starts the copy, on the stream of the kernels
    autofuse::read(begun, launched)         the numbers: the host waits for the copy

Kernels that are launched between the two run while the host goes on with the numbers:

    GPU    kernels of values | copy | kernels of launched
    host                            | works with the numbers

`read` does not use the tensors `launched`. As they are arguments, their kernels are launched before the host
waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autofuse.lowering.ops.library import LIBRARY

BEGIN, READ = "begin_read", "read"

_EVENT = "autofuse_copied"
"""The attribute of a copy that has begun: the event that ends it."""


def begin_read(values: Tensor) -> Tensor:
    """Pinned memory, which holds `values` once they are copied."""
    begun = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    begun.copy_(values, non_blocking=True)
    setattr(begun, _EVENT, torch.cuda.current_stream(values.device).record_event())
    return begun


def read(begun: Tensor, launched: Sequence[Tensor]) -> Tensor:
    """The numbers that `begin_read` copies."""
    getattr(begun, _EVENT).synchronize()
    return begun.clone()  # an op returns none of its inputs


def _fake_begun(values: Tensor) -> Tensor:
    return values.new_empty(values.shape, device="cpu")


def _fake(begun: Tensor, launched: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(begun)


LIBRARY.define(f"{BEGIN}(Tensor values) -> Tensor")
LIBRARY.impl(BEGIN, begin_read, "CompositeExplicitAutograd")
torch.library.register_fake(f"autofuse::{BEGIN}", _fake_begun, lib=LIBRARY)
LIBRARY.define(f"{READ}(Tensor begun, Tensor[] launched) -> Tensor")
LIBRARY.impl(READ, read, "CompositeExplicitAutograd")
torch.library.register_fake(f"autofuse::{READ}", _fake, lib=LIBRARY)
