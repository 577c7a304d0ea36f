"""matmul_reduce_scatter: this rank's part of the sum (or mean) over the ranks of a product.

    x[i]: [M, K_i]   w[i]: [K_i, N]   P = product(x, w, operands): [M, N]
    part(T) = T.view(outer, W, inner, N)[:, r]    rows (dim 0) of this rank r; alike for columns (dim 1)

    forward   y = part(sum over ranks of P)              y: [M / W, N] or [M, N / W]
    backward  G = all_gather(dy): [M, N]                 of every rank's part
    dgrad     dx[i] = G @ w[i]^T                         one all_gather_matmul with all w[i]^T, which keeps G
    wgrad     dw[i] = x[i]^T @ G

With `avg` G is divided by W. With `keep_product` P is returned too and its own gradient is added to G. If the
product has the stage `keep`, the sum of the matmuls is returned in place of P, and there is no gradient.
A `tail` (`reference/tail.py`) is applied to y; its kept values are returned between y and P. It has no
gradient. Its norms need whole rows (dim 0). `proof` is empty: no rank applies it for another one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.cpu.reduce_executor import reduce_plan_shape, run_reduce
from autofuse.lowering.ops.library import FusedOp, SymInt, register
from autofuse.lowering.ops.matmul_all_reduce import (
    GPU_DTYPES,
    REDUCE_GAPS,
    exchanged,
    refuse_tail,
    sizes_of_call,
)
from autofuse.lowering.plan import Family
from autofuse.lowering.reference.layout import all_gather, reduce_scatter
from autofuse.lowering.reference.product import parse, product_backward, with_kept
from autofuse.lowering.reference.tail import check_tail, tail_reference
from autofuse.lowering.torch_internals import group_size

OP = "matmul_reduce_scatter"


class MatmulReduceScatter(NamedTuple):
    """The arguments of the op."""

    x: list[Tensor]
    w: list[Tensor]
    operands: list[Tensor]
    product: str
    reduce_op: str
    dim: int
    outer: SymInt
    keep_product: bool
    tail_operands: list[Tensor]
    tail: str
    proof: str
    group_name: str
    order: str
    site: str

    @property
    def terms(self) -> int:
        return len(self.x)


def _fake(args: MatmulReduceScatter) -> list[Tensor]:
    p, kept = with_kept(args.x, args.w, args.operands, args.product)
    shape = list(p.shape)
    shape[args.dim] = shape[args.dim] // group_size(args.group_name)
    results = tail_reference(p.new_empty(shape), args.tail_operands, args.tail)
    return [*results, kept.new_empty(kept.shape)] if args.keep_product else results


def _reference(args: MatmulReduceScatter) -> list[Tensor]:
    p, kept = with_kept(args.x, args.w, args.operands, args.product)
    world = group_size(args.group_name)
    part = reduce_scatter(p, args.reduce_op, args.dim, args.outer, world, args.group_name)
    check_tail(part.shape, args.tail_operands, args.tail, OP, args.dim == 0)
    results = tail_reference(part, args.tail_operands, args.tail)
    return [*results, kept] if args.keep_product else results


def _cuda(args: MatmulReduceScatter) -> Any:
    from autofuse.lowering.gpu.dense.call import run_reduce

    return run_reduce(OP, args)


def _backward(ctx: Any, args: MatmulReduceScatter, grads: list[Tensor | None]) -> dict[str, Any]:
    refuse_tail(OP, args.tail)
    x, w, operands, product = args.x, args.w, args.operands, args.product
    world = group_size(args.group_name)
    of_y, of_p = (*grads, None)[:2]
    if of_y is not None and args.reduce_op == "avg":
        of_y = of_y / world
    needs = ctx.needs[:3]
    if of_y is not None and of_p is None and not parse(product).stages and any(needs[0]):
        *dx, g = torch.ops.autofuse.all_gather_matmul(
            of_y, [wi.t() for wi in w], [], args.dim, args.outer, True, args.group_name, args.order,
            args.site + "'",
        )  # fmt: skip
        _, dw, of_operands = product_backward(g, x, w, operands, product, ([False] * len(x), *needs[1:]))
        return {"x": dx, "w": dw, "operands": of_operands}
    g = of_p
    if of_y is not None:
        of_y = all_gather(of_y, args.dim, args.outer, world, args.group_name)
        g = of_y if of_p is None else of_y + of_p
    dx, dw, of_operands = product_backward(g, x, w, operands, product, needs)
    return {"x": dx, "w": dw, "operands": of_operands}


register(
    FusedOp(
        name=OP,
        arguments=MatmulReduceScatter,
        returns="Tensor[]",
        family=Family.REDUCE,
        replaces="reduce_scatter",
        fake=_fake,
        reference=_reference,
        cpu=lambda args: run_reduce(OP, args),
        plan_shape=lambda args: reduce_plan_shape(OP, args),
        backward=_backward,
        cuda=_cuda,
        exchanged=exchanged,
        gpu_dtypes=GPU_DTYPES,
        gpu_gaps=REDUCE_GAPS,
        shapes=sizes_of_call,
    )
)
