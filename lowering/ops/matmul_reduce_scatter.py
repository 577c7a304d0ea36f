"""matmul_reduce_scatter: this rank's part of the sum (or mean) over the ranks of a product.

    x[i]: [M, K_i]   w[i]: [K_i, N]   P = product(x, w, operands): [M, N]
    part(T) = T.view(outer, W, inner, N)[:, r]    rows (dim 0) of this rank r; alike for columns (dim 1)

    forward   y = part(sum over ranks of P)              y: [M / W, N] or [M, N / W]
    backward  G = all_gather(dy): [M, N]                 of every rank's part
    dgrad     dx[i] = G @ w[i]^T                         one all_gather_matmul with all w[i]^T, which keeps G
    wgrad     dw[i] = x[i]^T @ G

With `avg` G is divided by W. With `keep_product` P is returned too and its own gradient is added to G.
"""

from typing import Any

import torch
from torch import SymInt, Tensor

from autofuse.lowering.cpu.reduce_executor import reduce_plan_shape, run_reduce
from autofuse.lowering.ops.gpu import reduce_on_gpu
from autofuse.lowering.ops.library import FusedOp, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.reference.layout import all_gather, reduce_scatter
from autofuse.lowering.reference.product import parse, product_backward, product_reference
from autofuse.lowering.torch_internals import group_size

_SCHEMA = (
    "matmul_reduce_scatter(Tensor[] x, Tensor[] w, Tensor[] operands, str product, str reduce_op, int dim, "
    "SymInt outer, bool keep_product, Any group_name, str order, str site) -> Tensor[]"
)


def _fake(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    product: str,
    reduce_op: str,
    dim: int,
    outer: int | SymInt,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> list[Tensor]:
    p = product_reference(x, w, operands, product)
    shape = list(p.shape)
    shape[dim] = shape[dim] // group_size(group_name)
    part = p.new_empty(shape)
    return [part, p.new_empty(p.shape)] if keep_product else [part]


def _reference(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    product: str,
    reduce_op: str,
    dim: int,
    outer: int | SymInt,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> list[Tensor]:
    p = product_reference(x, w, operands, product)
    part = reduce_scatter(p, reduce_op, dim, outer, group_size(group_name), group_name)
    return [part, p] if keep_product else [part]


def _cpu(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    product: str,
    reduce_op: str,
    dim: int,
    outer: int,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> Any:
    return run_reduce(
        "matmul_reduce_scatter",
        x, w, operands, product, reduce_op, dim, outer, keep_product, group_name, order, site,
    )  # fmt: skip


def _cuda(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    product: str,
    reduce_op: str,
    dim: int,
    outer: int,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> Any:
    return reduce_on_gpu(
        "matmul_reduce_scatter", x, w, product, reduce_op, dim, outer, keep_product, group_name, order, site
    )


def _plan_shape(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    product: str,
    reduce_op: str,
    dim: int,
    outer: int,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> PlanShape:
    return reduce_plan_shape("matmul_reduce_scatter", x, w, operands, product, dim, outer, group_name, order)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, w, operands, product, reduce_op, dim, outer, _, group_name, order, site = inputs
    ctx.terms = len(x)
    ctx.product, ctx.reduce_op, ctx.dim, ctx.outer = product, reduce_op, dim, outer
    ctx.group_name, ctx.order, ctx.site = group_name, order, site
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*x, *w, *operands)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    terms, saved = ctx.terms, list(ctx.saved_tensors)
    x, w, operands = saved[:terms], saved[terms : 2 * terms], saved[2 * terms :]
    world = group_size(ctx.group_name)
    of_y, of_p = (*grads, None)[:2]
    if of_y is not None and ctx.reduce_op == "avg":
        of_y = of_y / world
    needs = ctx.needs_input_grad[:3]
    plain = not parse(ctx.product).stages
    if of_y is not None and of_p is None and plain and any(needs[0]):
        *dx, g = torch.ops.autofuse.all_gather_matmul(
            of_y,
            [wi.t() for wi in w],
            [],
            ctx.dim,
            ctx.outer,
            True,
            ctx.group_name,
            ctx.order,
            ctx.site + "'",
        )
        _, dw, rest = product_backward(g, x, w, operands, ctx.product, ([False] * terms, *needs[1:]))
        return dx, dw, rest, *[None] * 8
    g = of_p
    if of_y is not None:
        of_y = all_gather(of_y, ctx.dim, ctx.outer, world, ctx.group_name)
        g = of_y if of_p is None else of_y + of_p
    return *product_backward(g, x, w, operands, ctx.product, needs), *[None] * 8


register(FusedOp(_SCHEMA, _fake, _reference, _cpu, _plan_shape, _setup_context, _backward, _cuda))
