"""A tail alone: the kernel that applies it to a sum which another kernel has written."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import cdiv, launch
from autofuse.native_kernels.gpu.state import MOST_SHARES

from .dependent import grid_wait
from .tails import UNIT, TailSpec, apply_tail, places, read, read_operands, shape_of_items, write

ELEMENTS = 8
"""Of a thread, as far as 16 warps have so many. The code of a thread is unrolled: in a model it comes from
memory at each call, since other kernels have run in between."""

REGISTERS = 128
"""Of a thread with more elements, so that 16 warps fit: left to itself ptxas takes 64, and spills."""


@triton.jit(do_not_specialize=["rows", "units"])
def tail_alone(
    value, o0, o1, o2, o3, o4, o5, r0, r1, r2, r3, rows, units,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, OPERANDS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Any grid. value: [rows, units * UNIT]."""
    columns = units * UNIT
    column = tl.arange(0, COLUMNS)
    operands, results = (o0, o1, o2, o3, o4, o5), (r0, r1, r2, r3)
    for item in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = item * ROWS + tl.arange(0, ROWS)
        exists = row < rows
        blocks = read_operands(operands, row, exists, column, columns, OPERANDS)
        grid_wait()  # no kernel of this call has written the operands
        v = read(value, row, exists, column, columns, True, True)
        found = apply_tail(v, blocks, exists, column, columns, STAGES)
        for i in tl.static_range(len(WHOLE)):
            write(results[i], found[i], row, exists, column, columns, WHOLE[i])


def launch_tail(
    value: Tensor,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    tail: TailSpec,
    compile_only: bool = False,
) -> None:
    """Applies the tail to `value: [M, N]`, contiguous, of 16 or 32 bits and columns that `rows_fit`.

    operands: contiguous; results: as `TailSpec.empty` makes them. No rank waits for another.
    """
    rows, columns = value.shape
    high, wide, _ = shape_of_items(columns, 4096)
    warps = max(4, min(16, high * wide // (32 * ELEMENTS)))
    most = REGISTERS if high * wide > 32 * ELEMENTS * warps else None
    # A program for each item: other blocks compute while one waits for its rows.
    launch(
        tail_alone, min(cdiv(rows, high), MOST_SHARES), compile_only,
        value, *places(operands, results), rows, columns // UNIT.value,
        ROWS=high, COLUMNS=wide, **tail.constants, num_warps=warps, num_stages=1, maxnreg=most,
    )  # fmt: skip
