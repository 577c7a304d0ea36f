"""Tails by C++: the stages behind a reduction, in float32, rounded as eager torch rounds after each stage."""

import struct
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from autofuse.native_kernels.cpu import DTYPES, function

# tail(words), see tail.cpp
_tail = function("af_tail", None, [c_void_p])

_STAGES = (
    "add", "sub", "rsub", "mul", "div", "neg", "relu", "to", "where", "masked_fill",
    "clamp_min", "clamp_max", "rms", "standardize", "project", "centre", "keep",
)  # fmt: skip
CODES = {name: code for code, name in enumerate(_STAGES)}
"""Stages that the kernel has."""

Segment = tuple[int, Sequence[tuple[int, torch.dtype]]]
"""A run of columns: how many, and of each of its parts the elements between rows, and the dtype."""

_DTYPES = {**DTYPES, torch.bool: 3}


def bits(number: float) -> int:
    """A float32 as the kernel reads it."""
    found: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return found


class TailCall:
    """Calls that differ in addresses alone: `call(parts, operands, results)`.

    V is `dtype(scale * (part + part + ...))` in runs of columns, of `rows` rows from `row` on, where operands
    are read. `stages` are five words each: code, dtype behind it, operand or -1, mask or -1, bits of a
    number; for a norm, operand 1 says that its statistics are kept; project has its scale for a mask.
    `results`: elements between rows of each.
    """

    def __init__(
        self,
        row: int,
        rows: int,
        dtype: torch.dtype,
        scale: float,
        segments: Sequence[Segment],
        operands: Sequence[tuple[torch.Size, torch.dtype]],
        stages: Sequence[int],
        results: Sequence[int],
    ) -> None:
        columns = sum(n for n, _ in segments)
        words = [
            *(rows, columns, DTYPES[dtype], bits(scale)),
            *(len(segments), len(segments[0][1]), len(operands), len(stages) // 5, len(results)),
        ]
        self._row = row
        self._parts: list[int] = []
        for n, parts in segments:
            words.append(n)
            for stride, of in parts:
                self._parts.append(len(words))
                words += (0, stride, DTYPES[of])
        self._operands: list[tuple[int, int]] = []
        for shape, of in operands:
            n = shape[-1] if shape else 1
            stride = n if len(shape) == 2 and shape[0] > 1 else 0
            self._operands.append((len(words), of.itemsize))
            words += (0, stride, int(n > 1), _DTYPES[of])
        words += stages
        self._results: list[int] = []
        for stride in results:
            self._results.append(len(words))
            words += (0, stride)
        self._words = (c_int64 * len(words))(*words)

    def __call__(self, parts: Sequence[int], operands: Sequence[Tensor], results: Sequence[int]) -> None:
        """Addresses of the parts, run by run, and of the results; all rows of the operands."""
        words = type(self._words).from_buffer_copy(self._words)
        for at, address in zip(self._parts, parts, strict=True):
            words[at] = address
        for (at, itemsize), t in zip(self._operands, operands, strict=True):
            words[at] = t.data_ptr()
            if words[at + 1]:  # it has rows
                words[at + 1] = stride = t.stride(0)
                words[at] += self._row * stride * itemsize
        for at, address in zip(self._results, results, strict=True):
            words[at] = address
        _tail(words)


def fits(t: Tensor) -> bool:
    """Whether the kernel can read an operand: its columns are adjacent."""
    return t.dim() == 0 or t.shape[-1] == 1 or t.stride(-1) == 1
