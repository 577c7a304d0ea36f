"""Runs a combine of experts with any number of rows in a fused way.

Splits differ from rank to rank, so that nothing that decides how a call is run may depend on them. How many
rows memory has room for is agreed on in the first call of a kind: twice the most that any rank receives, or
LEAST_BYTES. A rank that receives more later says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autofuse.native_kernels.cuda.dropless_combine import (
    DroplessCombineConfig,
    dropless_combine_needs,
    launch_dropless_combine,
)

from .dense import first_compile
from .expert_ways import COMBINE, DROPLESS, DroplessProblem, dropless_ways
from .experts import is_stack
from .workspace import GpuWorkspace

LEAST_BYTES = 1 << 30
"""Of rows that a rank receives: memory has room for as many, however few the first call has."""


def dropless_problem_of(x: Tensor, w: Tensor, workspace: GpuWorkspace) -> DroplessProblem:
    """The problem of a combine of `x: [rows, K]` and `w: [E, K, N]`."""
    experts, k, n = w.shape
    aligned = x.storage_offset() % 8 == 0 and is_stack(w)
    return DroplessProblem(
        COMBINE + DROPLESS, experts, k, n, workspace.world, x.dtype, workspace.programs, aligned
    )


def dropless_combine(
    workspace: GpuWorkspace,
    way: str,
    problem: DroplessProblem,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    positions: Tensor | None,
    received: Sequence[int],
    sent: Sequence[int],
    site: str,
    trace: Tensor | None = None,
) -> Tensor | None:
    """`[sum(received), N]`, in a fused way; None if that cannot be captured. RuntimeError without room."""
    config = dropless_ways(problem)[way]
    assert isinstance(config, DroplessCombineConfig)
    rows = sum(received)
    room = _room(workspace, problem.columns * 2, rows)
    if room is None:
        return None
    if rows > room:
        raise RuntimeError(
            f"{COMBINE}, rank {workspace.rank} of group {workspace.group_name}: {rows} rows are sent to it, "
            f"there is room for {room}; the first call of a program makes room for twice what it has"
        )
    entered = workspace.enter(
        COMBINE,
        site,
        lambda: dropless_combine_needs(room, problem.columns, problem.world),
        way,
        (problem, w.stride(), bias is None, trace is None),
    )
    if entered is None:
        return None
    memory, number, new = entered
    out = x.new_empty(rows, problem.columns)
    for compile_only in first_compile(workspace, new):
        launch_dropless_combine(
            memory, x, w, out, offsets, positions, received, sent, config, number, trace, compile_only, bias
        )
    workspace.leave()
    return out


def _room(workspace: GpuWorkspace, row_bytes: int, rows: int) -> int | None:
    """Rows that a rank may receive. All ranks ask together at first, which capturing forbids."""
    agreed = _rooms.setdefault(workspace, {})
    if row_bytes not in agreed:
        if torch.cuda.is_current_stream_capturing():
            return None
        most = max(map(int, workspace.meet(str(rows))))
        agreed[row_bytes] = max(LEAST_BYTES // row_bytes, 2 * most)
    return agreed[row_bytes]


_rooms: WeakKeyDictionary[GpuWorkspace, dict[int, int]] = WeakKeyDictionary()
