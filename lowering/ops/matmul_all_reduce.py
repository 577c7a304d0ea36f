"""matmul_all_reduce: the sum (or mean) over the ranks of a product.

    x[i]: [M, K_i]   w[i]: [K_i, N]   P = product(x, w, operands): [M, N]

    forward   Y = sum over ranks of P                    Y: [M, N], the same on every rank
    backward  G = sum over ranks of dY                   as the functional collective has it
    dgrad     dx[i] = G @ w[i]^T
    wgrad     dw[i] = x[i]^T @ G

With `avg` both sums are means. With `keep_product` P is returned too and its own gradient is added to G.
"""

from typing import Any

from torch import Tensor

from autofuse.lowering.cpu.reduce_executor import reduce_plan_shape, run_reduce
from autofuse.lowering.ops.gpu import reduce_on_gpu
from autofuse.lowering.ops.library import FusedOp, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.reference.layout import all_reduce
from autofuse.lowering.reference.product import product_backward, product_reference
from autofuse.lowering.torch_internals import group_size

_SCHEMA = (
    "matmul_all_reduce(Tensor[] x, Tensor[] w, Tensor[] operands, str product, str reduce_op, "
    "bool keep_product, Any group_name, str order, str site) -> Tensor[]"
)


def _fake(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    product: str,
    reduce_op: str,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> list[Tensor]:
    p = product_reference(x, w, operands, product)
    return [p.new_empty(p.shape) for _ in range(1 + keep_product)]


def _reference(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    product: str,
    reduce_op: str,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> list[Tensor]:
    p = product_reference(x, w, operands, product)
    reduced = all_reduce(p, reduce_op, group_size(group_name), group_name)
    return [reduced, p] if keep_product else [reduced]


def _cpu(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    product: str,
    reduce_op: str,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> Any:
    return run_reduce(
        "matmul_all_reduce", x, w, operands, product, reduce_op, 0, 1, keep_product, group_name, order, site
    )


def _cuda(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    product: str,
    reduce_op: str,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> Any:
    return reduce_on_gpu(
        "matmul_all_reduce", x, w, product, reduce_op, 0, 1, keep_product, group_name, order, site
    )


def _plan_shape(
    x: list[Tensor],
    w: list[Tensor],
    operands: list[Tensor],
    product: str,
    reduce_op: str,
    keep_product: bool,
    group_name: str,
    order: str,
    site: str,
) -> PlanShape:
    return reduce_plan_shape("matmul_all_reduce", x, w, operands, product, 0, 1, group_name, order)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, w, operands, product, reduce_op, _, group_name, _, _ = inputs
    ctx.counts = len(x), len(operands)
    ctx.product, ctx.reduce_op, ctx.group_name = product, reduce_op, group_name
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*x, *w, *operands)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    terms, _ = ctx.counts
    saved = list(ctx.saved_tensors)
    x, w, operands = saved[:terms], saved[terms : 2 * terms], saved[2 * terms :]
    of_y, of_p = (*grads, None)[:2]
    if of_y is not None:
        of_y = all_reduce(of_y, ctx.reduce_op, group_size(ctx.group_name), ctx.group_name)
    g = of_p if of_y is None else of_y if of_p is None else of_y + of_p
    assert g is not None  # autograd runs a backward only if an output has a gradient
    return *product_backward(g, x, w, operands, ctx.product, ctx.needs_input_grad[:3]), *[None] * 6


register(FusedOp(_SCHEMA, _fake, _reference, _cpu, _plan_shape, _setup_context, _backward, _cuda))
