"""Tails in Triton: the stages behind a reduction (`lowering/reference/tail.py`) on blocks of whole rows.

    V: [ROWS, COLUMNS]   behind every stage in its dtype; what a stage computes is computed in fp32

A kernel is compiled for the stages: `apply_tail` is unrolled, so that nothing of them is left to decide when
it runs. Operands and results have fixed places in the parameters of a kernel, None where a tail has fewer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.state import (
    MOST_TAIL_COLUMNS,
    MOST_TAIL_OPERANDS,
    MOST_TAIL_RESULTS,
    TAIL_UNIT,
)

_NAMES = (
    "add", "sub", "rsub", "mul", "div", "neg", "relu", "silu", "gelu none", "gelu tanh", "to", "where",
    "masked_fill", "clamp_min", "clamp_max", "rms", "standardize", "project", "centre", "keep",
)  # fmt: skip
CODES = {name: code for code, name in enumerate(_NAMES)}
(
    ADD, SUB, RSUB, MUL, DIV, NEG, RELU, SILU, GELU, GELU_TANH, TO, WHERE, MASKED_FILL, CLAMP_MIN,
    CLAMP_MAX, RMS, STANDARDIZE, PROJECT, CENTRE, KEEP,
) = (tl.constexpr(code) for code in range(len(_NAMES)))  # fmt: skip

DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
"""Of V behind a stage."""

UNIT = tl.constexpr(TAIL_UNIT)
"""Columns that are loaded and stored together."""


class Stage(NamedTuple):
    """One stage as kernels read it. operand, mask: -1 for none, of project mask is its scale; dtype: of V
    behind it; keeps: a norm returns its statistics, too."""

    code: int
    operand: int
    mask: int
    number: float
    dtype: Any
    keeps: bool


class TailSpec(NamedTuple):
    """A tail as a kernel is compiled for it.

    text: as its reference reads it. operands: of each whether it has rows, and whether it has columns.
    results: dtype of V behind the tail and of what it keeps, and whether that has columns. added: the operand
    that the first stage adds to V, if it is a matrix of V's shape and dtype; else -1.
    """

    text: str
    stages: tuple[Stage, ...]
    operands: tuple[tuple[bool, bool], ...]
    results: tuple[tuple[torch.dtype, bool], ...]
    added: int = -1

    @property
    def constants(self) -> dict[str, Any]:
        """Those of a kernel."""
        return {
            "STAGES": tuple(map(tuple, self.stages)),
            "OPERANDS": self.operands,
            "WHOLE": tuple(whole for _, whole in self.results),
        }

    def row_bytes(self, columns: int) -> tuple[int, ...]:
        """Of a row of each result."""
        return tuple(dtype.itemsize * (columns if whole else 1) for dtype, whole in self.results)

    def matrices(self, rows: int, columns: int) -> list[tuple[tuple[int, int], torch.dtype]]:
        """Shape and dtype of each result of a tail of `V: [rows, columns]`."""
        return [((rows, columns if whole else 1), dtype) for dtype, whole in self.results]

    def empty(self, like: Tensor, rows: int, columns: int) -> list[Tensor]:
        """The results, with nothing in them yet."""
        return [like.new_empty(sizes, dtype=dtype) for sizes, dtype in self.matrices(rows, columns)]


NO_TAIL = TailSpec("", (), (), ())


def places(operands: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor | None]:
    """As kernels take them, with None for those that a tail does not have."""
    without = [None] * (MOST_TAIL_OPERANDS - len(operands))
    return [*operands, *without, *results, *[None] * (MOST_TAIL_RESULTS - len(results))]


@triton.jit
def block_of(row, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where elements lie of what has rows, columns, both or neither, as offsets of a block."""
    at = tl.zeros((1, 1), tl.int64)
    if ROWS:
        at += row.to(tl.int64)[:, None] * (columns if COLUMNS else 1)
    if COLUMNS:
        at += column[None, :]
    return at


@triton.jit
def inside_of(exists, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The mask of such a block. exists: of each row."""
    inside = tl.full((1, 1), True, tl.int1)
    if ROWS:
        inside = inside & exists[:, None]
    if COLUMNS:
        inside = inside & (column < columns)[None, :]
    return inside


@triton.jit
def read(at, row, exists, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A block of `at`, which has rows, columns, both or neither."""
    inside = inside_of(exists, column, columns, ROWS, COLUMNS)
    return tl.load(at + block_of(row, column, columns, ROWS, COLUMNS), mask=inside, other=0.0)


@triton.jit
def read_operands(operands, row, exists, column, columns, OPERANDS: tl.constexpr):
    """The blocks of all operands, in one go: a load behind the sum of a norm would wait a second time."""
    blocks = ()
    for i in tl.static_range(len(OPERANDS)):
        block = read(operands[i], row, exists, column, columns, OPERANDS[i][0], OPERANDS[i][1])
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no starred values
    return blocks


@triton.jit
def gelu(v, TANH: tl.constexpr):
    if TANH:
        # tanh(x) = 2 * sigmoid(2 * x) - 1
        return v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    return 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))


@triton.jit
def moments(v, inside, columns):
    """Mean and variance of each row, without Bessel's correction."""
    mean = tl.sum(tl.where(inside, v, 0.0), 1) / columns
    apart = tl.where(inside, v - mean[:, None], 0.0)
    return mean, tl.sum(apart * apart, 1) / columns


@triton.jit
def apply_stage(value, blocks, exists, column, columns, STAGES: tl.constexpr, INDEX: tl.constexpr):
    """V behind stage INDEX, and a tuple of what the stage keeps."""
    NAME: tl.constexpr = STAGES[INDEX][0]
    OPERAND: tl.constexpr = STAGES[INDEX][1]
    MASK: tl.constexpr = STAGES[INDEX][2]
    NUMBER: tl.constexpr = STAGES[INDEX][3]
    DTYPE: tl.constexpr = STAGES[INDEX][4]
    KEEPS: tl.constexpr = STAGES[INDEX][5]
    kept = ()
    v = value.to(tl.float32)
    other = tl.full((1, 1), NUMBER, tl.float32)
    if OPERAND >= 0:
        other = blocks[OPERAND].to(tl.float32)
    chosen = tl.full((1, 1), True, tl.int1)
    if MASK >= 0:
        chosen = blocks[MASK] != 0
    if NAME == ADD:
        v = v + other
    elif NAME == SUB:
        v = v - other
    elif NAME == RSUB:
        v = other - v
    elif NAME == MUL:
        v = v * other
    elif NAME == DIV:
        v = tl.div_rn(v, other + tl.zeros_like(v))
    elif NAME == NEG:
        v = -v
    elif NAME == RELU:
        v = tl.where(v < 0.0, 0.0, v)  # nan stays
    elif NAME == SILU:
        v = v * tl.sigmoid(v)
    elif NAME == GELU:
        v = gelu(v, False)
    elif NAME == GELU_TANH:
        v = gelu(v, True)
    elif NAME == CLAMP_MIN:
        v = tl.where(v < other, other, v)  # nan stays
    elif NAME == CLAMP_MAX:
        v = tl.where(v > other, other, v)
    elif NAME == WHERE:
        v = tl.where(chosen, v, other)
    elif NAME == MASKED_FILL:
        v = tl.where(chosen, other, v)
    elif NAME == RMS:
        inside = inside_of(exists, column, columns, True, True)
        scale = tl.rsqrt(tl.sum(tl.where(inside, v * v, 0.0), 1) / columns + NUMBER)
        v = v * scale[:, None]
        if KEEPS:
            kept = (scale[:, None],)  # type: ignore[assignment]
    elif NAME == STANDARDIZE:
        mean, variance = moments(v, inside_of(exists, column, columns, True, True), columns)
        scale = tl.rsqrt(variance + NUMBER)
        v = (v - mean[:, None]) * scale[:, None]
        if KEEPS:
            kept = (mean[:, None], scale[:, None])  # type: ignore[assignment]
    elif NAME == PROJECT or NAME == CENTRE:  # noqa: SIM109 - Triton has no `in`
        x = other
        if MASK >= 0:
            x = x * blocks[MASK].to(tl.float32)
        inside = inside_of(exists, column, columns, True, True)
        along = tl.sum(tl.where(inside, v * x, 0.0), 1) / columns
        if NAME == CENTRE:
            v = v - (tl.sum(tl.where(inside, v, 0.0), 1) / columns)[:, None]
        v = v - x * along[:, None]
    elif NAME == KEEP:
        kept = (value,)  # type: ignore[assignment]
    return v.to(DTYPE), kept


@triton.jit
def apply_tail(value, blocks, exists, column, columns, STAGES: tl.constexpr):
    """V behind the tail, then what it keeps: a tuple of blocks. blocks: of the operands; column: of V;
    exists: of each row."""
    kept = ()
    for i in tl.static_range(len(STAGES)):
        value, more = apply_stage(value, blocks, exists, column, columns, STAGES, i)
        kept = kept + more
    return (value,) + kept  # noqa: RUF005 - Triton has no starred values


@triton.jit
def write(to, block, row, exists, column, columns, IS_WHOLE: tl.constexpr):
    """Store a block at `row`, `column` of `to`: [., columns] or, without columns, [., 1]."""
    inside = inside_of(exists, column, columns, True, IS_WHOLE)
    tl.store(to + block_of(row, column, columns, True, IS_WHOLE), block, mask=inside)


def rows_fit(columns: int) -> bool:
    """Whether a program can hold a row, and loads 16 bytes of it at a time."""
    return columns % TAIL_UNIT == 0 and columns <= MOST_TAIL_COLUMNS


def shape_of_items(columns: int, length: int) -> tuple[int, int, int]:
    """Rows of an item, which has at least `length` elements if rows are short, their padded columns, and
    warps for it."""
    wide = triton.next_power_of_2(columns)
    rows = max(1, length // wide)
    return rows, wide, max(4, min(16, rows * wide // 1024))
