"""matmul_all_gather: the products of all ranks, side by side on every rank.

    x[i]: [M, K_i]   w[i]: [K_i, N]   P = product(x, w, operands): [M, N]
    part(Y) = Y.view(outer, W, inner, N)[:, r]      rows (dim 0) of this rank r; alike for columns (dim 1)

    forward   Y = all_gather(P): part(Y) = P         Y: [W * M, N] or [M, W * N], the same on every rank
    backward  G = part(sum over ranks of dY)         as the functional collective has it
              G = part(dY)                           `replicated`: all ranks hold one dY, as with DTensor
    dgrad     dx[i] = G @ w[i]^T
    wgrad     dw[i] = x[i]^T @ G

`outer` divides M (dim 0) or N (dim 1). With `keep_product` P is returned too and its own gradient is added
to G.
"""

from typing import Any, NamedTuple

from torch import Tensor

from autofuse.lowering.cpu.publish_executor import OP, publish_plan_shape, run_publish
from autofuse.lowering.ops.library import FusedOp, Gap, SymInt, register
from autofuse.lowering.plan import Family
from autofuse.lowering.reference.layout import all_gather, parts, reduce_scatter
from autofuse.lowering.reference.product import product_backward, product_reference
from autofuse.lowering.torch_internals import group_size, resolve_group


class MatmulAllGather(NamedTuple):
    """The arguments of the op."""

    x: list[Tensor]
    w: list[Tensor]
    operands: list[Tensor]
    product: str
    dim: int
    outer: SymInt
    keep_product: bool
    replicated: bool
    group_name: str
    order: str
    site: str

    @property
    def terms(self) -> int:
        return len(self.x)

    @property
    def bias(self) -> Tensor | None:
        """Of an `addmm %0`: [N]."""
        return self.operands[0].contiguous() if self.operands else None


def _fake(args: MatmulAllGather) -> list[Tensor]:
    p = product_reference(args.x, args.w, args.operands, args.product)
    shape = list(p.shape)
    shape[args.dim] = shape[args.dim] * group_size(args.group_name)
    whole = p.new_empty(shape)
    return [whole, p.new_empty(p.shape)] if args.keep_product else [whole]


def _reference(args: MatmulAllGather) -> list[Tensor]:
    p = product_reference(args.x, args.w, args.operands, args.product)
    whole = all_gather(p, args.dim, args.outer, group_size(args.group_name), args.group_name)
    return [whole, p] if args.keep_product else [whole]


def _cuda(args: MatmulAllGather) -> Any:
    from autofuse.lowering.gpu.dense.call import run_publish

    return run_publish(args)


def _backward(ctx: Any, args: MatmulAllGather, grads: list[Tensor | None]) -> dict[str, Any]:
    g, of_p = (*grads, None)[:2]
    if g is not None:
        world = group_size(args.group_name)
        if args.replicated:
            g = parts(g, args.dim, args.outer, world)[resolve_group(args.group_name).rank()]
        else:
            g = reduce_scatter(g, "sum", args.dim, args.outer, world, args.group_name)
    if of_p is not None:
        g = of_p if g is None else g + of_p
    assert g is not None  # autograd runs a backward only if an output has a gradient
    dx, dw, of_operands = product_backward(g, args.x, args.w, args.operands, args.product, ctx.needs[:3])
    return {"x": dx, "w": dw, "operands": of_operands}


register(
    FusedOp(
        name=OP,
        arguments=MatmulAllGather,
        returns="Tensor[]",
        family=Family.PUBLISH,
        replaces="all_gather",
        fake=_fake,
        reference=_reference,
        cpu=run_publish,
        plan_shape=publish_plan_shape,
        backward=_backward,
        cuda=_cuda,
        exchanged=lambda args: args.x[0].dtype,
        gpu_gaps=(
            Gap(
                lambda args: args.product not in ("mm", "addmm %0") or args.terms != 1,
                "GPU kernels gather one matmul with or without a bias, not {0.product!r} of {0.terms}",
                "move scales and casts behind the collective",
            ),
            Gap(
                lambda args: any(
                    b.dim() != 1 or b.shape[0] == 1 != args.w[0].shape[-1] for b in args.operands
                ),
                "GPU kernels add a bias with an entry a column",
                "give it the shape `[N]`, or add it behind the matmul",
            ),
            Gap(
                lambda args: args.dim == 1 and not (isinstance(args.outer, int) and args.outer == 1),
                "GPU kernels gather rows or whole columns, not stretches of columns",
                "gather along another dim",
            ),
            Gap(
                lambda args: args.keep_product,
                "the matmul is read elsewhere, too",
                "read the result of the collective instead, if that will do",
            ),
        ),
        shapes=lambda args: (args.x[0].shape, args.w[0].shape),
    )
)
