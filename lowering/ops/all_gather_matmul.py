"""all_gather_matmul: one gathered matrix times several weights.

    x: this rank's part of X: [M, K]     part(X) = X.view(outer, W, inner, K)[:, r] (dim 0; dim 1 alike)
    w[i]: [K, N_i]     bias: none, or one b[i] per weight (an empty tensor for none)
    b[i] broadcasts against [M, N_i]: [N_i] as a rule

    forward   X = all_gather(x)                          Y[i] = X @ w[i] + b[i]: [M, N_i]
    dgrad     dx = part(sum over ranks of sum_i dY[i] @ w[i]^T + dX)      one matmul_reduce_scatter
    wgrad     dw[i] = X^T @ dY[i]                        X is gathered again unless it was kept
              db[i] = sum of dY[i]

With `keep_gathered` X is the last output, and dX its gradient.
"""

from typing import Any

import torch
from torch import SymInt, Tensor

from autofuse.lowering.cpu.gather_executor import partition, run_gather
from autofuse.lowering.ops.gpu import gather_on_gpu
from autofuse.lowering.ops.library import FusedOp, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.reference.layout import all_gather, reduce_scatter
from autofuse.lowering.torch_internals import group_size

_SCHEMA = (
    "all_gather_matmul(Tensor x, Tensor[] w, Tensor[] bias, int dim, SymInt outer, bool keep_gathered, "
    "Any group_name, str order, str site) -> Tensor[]"
)


def bias_of(bias: list[Tensor], i: int) -> Tensor | None:
    """The bias of weight `i`, None where there is none."""
    return bias[i] if bias and bias[i].numel() else None


def _multiply(gathered: Tensor, w: list[Tensor], bias: list[Tensor]) -> list[Tensor]:
    outputs = []
    for i, wi in enumerate(w):
        b = bias_of(bias, i)
        outputs.append(torch.mm(gathered, wi) if b is None else torch.addmm(b, gathered, wi))
    return outputs


def _fake(
    x: Tensor,
    w: list[Tensor],
    bias: list[Tensor],
    dim: int,
    outer: int | SymInt,
    keep_gathered: bool,
    group_name: str,
    order: str,
    site: str,
) -> list[Tensor]:
    shape = list(x.shape)
    shape[dim] = shape[dim] * group_size(group_name)
    gathered = x.new_empty(shape)
    outputs = [torch.mm(gathered, wi) for wi in w]
    return [*outputs, gathered] if keep_gathered else outputs


def _reference(
    x: Tensor,
    w: list[Tensor],
    bias: list[Tensor],
    dim: int,
    outer: int | SymInt,
    keep_gathered: bool,
    group_name: str,
    order: str,
    site: str,
) -> list[Tensor]:
    gathered = all_gather(x, dim, outer, group_size(group_name), group_name)
    outputs = _multiply(gathered, w, bias)
    return [*outputs, gathered] if keep_gathered else outputs


def _plan_shape(
    x: Tensor,
    w: list[Tensor],
    bias: list[Tensor],
    dim: int,
    outer: int,
    keep_gathered: bool,
    group_name: str,
    order: str,
    site: str,
) -> PlanShape:
    return partition(x.shape, x.dtype.itemsize, dim, outer, group_size(group_name), order).shape


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, w, bias, dim, outer, keep_gathered, group_name, order, site = inputs
    ctx.kept, ctx.dim, ctx.outer = keep_gathered, dim, outer
    ctx.group_name, ctx.order, ctx.site = group_name, order, site
    ctx.consumers = len(w)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1] if keep_gathered else x, *w, *bias)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    gathered, *rest = ctx.saved_tensors
    w, bias = rest[: ctx.consumers], rest[ctx.consumers :]
    of_x = grads[-1] if ctx.kept else None
    used = {i: g for i, g in enumerate(grads[: ctx.consumers]) if g is not None}
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]

    dx = None
    if need_x and used:
        dx = torch.ops.autofuse.matmul_reduce_scatter(
            [g.contiguous() for g in used.values()], [w[i].t() for i in used], [] if of_x is None else [of_x],
            "mm" if of_x is None else "mm; add %0", "sum", ctx.dim, ctx.outer, False,
            ctx.group_name, ctx.order, ctx.site + "'",
        )[0]  # fmt: skip
    elif need_x:
        dx = _scatter_of(ctx, of_x)

    dw: list[Tensor | None] = [None] * len(w)
    db: list[Tensor | None] = [None] * len(bias)
    if any(need_w[i] for i in used) and not ctx.kept:
        gathered = all_gather(gathered, ctx.dim, ctx.outer, group_size(ctx.group_name), ctx.group_name)
    for i, g in used.items():
        if need_w[i]:
            dw[i] = gathered.t() @ g
        if bias and need_bias[i] and bias_of(bias, i) is not None:
            db[i] = g.sum_to_size(bias[i].shape)
    return dx, dw, db, *[None] * 6


def _scatter_of(ctx: Any, grad: Tensor | None) -> Tensor | None:
    """The gradient of x when only the gathered matrix was used."""
    if grad is None:
        return None
    return reduce_scatter(grad, "sum", ctx.dim, ctx.outer, group_size(ctx.group_name), ctx.group_name)


register(
    FusedOp(_SCHEMA, _fake, _reference, run_gather, _plan_shape, _setup_context, _backward, gather_on_gpu)
)
