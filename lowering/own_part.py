"""`autofuse::own_part`: this rank's part of a tensor that all ranks of a group have.

A graph has no rank in it, since ranks share compiled code: the op reads the rank when it runs. Where a length
has no equal parts, the last parts are `padded` with zeros to the length of the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.lowering.ops.library import LIBRARY
from autofuse.lowering.torch_internals import group_size, resolve_group

OP = "own_part"


def part_of_rank(x: Tensor, dim: int, rank: int, world: int, padded: bool) -> Tensor:
    length = _length(x.shape[dim], world, padded)
    begin, end = (min(r * length, x.shape[dim]) for r in (rank, rank + 1))
    part = x.narrow(dim, begin, end - begin)
    if end - begin < length:
        return F.pad(part, [0, 0] * (x.dim() - 1 - dim) + [0, length - (end - begin)])
    return part.clone(memory_format=torch.contiguous_format)


def _length(whole: int, world: int, padded: bool) -> int:
    return (whole + world - 1) // world if padded else whole // world


def _own_part(x: Tensor, dim: int, group_name: Any, padded: bool = False) -> Tensor:
    group = resolve_group(group_name)
    return part_of_rank(x, dim, group.rank(), group.size(), padded)


def _fake(x: Tensor, dim: int, group_name: Any, padded: bool = False) -> Tensor:
    shape = list(x.shape)
    shape[dim] = _length(shape[dim], group_size(group_name), padded)
    return x.new_empty(shape)


LIBRARY.define(f"{OP}(Tensor x, int dim, Any group_name, bool padded=False) -> Tensor")
LIBRARY.impl(OP, _own_part, "CompositeExplicitAutograd")
torch.library.register_fake(f"autofuse::{OP}", _fake, lib=LIBRARY)
