"""Updates of scattered tensors, tile by tile: sums of gradients, rules, norms. All on one thread."""

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, c_float, c_int, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from autofuse.native_kernels.cpu import DTYPES, function

UPDATE, SUM, DIRECT, APPLY = range(4)
"""What is done with gradients: the rule; their sum is kept; LAMB's direction is kept; that is applied."""


class Work(Structure):
    """As `Work` in optimizer.cpp."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("segments", c_void_p),
        ("n_segments", c_int64),
        ("params_of", c_void_p),
        ("grads_of", c_void_p),
        ("param_dtypes_of", c_void_p),
        ("grad_dtypes_of", c_void_p),
        ("numbers_of", c_void_p),
        ("row", c_int64),
        ("trust_of", c_void_p),
        ("norms_of", c_void_p),
        ("squares_of", c_void_p),
        ("states_of", c_void_p * 3),
        ("sums_of", c_void_p),
        ("parts", c_void_p),
        ("out", c_void_p),
        ("part_width", c_int64),
        ("out_width", c_int64),
        ("states", c_void_p * 3),
        ("master", c_void_p),
        ("sums", c_void_p),
        ("kept", c_void_p),
        ("scale", c_float),
        ("rounds", c_int),
        ("from_sums", c_int),
        ("world", c_int),
        ("rank", c_int),
        ("rule", c_int),
        ("action", c_int),
    ]


update = function("af_update", None, [POINTER(Work)])

# copy_segments(tile, bytes between its elements, segments, number, tensors, dtypes, gradients, into the tile)
copy_segments = function(
    "af_copy_segments",
    None,
    [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int],
)


def segments(found: Sequence[Sequence[int]]) -> "Array[c_int64]":
    """(tensor, start, count, at) of each segment, as `Segment` in optimizer.cpp."""
    return (c_int64 * (4 * len(found)))(*[value for each in found for value in each])


def pointers(tensors: Sequence[Tensor | None]) -> "Array[c_void_p]":
    """The address of every tensor, null for None."""
    return (c_void_p * len(tensors))(*[None if t is None else t.data_ptr() for t in tensors])


def dtypes(found: Sequence[torch.dtype]) -> "Array[c_int]":
    """The codes of dtypes."""
    return (c_int * len(found))(*[DTYPES[dtype] for dtype in found])
