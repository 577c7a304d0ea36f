"""Tails by C++: the stages behind a reduction, a row at a time in float32, rounded as eager torch rounds."""

import struct
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autofuse.native_kernels.cpu import DTYPES, function

# tail(words), see tail.cpp
_tail = function("af_tail", None, [c_void_p])

_STAGES = (
    "add", "sub", "rsub", "mul", "div", "neg", "relu", "to", "where", "masked_fill",
    "rms", "standardize", "keep",
)  # fmt: skip
CODES = {name: code for code, name in enumerate(_STAGES)}
"""Stages that the machine has."""

_MASK = 3


def bits(number: float) -> int:
    """A float32 as the machine reads it."""
    found: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return found


@cache
def _array(n: int) -> Any:
    return c_int64 * n


def operand_words(t: Tensor) -> tuple[int, int, int, int]:
    """`t` broadcasts against rows of a matrix: [], [N], [1, N], [M, 1] or [M, N], columns adjacent."""
    columns = t.shape[-1] if t.dim() else 1
    row = t.stride(0) if t.dim() == 2 and t.shape[0] > 1 else 0
    return t.data_ptr(), row, int(columns > 1), _MASK if t.dtype == torch.bool else DTYPES[t.dtype]


def fits(t: Tensor) -> bool:
    """Whether `operand_words` can describe it: columns are adjacent."""
    return t.dim() == 0 or t.shape[-1] == 1 or t.stride(-1) == 1


def run_tail(
    source: Sequence[Sequence[Tensor]],
    scale: float,
    dtype: torch.dtype,
    operands: Sequence[Tensor],
    stages: Sequence[int],
    results: Sequence[Tensor],
) -> None:
    """Applies `stages` to V and stores `results`: V, then what is kept.

    `source[i]` are the parts of the i-th run of columns of V: `V = dtype(scale * (part + part + ...))`, added
    in their order. `stages` are five words for each stage: code, dtype, operand or -1, mask or -1, bits of a
    number; for a norm, operand 1 says that its statistics are kept.
    """
    first = results[0]
    rows, columns = first.shape
    words = [
        *(rows, columns, DTYPES[dtype], bits(scale)),
        *(len(source), len(source[0]), len(operands), len(stages) // 5, len(results)),
    ]
    for parts in source:
        words.append(parts[0].shape[1])
        for part in parts:
            words += (part.data_ptr(), part.stride(0), DTYPES[part.dtype])
    for t in operands:
        words += operand_words(t)
    words += stages
    for t in results:
        words += (t.data_ptr(), t.stride(0))
    _tail(_array(len(words))(*words))
