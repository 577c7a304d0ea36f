"""`autofuse::read`: copies numbers from a GPU to the host, where a graph reads sizes from them.

The host waits for the copy. It launches the kernels that compute `launched` before that, so that the GPU runs
them meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autofuse.lowering.ops.library import LIBRARY

OP = "read"


def read(values: Tensor, launched: Sequence[Tensor]) -> Tensor:
    """`values` on the host. launched: tensors whose kernels are launched before the host waits."""
    return values.to("cpu", copy=True)


def _fake(values: Tensor, launched: Sequence[Tensor]) -> Tensor:
    return values.new_empty(values.shape, device="cpu")


LIBRARY.define(f"{OP}(Tensor values, Tensor[] launched) -> Tensor")
LIBRARY.impl(OP, read, "CompositeExplicitAutograd")
torch.library.register_fake(f"autofuse::{OP}", _fake, lib=LIBRARY)
