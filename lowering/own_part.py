"""`autofuse::own_part`: this rank's part of a tensor that all ranks of a group have.

A graph has no rank in it, since ranks share compiled code: the op reads the rank when it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.ops.library import LIBRARY
from autofuse.lowering.torch_internals import group_size, resolve_group

OP = "own_part"


def _own_part(x: Tensor, dim: int, group_name: Any) -> Tensor:
    group = resolve_group(group_name)
    length = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * length, length).clone(memory_format=torch.contiguous_format)


def _fake(x: Tensor, dim: int, group_name: Any) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= group_size(group_name)
    return x.new_empty(shape)


LIBRARY.define(f"{OP}(Tensor x, int dim, Any group_name) -> Tensor")
LIBRARY.impl(OP, _own_part, "CompositeExplicitAutograd")
torch.library.register_fake(f"autofuse::{OP}", _fake, lib=LIBRARY)
