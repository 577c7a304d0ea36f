"""Runs an expert op of any number of rows in a fused way.

Splits differ from rank to rank, so that nothing that decides how a call is run may depend on them. Hosts know
them, and tell each other before every call that is not captured how many rows their ranks have: memory grows
where one has more than there is room for. Where ranks are known to bring equally many (`config.equal_rows`),
there is room for all of them on each rank, and hosts do not meet. What is captured has as many rows in every
replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autofuse import config
from autofuse.lowering.cpu.rendezvous import NotShared
from autofuse.lowering.cpu.workspace import workspace_for
from autofuse.lowering.gpu.choice.kernel import Way
from autofuse.lowering.gpu.choice.launcher import Launcher
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, agreements
from autofuse.native_kernels.cuda.kernels.dropless_combine import dropless_combine_needs
from autofuse.native_kernels.cuda.kernels.dropless_dispatch import (
    dropless_dispatch_needs,
    dropless_exchanged,
)

from .fixed import is_stack, layouts
from .kernels import Rows
from .unfused import grouped_product
from .ways import COMBINE, DISPATCH, DROPLESS, DroplessProblem

LEAST_ROWS = 1024
"""There is room for as many."""

MOST_WORST = 2 << 30
"""Bytes of the inbox up to which there is room for the worst case."""


def dropless_problem_of(
    op: str, x: Tensor, w: Tensor, workspace: GpuWorkspace, weights: int = 1
) -> DroplessProblem:
    """The problem of a call with `x: [rows, K]` and `w: [E, K, N]`; weights: as `problem_of`."""
    experts, k, n = w.shape
    aligned = x.storage_offset() % 8 == 0 and is_stack(w)
    return DroplessProblem(
        op + DROPLESS, experts, k, n, workspace.world, x.dtype, workspace.programs, aligned, weights
    )


def dropless_combine(
    workspace: GpuWorkspace,
    way: Way,
    problem: DroplessProblem,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    bias: Tensor | None,
    rows: Rows,
    site: str,
    trace: Tensor | None = None,
) -> Tensor | None:
    """`[sum(rows.received), N]` of a sum of products, in a fused way; None if that cannot be captured.

    RuntimeError without room.
    """
    received, n = sum(rows.received), problem.columns
    room = _room_for(workspace, COMBINE, site, n, received, received)
    if not room:
        return None
    variant = (problem, layouts(w), bias is None, trace is None), room
    launcher = Launcher(
        workspace,
        way,
        COMBINE,
        site,
        problem,
        variant,
        lambda: dropless_combine_needs(room, n, problem.world),
    )
    if launcher.enter(trace=trace) is None:
        return None
    out = x[0].new_empty(received, n)
    launcher.launch(x, w, out, bias, rows)
    launcher.leave()
    return out


def dropless_dispatch(
    workspace: GpuWorkspace,
    way: Way,
    problem: DroplessProblem,
    x: Tensor,
    w: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    rows: Rows,
    keep: bool,
    site: str,
    trace: Tensor | None = None,
) -> list[Tensor] | None:
    """Products `[sum(rows.received), N_i]` with all weights and, with `keep`, X; as `dropless_combine`.

    The first `problem.weights` are multiplied while the rows arrive, the others afterwards.
    """
    received, k, count = sum(rows.received), problem.k, problem.weights
    sent = sum(rows.sent)
    room = _room_for(workspace, DISPATCH, site, k, max(received, sent), problem.world * sent)
    if not room:
        return None
    variant = (problem, w[0].stride(), bias[0] is None, trace is None), room
    launcher = Launcher(
        workspace,
        way,
        DISPATCH,
        site,
        problem,
        variant,
        lambda: dropless_dispatch_needs(room, k, problem.world),
    )
    memory = launcher.enter(trace=trace)
    if memory is None:
        return None
    outputs = [x.new_empty(received, problem.columns) for _ in range(count)]
    biases = [b for b in bias[:count] if b is not None]
    launcher.launch(x, w[:count], outputs, biases, rows)
    if keep or len(w) > count:
        assert rows.offsets is not None
        exchanged = dropless_exchanged(memory, received, k, x.dtype)
        rest = zip(w[count:], bias[count:], strict=True)
        outputs += [grouped_product(exchanged, wi, b, rows.offsets) for wi, b in rest] + [exchanged] * keep
    launcher.leave()
    return outputs


def _room_for(workspace: GpuWorkspace, op: str, site: str, columns: int, rows: int, worst: int) -> int:
    """The number of rows of so many columns that the memory holds, or will hold once it has grown.

    It is 0 where a CUDA graph is captured and the memory would have to grow.

    worst: the most rows, where all ranks bring as many as this one. A combine brings back what they brought.
    """
    rooms = _rooms.setdefault(workspace, {})
    if torch.cuda.is_current_stream_capturing():
        room = rooms.get((op, columns), 0)
        if room and rows > room:
            raise RuntimeError(
                f"{op}, rank {workspace.rank} of group {workspace.group_name}: {rows} rows are captured, and "
                f"there is room for {room}; run as many once before you capture"
            )
        return room
    if config.equal_rows and 2 * 2 * worst * columns <= MOST_WORST:
        if rows > worst:
            raise RuntimeError(
                f"{op} at {site}: rank {workspace.rank} gets {rows} rows, more than {worst}: ranks do not "
                "bring equally many, as the setting equal_rows promises"
            )
        told = worst
    else:
        told = told_by_all(workspace, op, site, rows)
    most = max(told, rooms.get((op, columns), LEAST_ROWS))
    rooms[op, columns] = 1 << (most - 1).bit_length()
    return rooms[op, columns]


def told_by_all(workspace: GpuWorkspace, op: str, site: str, rows: int) -> int:
    """The most rows that a rank has. Told through shared memory, or through a store, which takes longer."""
    try:
        with workspace_for(workspace.group_name).call(op, site, "rows of all ranks", 0) as call:
            return max(of_rank for (of_rank,) in call.exchange([rows]))
    except NotShared:
        return max(map(int, workspace.meet(str(rows))))


_rooms: WeakKeyDictionary[GpuWorkspace, dict[tuple[str, int], int]] = WeakKeyDictionary()
agreements.append(_rooms)
