"""all_to_all_expert_matmul (dispatch): rows come to the rank of their expert and are multiplied there.

    w[i], bias[i]: consumer i, see `experts`; Y[i] = X @ w[i] (+ bias[i]) per expert

    fixed     X: [E, R, K], whose dim `dim` is (outer, W, c), W by source; Y[i]: [E, R, N_i], listed [R, N_i]
              x: [W, ...], by destination, each part of the shape of X but for outer * c
    dropless  x: [sum(input_splits), K], exchanged to S: [sum(output_splits), K]
              X = S[positions]: [rows, K]; Y[i]: [rows, N_i], zero behind the last expert
    dgrad     dx = the exchange back of sum_i dY[i] @ w[i]^T + dX       one expert_matmul_all_to_all
    wgrad     dw[i] = X^T @ dY[i], dbias[i] = sum of dY[i], per expert; X is exchanged again unless kept

With `keep_exchanged` X is the last output, and dX its gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.cpu.exchange_executor import Size, Splits, run_exchange
from autofuse.lowering.cpu.workspace import workspace_for
from autofuse.lowering.ops.gpu import dispatch_on_gpu
from autofuse.lowering.ops.library import FusedOp, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.reference import expert_rows as rows_of
from autofuse.lowering.reference import experts as ex
from autofuse.native_kernels.cpu import DTYPES

_OP = "all_to_all_expert_matmul"
_SCHEMA = (
    "all_to_all_expert_matmul(Tensor x, Tensor[] w, Tensor[] bias, int experts, Tensor? offsets, "
    "Tensor? positions, SymInt[] output_splits, SymInt[] input_splits, int dim, SymInt outer, "
    "bool keep_exchanged, Any group_name, str order, str site) -> Tensor[]"
)


def _fake(
    x: Tensor,
    w: list[Tensor],
    bias: list[Tensor],
    experts: int,
    offsets: Tensor | None,
    positions: Tensor | None,
    output_splits: list[Size],
    input_splits: list[Size],
    dim: int,
    outer: Size,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> list[Tensor]:
    k = x.shape[-1]
    if input_splits:
        rows = sum(output_splits) if positions is None else positions.shape[0]
        exchanged = x.new_empty((rows, k))
        outputs = [x.new_empty((rows, wi.shape[-1])) for wi in (w[::experts] if experts else w)]
    else:
        count, rows, k = _whole(x, dim)
        exchanged = x.new_empty((count, rows, k))
        lead = (rows,) if experts else (count, rows)
        outputs = [x.new_empty((*lead, wi.shape[-1])) for wi in w]
    return [*outputs, exchanged] if keep_exchanged else outputs


def reference(
    x: Tensor,
    w: list[Tensor],
    bias: list[Tensor],
    experts: int,
    offsets: Tensor | None,
    positions: Tensor | None,
    output_splits: list[int],
    input_splits: list[int],
    dim: int,
    outer: int,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> list[Tensor]:
    exchanged = rows_of.dispatch_rows(x, positions, output_splits, input_splits, dim, outer, group_name)
    form = ex.Experts.of(w, experts, offsets, bool(input_splits), exchanged.shape[-2], _OP)
    outputs = _empty_outputs(exchanged, w, form)
    _multiply(exchanged, w, bias, form, outputs)
    return [*outputs, exchanged] if keep_exchanged else outputs


def _cpu(
    x: Tensor,
    w: list[Tensor],
    bias: list[Tensor],
    experts: int,
    offsets: Tensor | None,
    positions: Tensor | None,
    output_splits: list[int],
    input_splits: list[int],
    dim: int,
    outer: int,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> Any:
    if x.dtype not in DTYPES:
        return NotImplemented
    workspace = workspace_for(group_name)
    world, rank = workspace.world, workspace.rank
    x, k, part_rows = x.contiguous(), x.shape[-1], 0
    runs: list[list[rows_of.Run]] | None = None
    if not input_splits:
        shape = count, rows, _ = _whole(x, dim)
        form = ex.Experts.of(w, experts, None, False, rows, _OP)
        if (x.shape[0], count) != (world, form.count):
            raise ValueError(f"{_OP}: expected x [{world}, {form.count}, rows, K], got {tuple(x.shape)}")
        inner = rows_of.check_capacity(shape, dim, outer, world, _OP)
        if dim == 1 and inner >= rows_of.FEW_ROWS:
            runs = rows_of.even_runs(count, outer, world, inner)
        part_rows = x.shape[1] * x.shape[2]
        key = f"{x.dtype} {count} experts of {rows} rows, {k} columns, dim {dim}, outer {outer}"
        exchanged = x.new_empty(shape if keep_exchanged or runs is None else 0)
        like = x.new_empty(0).expand(count, rows, 0)
    else:
        received_rows = sum(output_splits)
        rows = received_rows if positions is None else positions.shape[0]
        positions = rows_of.check_positions(positions, rows, received_rows, _OP)
        form = ex.Experts.of(w, experts, offsets, True, rows, _OP)
        assert form.ranges is not None
        if x.shape[0] != sum(input_splits):
            raise ValueError(
                f"{_OP}: x has {x.shape[0]} rows, input_splits {input_splits} add up to another number"
            )
        runs = rows_of.find_runs(positions, form.ranges, output_splits)
        key = f"{x.dtype} dropless, {k} columns"
        exchanged = x.new_empty((rows, k) if keep_exchanged or runs is None else 0)
        like = x.new_empty(0).expand(rows, 0)
    outputs = _empty_outputs(like, w, form)
    plan = PlanShape.of_any_size(_OP, order, world).plan(rank)
    even = Splits.even(world, part_rows)
    width = k * x.dtype.itemsize
    with workspace.call(_OP, site, f"{key}, {plan.agreement}", even.most * width) as call:
        splits = even
        if form.ranges is not None:
            splits = Splits.agree(call, input_splits, output_splits)
            call.reserve(splits.most * width)
        received = call.tensor(rank, 0, (splits.rows(rank), k), x.dtype)
        starts = [sum(splits.sends[rank][:dest]) for dest in range(world)]
        sent = x.view(-1, k)

        def store(dest: int) -> None:
            if dest == rank and form.ranges is None:
                return  # read where it is
            start, length = splits.start(rank, dest), splits.sends[rank][dest]
            there = call.tensor(dest, 0, (splits.rows(dest), k), x.dtype)
            there[start : start + length].copy_(sent[starts[dest] : starts[dest] + length])

        def arrived(source: int) -> None:
            if source == rank and form.ranges is None:
                part = sent[starts[rank] : starts[rank] + splits.sends[rank][rank]]
            else:
                start = splits.start(source, rank)
                part = received[start : start + splits.sends[source][rank]]
            if runs is not None:
                for run in runs[source]:
                    rows = slice(run.row, run.row + run.length)
                    form.apply(part[run.at : run.at + run.length], w, bias, run.expert, outputs, rows)
            if form.ranges is None and exchanged.numel():
                place = rows_of.parts(exchanged, dim, outer, world)[source]
                place.copy_(part.view(place.shape))

        run_exchange(plan, call, store, arrived)
        if form.ranges is not None and exchanged.numel():
            if positions is None:
                exchanged.copy_(received)
            else:
                torch.index_select(received, 0, positions, out=exchanged)
    if runs is None:
        _multiply(exchanged, w, bias, form, outputs)
    return [*outputs, exchanged] if keep_exchanged else outputs


def _whole(x: Tensor, dim: int) -> tuple[Any, ...]:
    """The shape of X, whose parts are `x: [W, ...]`."""
    return tuple(size * x.shape[0] if i == dim else size for i, size in enumerate(x.shape[1:]))


def _empty_outputs(exchanged: Tensor, w: list[Tensor], form: ex.Experts) -> list[Tensor]:
    """Room for Y, with zeros where no expert writes; `exchanged` has the shape of X but for its columns."""
    rows = exchanged.shape[:-1]
    if form.ranges is None:
        return [exchanged.new_empty((*rows[form.listed :], wi.shape[-1])) for wi in w]
    outputs = [exchanged.new_empty((*rows, wi.shape[-1])) for wi in (w[:: form.count] if form.listed else w)]
    for out in outputs:
        out[form.used :] = 0
    return outputs


def _multiply(
    exchanged: Tensor, w: list[Tensor], bias: list[Tensor], form: ex.Experts, outputs: list[Tensor]
) -> None:
    if form.batched:
        biases: Sequence[Tensor | None] = bias or [None] * len(w)
        for wi, b, out in zip(w, biases, outputs, strict=True):
            ex.batched_matmul(exchanged, wi, b, out)
        return
    for e in range(form.count):
        part = exchanged[e] if form.ranges is None else form.rows([exchanged], e)[0]
        form.apply(part, w, bias, e, outputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, w, bias, experts, offsets, positions = inputs[:6]
    keep = inputs[10]
    ctx.counts, ctx.experts, ctx.keep = (len(w), len(bias)), experts, keep
    ctx.output_splits, ctx.input_splits, ctx.dim, ctx.outer, _, ctx.group_name, ctx.order, ctx.site = inputs[
        6:
    ]
    ctx.shapes = [(t.shape, t.dtype, t.device) for t in output]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*w, *bias, output[-1] if keep else x, offsets, positions)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    *saved, x, offsets, positions = ctx.saved_tensors
    w, bias = ex.cut(saved, ctx.counts)
    needs = ctx.needs_input_grad
    of_exchanged = grads[-1] if ctx.keep else None
    consumers = len(grads) - ctx.keep
    of_outputs = [
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g
        for g, (shape, dtype, device) in zip(grads[:consumers], ctx.shapes, strict=False)
    ]
    dx = None
    if needs[0]:
        (dx,) = torch.ops.autofuse.expert_matmul_all_to_all(
            of_outputs, ex.transposed(w), [], [] if of_exchanged is None else [of_exchanged],
            "mm" if of_exchanged is None else "mm; add %0", ctx.experts, offsets, positions, ctx.input_splits,
            ctx.output_splits, ctx.dim, ctx.outer, False, ctx.group_name, ctx.order, ctx.site + "'",
        )  # fmt: skip
    dw: list[Tensor | None] = [None] * len(w)
    rows = ctx.shapes[0][0][-2]
    form = ex.Experts.of(w, ctx.experts, offsets, bool(ctx.input_splits), rows, _OP)
    if any(needs[1]):
        if not ctx.keep:
            x = rows_of.dispatch_rows(
                x, positions, ctx.output_splits, ctx.input_splits, ctx.dim, ctx.outer, ctx.group_name
            )
        copies = consumers // form.count if form.listed and form.ranges is None else consumers
        dw = [*ex.weight_gradients(form.split(x) * copies, of_outputs, form)]
    # autograd takes an empty list of numbers for a list of tensors
    none: list[None] | None = None if ctx.input_splits else []
    return dx, dw, ex.bias_gradients(of_outputs, bias, form), *[None] * 3, none, none, *[None] * 6


register(FusedOp(_SCHEMA, _fake, reference, _cpu, None, _setup_context, _backward, dispatch_on_gpu))
