"""expert_matmul_all_to_all (combine): matmuls of the experts on this rank, whose rows go back to their ranks.

    x[i], w[i], bias[i]: see `experts`
    P = epilogue(sum_i x[i] @ w[i] (+ bias[i])), operands broadcast against P

    fixed     P: [E, R, N], whose dim `dim` is (outer, W, c); the part [:, d, :] of it goes to rank d
              y: [W, ...], by source; for dim 1 [W, E, outer * c, N]
    dropless  P: [rows, N]; S = 0, S[positions] += P: [sum(input_splits), N], whose parts go to the ranks
              y: [sum(output_splits), N], by source
    backward  G = the exchange back of dy, a dispatch: P's gradient; with w^T as experts it computes dgrad too
    dgrad     dx[i] = G @ w[i]^T         one all_to_all_expert_matmul, which keeps G
    wgrad     dw[i] = x[i]^T @ G         dbias[i] = sum of G, per expert

With `keep_product` P is returned too and its own gradient is added to G.
"""

from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.cpu.exchange_executor import Size, Splits, run_exchange
from autofuse.lowering.cpu.workspace import workspace_for
from autofuse.lowering.ops.gpu import combine_on_gpu
from autofuse.lowering.ops.library import FusedOp, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.reference import expert_rows as rows_of
from autofuse.lowering.reference import experts as ex
from autofuse.lowering.reference.product import epilogue, epilogue_backward
from autofuse.lowering.torch_internals import group_size
from autofuse.native_kernels.cpu import DTYPES
from autofuse.native_kernels.cpu.embedding import scatter_rows

_SCHEMA = (
    "expert_matmul_all_to_all(Tensor[] x, Tensor[] w, Tensor[] bias, Tensor[] operands, str product, "
    "int experts, Tensor? offsets, Tensor? positions, SymInt[] output_splits, SymInt[] input_splits, "
    "int dim, SymInt outer, bool keep_product, Any group_name, str order, str site) -> Tensor[]"
)


def _fake(
    x: list[Tensor],
    w: list[Tensor],
    bias: list[Tensor],
    operands: list[Tensor],
    product: str,
    experts: int,
    offsets: Tensor | None,
    positions: Tensor | None,
    output_splits: list[Size],
    input_splits: list[Size],
    dim: int,
    outer: Size,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> list[Tensor]:
    n = w[0].shape[-1]
    rows: list[Size] = [x[0].shape[-2]]
    if not input_splits:
        rows.insert(0, experts or w[0].shape[0])
    p = x[0].new_empty((*rows, n), dtype=ex.contraction_dtype(x[0], product))
    p = epilogue(p, operands, product)
    if input_splits:
        y = p.new_empty((sum(output_splits), n))
    else:
        world = group_size(group_name)
        y = p.new_empty((world, *rows_of.part_shape(p.shape, dim, world)))
    return [y, p] if keep_product else [y]


def reference(
    x: list[Tensor],
    w: list[Tensor],
    bias: list[Tensor],
    operands: list[Tensor],
    product: str,
    experts: int,
    offsets: Tensor | None,
    positions: Tensor | None,
    output_splits: list[int],
    input_splits: list[int],
    dim: int,
    outer: int,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> list[Tensor]:
    op = "expert_matmul_all_to_all"
    form = ex.Experts.of(w, experts, offsets, bool(input_splits), x[0].shape[-2], op)
    p = ex.product_of(x, w, bias, operands, product, form)
    y = rows_of.combine_rows(p, positions, output_splits, input_splits, dim, outer, group_name)
    return [y, p] if keep_product else [y]


def _cpu(
    x: list[Tensor],
    w: list[Tensor],
    bias: list[Tensor],
    operands: list[Tensor],
    product: str,
    experts: int,
    offsets: Tensor | None,
    positions: Tensor | None,
    output_splits: list[int],
    input_splits: list[int],
    dim: int,
    outer: int,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> Any:
    op = "expert_matmul_all_to_all"
    dtype = _result_dtype(x[0], operands, product)
    if x[0].dtype not in DTYPES or dtype not in DTYPES:
        return NotImplemented
    form = ex.Experts.of(w, experts, offsets, bool(input_splits), x[0].shape[-2], op)
    workspace = workspace_for(group_name)
    world, rank = workspace.world, workspace.rank
    n, rows = w[0].shape[-1], x[0].shape[-2]
    runs: list[list[rows_of.Run]] | None = None
    part = rows_of.part_shape((form.count, rows, n), dim, world)
    if form.ranges is None:
        inner = rows_of.check_capacity((form.count, rows, n), dim, outer, world, op)
        if dim == 1 and inner >= rows_of.FEW_ROWS:
            runs = rows_of.even_runs(form.count, outer, world, inner)
        key = f"{dtype} {form.count} experts of {rows} rows, {n} columns, dim {dim}, outer {outer}"
        full = True
    else:
        positions = rows_of.check_positions(positions, rows, sum(input_splits), op)
        distinct = positions is None or rows_of.distinct(positions, sum(input_splits))
        runs = rows_of.find_runs(positions, form.ranges, input_splits) if distinct else None
        key = f"{dtype} dropless, {n} columns"
        full = distinct and form.used == sum(input_splits)
    whole = keep_product or runs is None or product != "mm"
    plan = PlanShape.of_any_size(op, order, world).plan(rank)
    even = Splits.even(world, part[0] * part[1] if form.ranges is None else 0)
    width = (n := part[2]) * dtype.itemsize
    with workspace.call(op, site, f"{key}, {plan.agreement}", even.most * width) as call:
        splits = even
        if form.ranges is not None:
            splits = Splits.agree(call, input_splits, output_splits)
            call.reserve(splits.most * width)
        p = ex.product_of(x, w, bias, operands, product, form) if whole else x[0].new_empty(0)
        route = None if form.ranges is None or not whole else _Route(p, positions, input_splits, full)
        out = x[0].new_empty((splits.rows(rank), n), dtype=dtype)
        mine = call.tensor(rank, 0, out.shape, dtype)

        def store(dest: int) -> None:
            start, length = splits.start(rank, dest), splits.sends[rank][dest]
            buffer = out if dest == rank else call.tensor(dest, 0, (splits.rows(dest), n), dtype)
            there = buffer[start : start + length]
            if route is not None:
                route.store(there, dest)
            elif whole:
                mine_of = rows_of.parts(p, dim, outer, world)[dest]
                there.view(mine_of.shape).copy_(mine_of)
            else:
                assert runs is not None
                if not full:
                    there.zero_()
                for run in runs[dest]:
                    place = there[run.at : run.at + run.length]
                    form.add_up(x, w, bias, run.expert, place, slice(run.row, run.row + run.length))

        def arrived(source: int) -> None:
            start = splits.start(source, rank)
            where = slice(start, start + splits.sends[source][rank])
            out[where].copy_(mine[where])

        run_exchange(plan, call, store, arrived)
    y = out if form.ranges is not None else out.view(world, *part)
    return [y, p] if keep_product else [y]


class _Route:
    """Scatters finished rows of `p: [rows, N]` to `positions` in the parts of a send buffer."""

    def __init__(self, p: Tensor, positions: Tensor | None, splits: list[int], full: bool) -> None:
        self.full = full
        ends = torch.tensor(splits).cumsum(0)
        self.starts = [0, *ends.tolist()]
        self.sent = p.contiguous()
        self.order: Tensor | None = None
        if positions is None:
            return
        if not full and not rows_of.distinct(positions, self.starts[-1]):
            self.sent = p.new_zeros((self.starts[-1], p.shape[1])).index_add_(0, positions, p)
            return
        parts = torch.bucketize(positions, ends, right=True)
        self.positions = positions
        self.order = parts.argsort(stable=True)
        self.bounds = [0, *parts.bincount(minlength=len(splits)).cumsum(0).tolist()]

    def store(self, there: Tensor, dest: int) -> None:
        start = self.starts[dest]
        if self.order is None:
            there.copy_(self.sent[start : start + there.shape[0]])
            return
        if not self.full:
            there.zero_()
        rows = self.order[self.bounds[dest] : self.bounds[dest + 1]]
        scatter_rows(there, self.positions[rows] - start, self.sent, rows)


def _result_dtype(x: Tensor, operands: list[Tensor], product: str) -> torch.dtype:
    dtype = ex.contraction_dtype(x, product)
    if product == "mm":
        return dtype
    p = torch.empty((1,) * 3, dtype=dtype, device="meta")
    return epilogue(p, [o.to("meta") for o in operands], product).dtype


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, w, bias, operands, product, experts, offsets, positions = inputs[:8]
    ctx.counts, ctx.product, ctx.experts = (len(x), len(w), len(bias), len(operands)), product, experts
    ctx.output_splits, ctx.input_splits, ctx.dim, ctx.outer, _, ctx.group_name, ctx.order, ctx.site = inputs[
        8:
    ]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*x, *w, *bias, *operands, offsets, positions)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    *saved, offsets, positions = ctx.saved_tensors
    x, w, bias, operands = ex.cut(saved, ctx.counts)
    of_y, of_p = (*grads, None)[:2]
    needs = ctx.needs_input_grad
    dx: list[Tensor | None] = [None] * len(x)
    of_operands: list[Tensor | None] = [None] * len(operands)
    if of_y is not None and of_p is None and ctx.product == "mm":
        *dx, g = torch.ops.autofuse.all_to_all_expert_matmul(
            of_y.contiguous(), ex.transposed(w), [], ctx.experts, offsets, positions, ctx.input_splits,
            ctx.output_splits, ctx.dim, ctx.outer, True, ctx.group_name, ctx.order, ctx.site + "'",
        )  # fmt: skip
        form = ex.Experts.of(
            w, ctx.experts, offsets, bool(ctx.input_splits), g.shape[-2], "expert_matmul_all_to_all"
        )
    else:
        g = of_p
        if of_y is not None:
            back = rows_of.dispatch_rows(
                of_y, positions, ctx.input_splits, ctx.output_splits, ctx.dim, ctx.outer, ctx.group_name
            )
            g = back if g is None else g + back
        assert g is not None
        form = ex.Experts.of(
            w, ctx.experts, offsets, bool(ctx.input_splits), g.shape[-2], "expert_matmul_all_to_all"
        )
        g, of_operands = epilogue_backward(g, operands, ctx.product, x[0].dtype, needs[3])
        if any(needs[0]):
            dx = [*ex.input_gradients(g, w, form)]
    terms = len(x) // form.count if form.listed and form.ranges is None else len(x)
    every = form.split(g) * terms
    dw = ex.weight_gradients(x, every, form) if any(needs[1]) else [None] * len(w)
    # autograd takes an empty list of numbers for a list of tensors
    of_bias = ex.bias_gradients(every, bias, form)
    none: list[None] | None = None if ctx.input_splits else []
    return dx, dw, of_bias, of_operands, *[None] * 4, none, none, *[None] * 6


register(FusedOp(_SCHEMA, _fake, reference, _cpu, None, _setup_context, _backward, combine_on_gpu))
