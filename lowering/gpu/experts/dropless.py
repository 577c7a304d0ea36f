"""Runs an expert op of any number of rows in a fused way.

Splits differ from rank to rank, so that nothing that decides how a call is run may depend on them. Hosts know
them, and tell each other before every call that is not captured how many rows their ranks have: memory grows
where one has more than there is room for. What is captured has as many rows in every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autofuse.lowering.cpu.rendezvous import NotShared
from autofuse.lowering.cpu.workspace import workspace_for
from autofuse.lowering.gpu.dense.run import first_compile
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace
from autofuse.native_kernels.cuda.kernels.dropless_combine import (
    dropless_combine_needs,
    launch_dropless_combine,
)
from autofuse.native_kernels.cuda.kernels.dropless_dispatch import (
    dropless_dispatch_needs,
    dropless_exchanged,
    launch_dropless_dispatch,
)
from autofuse.native_kernels.gpu.memory import Need, PeerMemory

from .fixed import is_stack, layouts
from .unfused import grouped_product
from .ways import COMBINE, DISPATCH, DROPLESS, DroplessProblem, dropless_ways

LEAST_ROWS = 1024
"""There is room for as many."""


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
    way: str,
    problem: DroplessProblem,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    bias: Tensor | None,
    offsets: Tensor | None,
    positions: Tensor | None,
    received: Sequence[int],
    sent: Sequence[int],
    site: str,
    trace: Tensor | None = None,
) -> Tensor | None:
    """`[sum(received), N]` of a sum of products, in a fused way; None if that cannot be captured.

    RuntimeError without room.
    """
    config, rows, n = dropless_ways(problem)[way], sum(received), problem.columns
    assert config is not None
    variant = problem, layouts(w), bias is None, trace is None
    entered = _enter(
        workspace, COMBINE, site, way, variant, n, rows,
        lambda room: dropless_combine_needs(room, n, problem.world),
    )  # fmt: skip
    if entered is None:
        return None
    memory, number, new = entered
    out = x[0].new_empty(rows, n)
    for compile_only in first_compile(workspace, new):
        launch_dropless_combine(
            memory, x, w, out, offsets, positions, received, sent, config, number, trace, compile_only, bias
        )
    workspace.leave()
    return out


def dropless_dispatch(
    workspace: GpuWorkspace,
    way: str,
    problem: DroplessProblem,
    x: Tensor,
    w: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    offsets: Tensor,
    positions: Tensor | None,
    received: Sequence[int],
    sent: Sequence[int],
    keep: bool,
    site: str,
    trace: Tensor | None = None,
) -> list[Tensor] | None:
    """Products `[sum(received), N_i]` with all weights and, with `keep`, X; as `dropless_combine`.

    The first `problem.weights` are multiplied while the rows arrive, the others afterwards.
    """
    config, rows, k, count = dropless_ways(problem)[way], sum(received), problem.k, problem.weights
    assert config is not None
    variant = problem, w[0].stride(), bias[0] is None, trace is None
    entered = _enter(
        workspace, DISPATCH, site, way, variant, k, max(rows, sum(sent)),
        lambda room: dropless_dispatch_needs(room, k, problem.world),
    )  # fmt: skip
    if entered is None:
        return None
    memory, number, new = entered
    outputs = [x.new_empty(rows, problem.columns) for _ in range(count)]
    biases = [b for b in bias[:count] if b is not None]
    for compile_only in first_compile(workspace, new):
        launch_dropless_dispatch(
            memory, x, w[:count], outputs, offsets, positions, received, sent, config, number, trace,
            compile_only, biases,
        )  # fmt: skip
    if keep or len(w) > count:
        exchanged = dropless_exchanged(memory, rows, k, x.dtype)
        rest = zip(w[count:], bias[count:], strict=True)
        outputs += [grouped_product(exchanged, wi, b, offsets) for wi, b in rest] + [exchanged] * keep
    workspace.leave()
    return outputs


def _enter(
    workspace: GpuWorkspace,
    op: str,
    site: str,
    way: str,
    variant: Hashable,
    columns: int,
    rows: int,
    needs: Callable[[int], Need],
) -> tuple[PeerMemory, int, bool] | None:
    """As `GpuWorkspace.enter`, with room for `rows` rows of so many columns."""
    rooms = _rooms.setdefault(workspace, {})
    if torch.cuda.is_current_stream_capturing():
        room = rooms.get((op, columns), 0)
        if room and rows > room:
            raise RuntimeError(
                f"{op}, rank {workspace.rank} of group {workspace.group_name}: {rows} rows are captured, and "
                f"there is room for {room}; run as many once before you capture"
            )
    else:
        most = max(told_by_all(workspace, op, site, rows), rooms.get((op, columns), LEAST_ROWS))
        room = rooms[op, columns] = 1 << (most - 1).bit_length()
    return workspace.enter(op, site, lambda: needs(room), way, (variant, room)) if room else None


def told_by_all(workspace: GpuWorkspace, op: str, site: str, rows: int) -> int:
    """The most rows that a rank has. Told through shared memory, or through a store, which takes longer."""
    try:
        with workspace_for(workspace.group_name).call(op, site, "rows of all ranks", 0) as call:
            return max(of_rank for (of_rank,) in call.exchange([rows]))
    except NotShared:
        return max(map(int, workspace.meet(str(rows))))


_rooms: WeakKeyDictionary[GpuWorkspace, dict[tuple[str, int], int]] = WeakKeyDictionary()
