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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.cpu.exchange_executor import Splits, run_exchange
from autofuse.lowering.cpu.expert_places import FEW_ROWS, Places, Route, Run, even_runs
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.gpu.support import MOST_TERMS
from autofuse.lowering.ops.library import FusedOp, Gap, SymInt, SymInts, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Family
from autofuse.lowering.reference import expert_rows as rows_of
from autofuse.lowering.reference import experts as ex
from autofuse.lowering.reference.layout import Size
from autofuse.lowering.reference.product import epilogue, epilogue_backward
from autofuse.lowering.torch_internals import group_size
from autofuse.native_kernels.cpu import DTYPES

OP = "expert_matmul_all_to_all"


class ExpertMatmulAllToAll(NamedTuple):
    """The arguments of the op."""

    x: list[Tensor]
    w: list[Tensor]
    bias: list[Tensor]
    operands: list[Tensor]
    product: str
    experts: int
    offsets: Tensor | None
    positions: Tensor | None
    output_splits: SymInts
    input_splits: SymInts
    dim: int
    outer: SymInt
    keep_product: bool
    group_name: str
    order: str
    site: str

    @property
    def terms(self) -> int:
        return len(self.x)

    def form(self, rows: int) -> ex.Experts:
        """The experts of `rows` rows; reads the offsets."""
        return ex.Experts.of(self.w, self.experts, self.offsets, bool(self.input_splits), rows, OP)


def _fake(args: ExpertMatmulAllToAll) -> list[Tensor]:
    x, w = args.x[0], args.w[0]
    rows: list[Size] = [x.shape[-2]]
    if not args.input_splits:
        rows.insert(0, args.experts or w.shape[0])
    p = x.new_empty((*rows, w.shape[-1]), dtype=ex.contraction_dtype(x, args.product))
    p = epilogue(p, args.operands, args.product)
    if args.input_splits:
        y = p.new_empty((sum(args.output_splits), w.shape[-1]))
    else:
        world = group_size(args.group_name)
        y = p.new_empty((world, *rows_of.part_shape(p.shape, args.dim, world)))
    return [y, p] if args.keep_product else [y]


def reference(args: ExpertMatmulAllToAll) -> list[Tensor]:
    form = args.form(args.x[0].shape[-2])
    p = ex.product_of(args.x, args.w, args.bias, args.operands, args.product, form)
    y = rows_of.combine_rows(
        p, args.positions, args.output_splits, args.input_splits, args.dim, args.outer, args.group_name
    )
    return [y, p] if args.keep_product else [y]


def _cpu(args: ExpertMatmulAllToAll) -> Any:
    x, w, bias, product = args.x, args.w, args.bias, args.product
    input_splits = args.input_splits
    dtype = _result_dtype(x[0], args.operands, product)
    if x[0].dtype not in DTYPES or dtype not in DTYPES:
        return NotImplemented
    n, rows = w[0].shape[-1], x[0].shape[-2]
    form = args.form(rows)
    workspace = workspace_for(args.group_name)
    world, rank = workspace.world, workspace.rank
    places: Places | None = None
    runs: list[list[Run]] | None = None
    part = rows_of.part_shape((form.count, rows, n), args.dim, world)
    if form.ranges is None:
        inner = rows_of.check_capacity((form.count, rows, n), args.dim, args.outer, world, OP)
        if args.dim == 1 and inner >= FEW_ROWS:
            runs = even_runs(form.count, args.outer, world, inner)
        key = f"{dtype} {form.count} experts of {rows} rows, {n} columns, dim {args.dim}, outer {args.outer}"
        full = True
    else:
        places = Places.of(args.positions, rows, input_splits, OP)
        runs = places.runs(form.ranges) if places.distinct else None
        key = f"{dtype} dropless, {n} columns"
        full = places.distinct and form.used == sum(input_splits)
    whole = args.keep_product or runs is None or product != "mm"
    plan = PlanShape.of_any_size(OP, args.order, world).plan(rank)
    even = Splits.even(world, part[0] * part[1] if form.ranges is None else 0)
    width = (n := part[2]) * dtype.itemsize
    with workspace.call(OP, args.site, f"{key}, {plan.agreement}", even.most * width) as call:
        splits = even
        if form.ranges is not None:
            splits = Splits.agree(call, input_splits, args.output_splits)
            call.reserve(splits.most * width)
        p = ex.product_of(x, w, bias, args.operands, product, form) if whole else x[0].new_empty(0)
        route = Route(p, places, full) if whole and places is not None else None
        out = x[0].new_empty((splits.rows(rank), n), dtype=dtype)
        mine = call.tensor(rank, 0, out.shape, dtype)

        def store(dest: int) -> None:
            start, length = splits.start(rank, dest), splits.sends[rank][dest]
            buffer = out if dest == rank else call.tensor(dest, 0, (splits.rows(dest), n), dtype)
            there = buffer[start : start + length]
            if route is not None:
                route.store(there, dest)
            elif whole:
                mine_of = rows_of.parts(p, args.dim, args.outer, world)[dest]
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
    return [y, p] if args.keep_product else [y]


def _cuda(args: ExpertMatmulAllToAll) -> Any:
    from autofuse.lowering.gpu.experts.call import run_combine

    return run_combine(args)


def _result_dtype(x: Tensor, operands: list[Tensor], product: str) -> torch.dtype:
    dtype = ex.contraction_dtype(x, product)
    if product == "mm":
        return dtype
    p = torch.empty((1,) * 3, dtype=dtype, device="meta")
    return epilogue(p, [o.to("meta") for o in operands], product).dtype


def _backward(ctx: Any, args: ExpertMatmulAllToAll, grads: list[Tensor | None]) -> dict[str, Any]:
    x, w, operands = args.x, args.w, args.operands
    of_y, of_p = (*grads, None)[:2]
    found: dict[str, Any] = {}
    # The gradient goes back the way that the rows came.
    way = (args.positions, args.input_splits, args.output_splits, args.dim, args.outer)
    if of_y is not None and of_p is None and args.product == "mm":
        *found["x"], g = torch.ops.autofuse.all_to_all_expert_matmul(
            of_y.contiguous(), ex.transposed(w), [], "", args.experts, args.offsets, *way, True,
            args.group_name, args.order, args.site + "'",
        )  # fmt: skip
        form = args.form(g.shape[-2])
    else:
        g = of_p
        if of_y is not None:
            back = rows_of.dispatch_rows(of_y, *way, args.group_name)
            g = back if g is None else g + back
        assert g is not None
        form = args.form(g.shape[-2])
        g, found["operands"] = epilogue_backward(g, operands, args.product, x[0].dtype, ctx.needs.operands)
        if any(ctx.needs.x):
            found["x"] = ex.input_gradients(g, w, form)
    terms = len(x) // form.count if form.listed and form.ranges is None else len(x)
    every = form.split(g) * terms
    if any(ctx.needs.w):
        found["w"] = ex.weight_gradients(x, every, form)
    return found | {"bias": ex.bias_gradients(every, args.bias, form)}


LISTED: Gap[Any] = Gap(
    lambda args: args.experts != 0,
    "GPU kernels take experts that are multiplied together",
    "stack their weights: `bmm`, or `grouped_mm`",
)
NO_ROWS: Gap[Any] = Gap(
    lambda args: args.dim != 1 if not args.input_splits else args.offsets is None,
    "GPU kernels exchange equal parts of rows",
    "give all experts as many rows from every rank, or multiply them with `grouped_mm`",
)

register(
    FusedOp(
        name=OP,
        arguments=ExpertMatmulAllToAll,
        returns="Tensor[]",
        family=Family.PRODUCE,
        replaces="all_to_all",
        fake=_fake,
        reference=reference,
        cpu=_cpu,
        backward=_backward,
        cuda=_cuda,
        exchanged=lambda args: args.x[0].dtype,
        gpu_gaps=(
            LISTED,
            Gap(
                lambda args: args.product != "mm" or args.terms > MOST_TERMS,
                f"GPU kernels send a sum of up to {MOST_TERMS} matmuls as it is, "
                "not {0.product!r} of {0.terms}",
                "move scales and casts behind the collective",
            ),
            Gap(
                lambda args: any(b.numel() for b in args.bias[1:]),
                "GPU kernels add the bias of one matmul, the first",
                "add the others behind the collective",
            ),
            Gap(
                lambda args: args.keep_product,
                "the matmul is read elsewhere, too",
                "read the result of the collective instead, if that will do",
            ),
            NO_ROWS,
        ),
        shapes=lambda args: (*(() if args.input_splits else (args.x[0].shape,)), args.w[0].shape),
    )
)
