"""all_to_all_expert_matmul (dispatch): rows come to the rank of their expert and are multiplied there.

    w[i], bias[i]: consumer i, see `experts`; Y[i] = X @ w[i] (+ bias[i]) per expert

    fixed     X: [E, R, K], whose dim `dim` is (outer, W, c), W by source; Y[i]: [E, R, N_i], listed [R, N_i]
              x: [W, ...], by destination, each part of the shape of X but for outer * c
    dropless  x: [sum(input_splits), K], exchanged to S: [sum(output_splits), K]
              X = S[positions]: [rows, K]; Y[i]: [rows, N_i], zero behind the last expert
    dgrad     dx = the exchange back of sum_i dY[i] @ w[i]^T + dX       one expert_matmul_all_to_all
    wgrad     dw[i] = X^T @ dY[i], dbias[i] = sum of dY[i], per expert; X is exchanged again unless kept
    gated     gate "silu", two consumers: the one output silu(Y[0]) * Y[1], each op rounded; has no gradient.
              "silu; products": behind it Y[0] and Y[1]

With `keep_exchanged` X is the last output, and dX its gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.cpu.exchange_executor import Splits, run_exchange
from autofuse.lowering.cpu.expert_places import FEW_ROWS, Places, Run, even_runs
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.ops.expert_matmul_all_to_all import LISTED, NO_ROWS
from autofuse.lowering.ops.library import FusedOp, SymInt, SymInts, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Family
from autofuse.lowering.reference import expert_rows as rows_of
from autofuse.lowering.reference import experts as ex
from autofuse.native_kernels.cpu import DTYPES

OP = "all_to_all_expert_matmul"


class AllToAllExpertMatmul(NamedTuple):
    """The arguments of the op."""

    x: Tensor
    w: list[Tensor]
    bias: list[Tensor]
    gate: str
    experts: int
    offsets: Tensor | None
    positions: Tensor | None
    output_splits: SymInts
    input_splits: SymInts
    dim: int
    outer: SymInt
    keep_exchanged: bool
    group_name: str
    order: str
    site: str

    def form(self, rows: int) -> ex.Experts:
        """The experts of `rows` rows; reads the offsets."""
        return ex.Experts.of(self.w, self.experts, self.offsets, bool(self.input_splits), rows, OP)

    def exchanged(self) -> Tensor:
        """X, with the functional collective."""
        return rows_of.dispatch_rows(
            self.x, self.positions, self.output_splits, self.input_splits, self.dim, self.outer,
            self.group_name,
        )  # fmt: skip


def _fake(args: AllToAllExpertMatmul) -> list[Tensor]:
    x, w, experts = args.x, args.w, args.experts
    if args.input_splits:
        rows = sum(args.output_splits) if args.positions is None else args.positions.shape[0]
        exchanged = x.new_empty((rows, x.shape[-1]))
        outputs = [x.new_empty((rows, wi.shape[-1])) for wi in (w[::experts] if experts else w)]
    else:
        count, rows, k = _whole(x, args.dim)
        exchanged = x.new_empty((count, rows, k))
        lead = (rows,) if experts else (count, rows)
        outputs = [x.new_empty((*lead, wi.shape[-1])) for wi in w]
    if args.gate:
        outputs = [torch.empty_like(outputs[0]), *outputs] if args.gate.endswith(ex.KEPT) else outputs[:1]
    return [*outputs, exchanged] if args.keep_exchanged else outputs


def reference(args: AllToAllExpertMatmul) -> list[Tensor]:
    exchanged = args.exchanged()
    form = args.form(exchanged.shape[-2])
    outputs = _empty_outputs(exchanged, args.w, form)
    _multiply(exchanged, args.w, args.bias, form, outputs)
    outputs = ex.gated(outputs, args.gate)
    return [*outputs, exchanged] if args.keep_exchanged else outputs


def _cpu(args: AllToAllExpertMatmul) -> Any:
    w, bias, positions, keep = args.w, args.bias, args.positions, args.keep_exchanged
    input_splits, output_splits, dim, outer = args.input_splits, args.output_splits, args.dim, args.outer
    if args.x.dtype not in DTYPES:
        return NotImplemented
    workspace = workspace_for(args.group_name)
    world, rank = workspace.world, workspace.rank
    x, k, part_rows = args.x.contiguous(), args.x.shape[-1], 0
    runs: list[list[Run]] | None = None
    if not input_splits:
        shape = count, rows, _ = _whole(x, dim)
        form = args.form(rows)
        if (x.shape[0], count) != (world, form.count):
            raise ValueError(f"{OP}: expected x [{world}, {form.count}, rows, K], got {tuple(x.shape)}")
        inner = rows_of.check_capacity(shape, dim, outer, world, OP)
        if dim == 1 and inner >= FEW_ROWS:
            runs = even_runs(count, outer, world, inner)
        part_rows = x.shape[1] * x.shape[2]
        key = f"{x.dtype} {count} experts of {rows} rows, {k} columns, dim {dim}, outer {outer}"
        exchanged = x.new_empty(shape if keep or runs is None else 0)
        like = x.new_empty(0).expand(count, rows, 0)
    else:
        received_rows = sum(output_splits)
        rows = received_rows if positions is None else positions.shape[0]
        places = Places.of(positions, rows, output_splits, OP)
        positions = places.positions
        form = args.form(rows)
        assert form.ranges is not None
        if x.shape[0] != sum(input_splits):
            raise ValueError(
                f"{OP}: x has {x.shape[0]} rows, input_splits {input_splits} add up to another number"
            )
        runs = places.runs(form.ranges)
        key = f"{x.dtype} dropless, {k} columns"
        exchanged = x.new_empty((rows, k) if keep or runs is None else 0)
        like = x.new_empty(0).expand(rows, 0)
    outputs = _empty_outputs(like, w, form)
    plan = PlanShape.of_any_size(OP, args.order, world).plan(rank)
    even = Splits.even(world, part_rows)
    width = k * x.dtype.itemsize
    with workspace.call(OP, args.site, f"{key}, {plan.agreement}", even.most * width) as call:
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
    outputs = ex.gated(outputs, args.gate)
    return [*outputs, exchanged] if keep else outputs


def _cuda(args: AllToAllExpertMatmul) -> Any:
    from autofuse.lowering.gpu.experts.call import run_dispatch

    return run_dispatch(args)


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


def _save(ctx: Any, args: AllToAllExpertMatmul, output: list[Tensor]) -> dict[str, Any]:
    """X in place of x where the op returns it."""
    ctx.shapes = [(t.shape, t.dtype, t.device) for t in output]
    return {"x": output[-1]} if args.keep_exchanged else {}


def _backward(ctx: Any, args: AllToAllExpertMatmul, grads: list[Tensor | None]) -> dict[str, Any]:
    if args.gate:
        raise RuntimeError(f"{OP}: a gated call has no gradient; gate the products behind the op instead")
    of_exchanged = grads[-1] if args.keep_exchanged else None
    consumers = len(grads) - args.keep_exchanged
    of_outputs = [
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g
        for g, (shape, dtype, device) in zip(grads[:consumers], ctx.shapes, strict=False)
    ]
    found: dict[str, Any] = {}
    if ctx.needs.x:
        (found["x"],) = torch.ops.autofuse.expert_matmul_all_to_all(
            of_outputs, ex.transposed(args.w), [], [] if of_exchanged is None else [of_exchanged],
            "mm" if of_exchanged is None else "mm; add %0", args.experts, args.offsets, args.positions,
            args.input_splits, args.output_splits, args.dim, args.outer, False, args.group_name, args.order,
            args.site + "'",
        )  # fmt: skip
    form = args.form(ctx.shapes[0][0][-2])
    if any(ctx.needs.w):
        x = args.x if args.keep_exchanged else args.exchanged()
        copies = consumers // form.count if form.listed and form.ranges is None else consumers
        found["w"] = ex.weight_gradients(form.split(x) * copies, of_outputs, form)
    return found | {"bias": ex.bias_gradients(of_outputs, args.bias, form)}


register(
    FusedOp(
        name=OP,
        arguments=AllToAllExpertMatmul,
        returns="Tensor[]",
        family=Family.CONSUME,
        replaces="all_to_all",
        fake=_fake,
        reference=reference,
        cpu=_cpu,
        backward=_backward,
        save=_save,
        cuda=_cuda,
        exchanged=lambda args: args.x.dtype,
        gpu_gaps=(LISTED, NO_ROWS),
        shapes=lambda args: (*(() if args.input_splits else (args.x.shape,)), args.w[0].shape),
    )
)
