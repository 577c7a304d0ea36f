"""The expert ops on GPUs, as `FusedOp.cuda` calls them: check sizes, choose a way, run it.

The arguments have no gap: `FusedOp.gpu_gap` was asked before. For sizes that the kernels do not take, the
functions return NotImplemented, and the reference runs. All decisions depend only on arguments that are equal
on all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.calls import Calls, GpuCall, run_call
from autofuse.lowering.gpu.choice.kernel import DTYPES, Way
from autofuse.lowering.gpu.choice.quick import Quick, sizes_of
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_of
from autofuse.lowering.gpu.operands import aligned
from autofuse.lowering.ops.all_to_all_expert_matmul import AllToAllExpertMatmul
from autofuse.lowering.ops.expert_matmul_all_to_all import ExpertMatmulAllToAll
from autofuse.lowering.reference.expert_rows import check_capacity

from .dropless import (
    DroplessCombine,
    DroplessDispatch,
    dropless_combine,
    dropless_combine_variant,
    dropless_dispatch,
    dropless_dispatch_variant,
    dropless_problem_of,
    last_told,
)
from .fixed import (
    Combine,
    Dispatch,
    at_once,
    combine,
    combine_variant,
    dispatch,
    dispatch_variant,
    made,
    of_sum,
    problem_of,
)
from .kernels import Rows
from .measure import trials
from .unfused import can_group, combine_unfused, dispatch_unfused
from .ways import COMBINE, DISPATCH


def run_combine(args: ExpertMatmulAllToAll) -> Any:
    """expert_matmul_all_to_all; NotImplemented for what is left to the reference."""
    return run_call(combine_call(args))


def run_dispatch(args: AllToAllExpertMatmul) -> Any:
    """all_to_all_expert_matmul; NotImplemented for what is left to the reference."""
    return run_call(dispatch_call(args))


def combine_call(args: ExpertMatmulAllToAll) -> GpuCall | None:
    """One batch of experts as the kernels take it; None for sizes and dtypes that they do not have."""
    x, w, outer, order, site = args.x, args.w, args.outer, args.order, args.site
    if args.input_splits:
        return _dropless_combine_call(args)
    if not all(_usable(xi, w) for xi in x):
        return None
    workspace = workspace_of(args.group_name, x[0])
    a = [xi.contiguous() for xi in x]
    check_capacity(a[0].shape, 1, outer, workspace.world, COMBINE)
    problem = of_sum(problem_of(COMBINE, a[0], w[0], workspace, outer), a, w)
    biases = _biases(args.bias, w)

    def run(way: Way) -> list[Tensor] | None:
        out = combine(workspace, way, problem, a, w, biases[0], order, site)
        return None if out is None else [out]

    variant = combine_variant(w, biases[0], order)
    return GpuCall(COMBINE, args, workspace, problem, run, variant, trials=trials)


def _dropless_combine_call(args: ExpertMatmulAllToAll) -> GpuCall | None:
    """A combine of rows that fill the send buffer. Only these checks may depend on how many a rank has."""
    x, w, site, group_name = args.x, args.w, args.site, args.group_name
    if not all(_alike(xi, w) for xi in x) or x[0].shape[0] != sum(args.input_splits):
        return None
    workspace = workspace_of(group_name, x[0])
    a, rows = [xi.contiguous() for xi in x], _rows(args)
    problem = of_sum(dropless_problem_of(COMBINE, a[0], w[0], workspace), a, w)
    biases = _biases(args.bias, w)

    def run(way: Way, named: bool = False) -> list[Tensor] | None:
        out = dropless_combine(workspace, way, problem, a, w, biases[0], rows, site, named=named)
        return None if out is None else [out]

    def unfused() -> list[Tensor]:
        return [combine_unfused(a, w, biases[0], rows, group_name)]

    variant = dropless_combine_variant(w, biases[0])
    grouped = rows.offsets is not None and can_group(problem)
    return GpuCall(
        COMBINE, args, workspace, problem, run, variant, unfused if grouped else None,
        told=partial(last_told, workspace, COMBINE, site, problem), named=partial(run, named=True),
    )  # fmt: skip


def dispatch_call(args: AllToAllExpertMatmul) -> GpuCall | None:
    """Batched experts as the kernels take them; None for sizes and dtypes that they do not have."""
    x, w, outer, keep_exchanged, site = args.x, args.w, args.outer, args.keep_exchanged, args.site
    if args.input_splits:
        return _dropless_dispatch_call(args)
    if not _usable(x, w) or args.gate:
        return None
    workspace = workspace_of(args.group_name, x)
    world, count, rows, k = x.shape
    if (world, count) != (workspace.world, w[0].shape[0]):
        raise ValueError(
            f"{DISPATCH}: expected x [{workspace.world}, {w[0].shape[0]}, rows, K], got {list(x.shape)}"
        )
    check_capacity((count, rows * world, k), 1, outer, world, DISPATCH)
    parts = x.contiguous()
    biases = _biases(args.bias, w)
    count = at_once(w, biases)
    problem = problem_of(DISPATCH, parts, w[0], workspace, outer, count)

    def run(way: Way) -> list[Tensor] | None:
        return dispatch(workspace, way, problem, parts, w, biases, keep_exchanged, site)

    more = keep_exchanged or len(w) > count
    variant = dispatch_variant(w, biases, more), len(w), keep_exchanged
    return GpuCall(DISPATCH, args, workspace, problem, run, variant, trials=trials)


def _dropless_dispatch_call(args: AllToAllExpertMatmul) -> GpuCall | None:
    """A dispatch whose rows are all of those that arrive."""
    x, w, site, group_name, keep_exchanged = args.x, args.w, args.site, args.group_name, args.keep_exchanged
    if not _alike(x, w):
        return None
    if args.positions is not None and args.positions.shape[0] != sum(args.output_splits):
        return None
    workspace = workspace_of(group_name, x)
    parts, rows, biases = x.contiguous(), _rows(args), _biases(args.bias, w)
    count, gate = at_once(w, biases), args.gate
    problem = dropless_problem_of(DISPATCH, parts, w[0], workspace, count, gate)
    if gate and (count != len(w) or biases[0] is not None):
        problem = replace(problem, aligned=False)  # for no kernel
    if not all(can_group(dropless_problem_of(DISPATCH, parts, wi, workspace)) for wi in w[count:]):
        return None

    def run(way: Way, named: bool = False) -> list[Tensor] | None:
        how = parts, w, biases, rows, keep_exchanged, site
        return dropless_dispatch(workspace, way, problem, *how, named=named)

    def unfused() -> list[Tensor]:
        return dispatch_unfused(parts, w, biases, rows, keep_exchanged, gate, group_name)

    variant = dropless_dispatch_variant(w, biases)
    return GpuCall(
        DISPATCH, args, workspace, problem, run, variant, unfused if can_group(problem) else None,
        told=partial(last_told, workspace, DISPATCH, site, problem), named=partial(run, named=True),
    )  # fmt: skip


CALLS: Calls = {COMBINE: combine_call, DISPATCH: dispatch_call}


# --- Again, past the dispatcher (`lowering/direct.py`) ----------------------------------------------------


def _combine_kind(given: tuple[Any, ...]) -> Hashable:
    x, w, bias, _, product, _, offsets, positions, _, splits, *rest = given
    if splits:
        sizes = _ragged_sizes(x, w, bias, offsets, positions)
    else:
        sizes = None if offsets is not None else sizes_of(x, w, bias)
    return None if sizes is None else (*sizes, product, *rest)


def _combine_again(made: Combine | DroplessCombine, given: tuple[Any, ...]) -> list[Tensor] | None:
    x, w, bias, _, _, _, offsets, positions, received, sent, *_ = given
    only = bias[0] if bias and bias[0].numel() else None
    if isinstance(made, DroplessCombine):
        return made.again(x, w, only, Rows(offsets, positions, received, sent))
    return made.again(x, w, only)


def _dispatch_kind(given: tuple[Any, ...]) -> Hashable:
    x, w, bias, gate, _, offsets, positions, _, splits, *rest = given
    if splits:
        sizes = _ragged_sizes([x], w, bias, offsets, positions)
    else:
        sizes = None if offsets is not None else sizes_of([x], w, bias)
    return None if sizes is None else (*sizes, gate, *rest)


def _dispatch_again(made: Dispatch | DroplessDispatch, given: tuple[Any, ...]) -> list[Tensor] | None:
    x, w, bias, _, _, offsets, positions, received, sent, _, _, keep, *_ = given
    biases = [b if b.numel() else None for b in bias] or [None] * len(w)
    if isinstance(made, DroplessDispatch):
        return made.again(x, w, biases, Rows(offsets, positions, received, sent), keep)
    return made.again(x, w, biases)


def _ragged_sizes(
    x: list[Tensor], w: list[Tensor], bias: list[Tensor], offsets: Tensor | None, positions: Tensor | None
) -> tuple[Hashable, ...] | None:
    """As `sizes_of`; None also where offsets or positions are not as kernels take them."""
    for given, dtype in ((offsets, torch.int32), (positions, torch.int64)):
        if given is not None and (given.dtype is not dtype or not given.is_contiguous()):
            return None
    sizes = sizes_of(x, w, bias, any_rows=True)
    return None if sizes is None else (*sizes, offsets is None, positions is None)


def _made(workspace: GpuWorkspace, args: ExpertMatmulAllToAll | AllToAllExpertMatmul) -> Any:
    """What runs calls like this one, once their way is settled and is one of ours."""
    call = combine_call(args) if isinstance(args, ExpertMatmulAllToAll) else dispatch_call(args)
    way = None if call is None else workspace.calls.get(call.kind)
    if call is None or way is None:
        return None
    return workspace.calls.get(made(call.op, way, call.problem, call.variant, args.site))


QUICK: Mapping[str, Quick] = {
    COMBINE: Quick(_combine_kind, _made, _combine_again),
    DISPATCH: Quick(_dispatch_kind, _made, _dispatch_again),
}


def _rows(args: ExpertMatmulAllToAll | AllToAllExpertMatmul) -> Rows:
    offsets, positions = _vector(args.offsets, torch.int32), _vector(args.positions, torch.int64)
    return Rows(offsets, positions, args.output_splits, args.input_splits)


def _vector(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return t if t is None or (t.dtype is dtype and t.is_contiguous()) else t.to(dtype).contiguous()


def _alike(x: Tensor, w: list[Tensor]) -> bool:
    """Whether kernels take the dtypes, and the weights have elements; rows may be missing on some ranks."""
    return x.dtype in DTYPES and all(wi.dtype is x.dtype and wi.numel() for wi in w)


def _usable(x: Tensor, w: list[Tensor]) -> bool:
    return _alike(x, w) and 0 not in x.shape


def _biases(bias: list[Tensor], w: list[Tensor]) -> list[Tensor | None]:
    """`[E, N]` or none a weight."""
    count = w[0].shape[0]
    return [aligned(b.reshape(count, -1)) if b.numel() else None for b in bias] or [None] * len(w)
