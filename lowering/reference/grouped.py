"""Products of experts: rows are multiplied by the weight of their expert, then added up token by token.

    grouped %0       V = x[0] @ w[0][expert of the row]    x[0]: [R, K]   w[0]: [E, K, N]   V: [R, N]
                     operands[0]: [E, 1], int32, the ends of the experts' ranges of rows; rows behind are 0
    grouped          all experts have equally many rows
    take %i          V = V[operands[i]]                    operands[i]: [R', 1], int64
    sum 2            V = V.view(-1, 2, N).sum(1)           tokens that have two rows each
    fold 4           V = V.view(4, -1, N).sum(0)           four experts that have all tokens each
    index_add %i %j  V = operands[i].index_add(0, operands[j], V)    operands[i]: [T, 1] or [T, N];
                     operands[j]: [R, 1], int64, the token of each row

Columns of the result need columns of the weights and operands.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from autofuse.lowering.cpu.matmul import multiply
from autofuse.lowering.torch_internals import grouped_mm, has_grouped_mm, has_values

CONTRACTION = "grouped"
ROW_STAGES = ("take", "sum", "fold", "index_add")
"""Those that change the number of rows."""

BLOCK, LEAST_COLUMNS = 1 << 18, 32
"""Elements, and columns at least, of rows of experts that stages are applied to at a time. Measured with 2048
rows of 1024 columns: 8.9 ms a call, in one piece 9.3 ms."""


def blocks(value: Tensor, stages: Sequence[str]) -> list[slice]:
    """Columns to which the stages behind a contraction are applied at a time, so that results stay in caches.

    The time of an index_add is one of rows, so that it takes all columns.
    """
    rows, columns = value.shape
    step = max(1, columns if "index_add" in stages else max(LEAST_COLUMNS, BLOCK // max(1, rows)))
    return [slice(c, min(c + step, columns)) for c in range(0, columns, step)]


def grouped(x: Tensor, w: Tensor, ends: Tensor | None) -> Tensor:
    """`[R, N]`; `ends` is None where all experts have equally many rows. No gradient."""
    if not has_values(x):
        return torch.mm(x, w.select(0, 0))  # an index would need the device
    if x.is_cuda and ends is not None and x.dtype == torch.bfloat16 and has_grouped_mm():
        return grouped_mm(x, w, ends.flatten())
    if ends is None:
        _ranges(x.shape[0], w.shape[0], None)
        return torch.bmm(x.view(w.shape[0], -1, x.shape[1]), w).flatten(0, 1)
    out = x.new_empty(x.shape[0], w.shape[-1])
    for rows, expert in zip(_ranges(x.shape[0], w.shape[0], ends), w, strict=True):
        if rows.start < rows.stop:
            multiply(out[rows], x[rows], expert)
    out[int(ends[-1]) :] = 0
    return out


def _ranges(count: int, experts: int, ends: Tensor | None) -> list[slice]:
    """The rows of each expert. ValueError if there are none."""
    if ends is None:
        if count % experts:
            raise ValueError(
                f"{count} rows are no multiple of {experts} experts; pass the ends of their ranges"
            )
        stops = [count // experts * (e + 1) for e in range(experts)]
    else:
        stops = ends.flatten().tolist()
    starts = [0, *stops]
    if len(stops) != experts or any(a > b for a, b in pairwise(starts)) or starts[-1] > count:
        raise ValueError(f"expected ascending ends of {experts} experts, at most {count} rows; got {stops}")
    return [slice(a, b) for a, b in pairwise(starts)]


def change_rows(
    name: str, value: Tensor, operand: Tensor | None, index: Tensor | None, number: float | int | None
) -> Tensor:
    """One of ROW_STAGES applied to `value`."""
    n = value.shape[1]
    if name == "take":
        assert index is not None
        return value.index_select(0, index.squeeze(1))
    if name == "index_add":
        assert operand is not None
        assert index is not None
        base = operand.expand(operand.shape[0], n)
        return base.index_add(0, index.squeeze(1), value)
    count = int(number or 0)
    return value.unflatten(0, (-1, count)).sum(1) if name == "sum" else value.unflatten(0, (count, -1)).sum(0)
