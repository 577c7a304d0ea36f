"""matmul_all_reduce: the sum (or mean) over the ranks of a product.

    x[i]: [M, K_i]   w[i]: [K_i, N]   P = product(x, w, operands): [M, N]

    forward   Y = sum over ranks of P                    Y: [M, N], the same on every rank
    backward  G = sum over ranks of dY                   as the functional collective has it
    dgrad     dx[i] = G @ w[i]^T
    wgrad     dw[i] = x[i]^T @ G

With `avg` both sums are means. With `keep_product` P is returned too and its own gradient is added to G.
"""

from typing import Any, NamedTuple

from torch import Tensor

from autofuse.lowering.cpu.reduce_executor import reduce_plan_shape, run_reduce
from autofuse.lowering.gpu.support import MOST_TERMS
from autofuse.lowering.ops.library import FusedOp, Gap, register
from autofuse.lowering.plan import Family
from autofuse.lowering.reference.layout import all_reduce
from autofuse.lowering.reference.product import product_backward, product_reference
from autofuse.lowering.torch_internals import group_size

OP = "matmul_all_reduce"


class MatmulAllReduce(NamedTuple):
    """The arguments of the op."""

    x: list[Tensor]
    w: list[Tensor]
    operands: list[Tensor]
    product: str
    reduce_op: str
    keep_product: bool
    group_name: str
    order: str
    site: str

    @property
    def terms(self) -> int:
        return len(self.x)

    @property
    def dim(self) -> int:
        """The dim along which a reduce_scatter cuts; nothing is cut here."""
        return 0

    @property
    def outer(self) -> int:
        return 1


def _fake(args: MatmulAllReduce) -> list[Tensor]:
    p = product_reference(args.x, args.w, args.operands, args.product)
    return [p.new_empty(p.shape) for _ in range(1 + args.keep_product)]


def _reference(args: MatmulAllReduce) -> list[Tensor]:
    p = product_reference(args.x, args.w, args.operands, args.product)
    reduced = all_reduce(p, args.reduce_op, group_size(args.group_name), args.group_name)
    return [reduced, p] if args.keep_product else [reduced]


def _cuda(args: MatmulAllReduce) -> Any:
    from autofuse.lowering.gpu.dense.call import run_reduce

    return run_reduce(OP, args)


def _backward(ctx: Any, args: MatmulAllReduce, grads: list[Tensor | None]) -> dict[str, Any]:
    of_y, of_p = (*grads, None)[:2]
    if of_y is not None:
        of_y = all_reduce(of_y, args.reduce_op, group_size(args.group_name), args.group_name)
    g = of_p if of_y is None else of_y if of_p is None else of_y + of_p
    assert g is not None  # autograd runs a backward only if an output has a gradient
    dx, dw, of_operands = product_backward(g, args.x, args.w, args.operands, args.product, ctx.needs[:3])
    return {"x": dx, "w": dw, "operands": of_operands}


REDUCE_GAPS: tuple[Gap[Any], ...] = (
    Gap(
        lambda args: args.product != "mm" or args.terms > MOST_TERMS,
        f"GPU kernels reduce sums of up to {MOST_TERMS} matmuls as they are, "
        "not {0.product!r} of {0.terms}",
        "move scales, biases and casts behind the collective",
    ),
    Gap(
        lambda args: args.keep_product,
        "the matmul is read elsewhere, too",
        "read the result of the collective instead, if that will do",
    ),
)

register(
    FusedOp(
        name=OP,
        arguments=MatmulAllReduce,
        returns="Tensor[]",
        family=Family.REDUCE,
        replaces="all_reduce",
        fake=_fake,
        reference=_reference,
        cpu=lambda args: run_reduce(OP, args),
        plan_shape=lambda args: reduce_plan_shape(OP, args),
        backward=_backward,
        cuda=_cuda,
        exchanged=lambda args: args.x[0].dtype,
        gpu_gaps=REDUCE_GAPS,
        shapes=lambda args: (args.x[0].shape, args.w[0].shape),
    )
)
