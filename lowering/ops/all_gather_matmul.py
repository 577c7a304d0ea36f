"""all_gather_matmul: one gathered matrix times several weights.

    x: this rank's part of X: [M, K]     part(X) = X.view(outer, W, inner, K)[:, r] (dim 0; dim 1 alike)
    w[i]: [K, N_i]     bias: none, or one b[i] per weight (an empty tensor for none)
    b[i] broadcasts against [M, N_i]: [N_i] as a rule

    forward   X = all_gather(x)                          Y[i] = X @ w[i] + b[i]: [M, N_i]
    dgrad     dx = part(sum over ranks of sum_i dY[i] @ w[i]^T + dX)      one matmul_reduce_scatter
    wgrad     dw[i] = X^T @ dY[i]                        X is gathered again unless it was kept
              db[i] = sum of dY[i]

With `keep_gathered` X is the last output, and dX its gradient; there may then be no weight at all.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.cpu.gather_executor import partition, run_gather
from autofuse.lowering.ops.library import FusedOp, Gap, SymInt, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Family
from autofuse.lowering.reference.layout import all_gather, reduce_scatter
from autofuse.lowering.torch_internals import group_size


class AllGatherMatmul(NamedTuple):
    """The arguments of the op."""

    x: Tensor
    w: list[Tensor]
    bias: list[Tensor]
    dim: int
    outer: SymInt
    keep_gathered: bool
    group_name: str
    order: str
    site: str

    def bias_of(self, i: int) -> Tensor | None:
        """The bias of weight `i`, None where there is none."""
        return self.bias[i] if self.bias and self.bias[i].numel() else None


def _fake(args: AllGatherMatmul) -> list[Tensor]:
    shape = list(args.x.shape)
    shape[args.dim] = shape[args.dim] * group_size(args.group_name)
    gathered = args.x.new_empty(shape)
    outputs = [torch.mm(gathered, wi) for wi in args.w]
    return [*outputs, gathered] if args.keep_gathered else outputs


def _reference(args: AllGatherMatmul) -> list[Tensor]:
    gathered = all_gather(args.x, args.dim, args.outer, group_size(args.group_name), args.group_name)
    outputs = []
    for i, wi in enumerate(args.w):
        b = args.bias_of(i)
        outputs.append(torch.mm(gathered, wi) if b is None else torch.addmm(b, gathered, wi))
    return [*outputs, gathered] if args.keep_gathered else outputs


def _plan_shape(args: AllGatherMatmul) -> PlanShape:
    x, world = args.x, group_size(args.group_name)
    return partition(x.shape, x.dtype.itemsize, args.dim, args.outer, world, args.order).shape


def _cuda(args: AllGatherMatmul) -> Any:
    from autofuse.lowering.gpu.dense.call import run_gather

    return run_gather(args)


def _save(ctx: Any, args: AllGatherMatmul, output: list[Tensor]) -> dict[str, Any]:
    """X in place of x where the op returns it."""
    return {"x": output[-1]} if args.keep_gathered else {}


def _backward(ctx: Any, args: AllGatherMatmul, grads: list[Tensor | None]) -> dict[str, Any]:
    w, bias, place = args.w, args.bias, (args.dim, args.outer)
    group_name, world = args.group_name, group_size(args.group_name)
    of_x = grads[-1] if args.keep_gathered else None
    used = {i: g for i, g in enumerate(grads[: len(w)]) if g is not None}

    dx = None
    if ctx.needs.x and used:
        dx = torch.ops.autofuse.matmul_reduce_scatter(
            [g.contiguous() for g in used.values()], [w[i].t() for i in used], [] if of_x is None else [of_x],
            "mm" if of_x is None else "mm; add %0", "sum", *place, False, [], "", "", group_name, args.order,
            args.site + "'",
        )[0]  # fmt: skip
    elif ctx.needs.x and of_x is not None:
        dx = reduce_scatter(of_x, "sum", *place, world, group_name)

    dw: list[Tensor | None] = [None] * len(w)
    db: list[Tensor | None] = [None] * len(bias)
    gathered = args.x
    if any(ctx.needs.w[i] for i in used) and not args.keep_gathered:
        gathered = all_gather(gathered, *place, world, group_name)
    for i, g in used.items():
        if ctx.needs.w[i]:
            dw[i] = gathered.t() @ g
        if bias and ctx.needs.bias[i] and args.bias_of(i) is not None:
            db[i] = g.sum_to_size(bias[i].shape)
    return {"x": dx, "w": dw, "bias": db}


def _has_other_bias(args: AllGatherMatmul) -> bool:
    """Whether some bias is no vector of the columns."""
    biases = ((args.bias_of(i), wi) for i, wi in enumerate(args.w))
    return any(b is not None and (b.dim() != 1 or b.shape[0] == 1 != wi.shape[-1]) for b, wi in biases)


register(
    FusedOp(
        name="all_gather_matmul",
        arguments=AllGatherMatmul,
        returns="Tensor[]",
        family=Family.GATHER,
        replaces="all_gather",
        fake=_fake,
        reference=_reference,
        cpu=run_gather,
        plan_shape=_plan_shape,
        backward=_backward,
        save=_save,
        cuda=_cuda,
        exchanged=lambda args: args.x.dtype,
        gpu_gaps=(
            Gap(
                lambda args: not args.w,
                "GPU kernels gather for a matmul, and the reduction behind it has taken the only one",
                "nothing: of two collectives round one matmul, the one that gains more gets it",
            ),
            Gap(
                lambda args: args.dim != 0,
                "GPU kernels gather the rows of a matmul, not what it contracts",
                "gather along another dim",
            ),
            Gap(
                _has_other_bias,
                "GPU kernels add a bias with an entry a column",
                "give it the shape `[N]`, or add it behind the matmul",
            ),
        ),
        shapes=lambda args: (args.x.shape, *(wi.shape for wi in args.w[:1])),
    )
)
