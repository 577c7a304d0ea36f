"""reduce_update_gather: gradients are summed over the ranks, and parameters updated by an optimizer's rule.

    params[t]: any shape   grads[t]: as params[t], or None on all ranks: then params[t] stays as it is
    numbers: [T, 12], the row of each tensor (`lowering.update_rules`)

    g[t] = sum (avg: mean) over the ranks of grads[t]       in fp32, in rank order
    norm = |g|, over all tensors;   g *= clip(norm, max_norm)
    params[t], states = rule(params[t], g[t], states, numbers[t])

Every rank updates the elements that it owns (`lowering.buckets`), in fp32, and all ranks get the new
parameters, rounded once. `states` are fp32, flat, and have an entry for each element that this rank owns:
those of the rule, then, if there is one more, the parameters themselves before rounding (master weights).
Parameters of float64 have states of float64.

Nothing is written on any rank unless all ranks have agreed on which tensors have gradients, and on `numbers`;
with `error_if_nonfinite` also only if the norm is finite.

Returns the norm of all gradients, before they are clipped, if `max_norm` or `error_if_nonfinite` ask for
it, on the device of the parameters, else an empty tensor. The op has no gradient. Sums are in rank order, so
a plan is `direct` or `oblivious`."""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.buckets import Buckets, buckets_of
from autofuse.lowering.cpu.update_executor import piece_shapes, run_update
from autofuse.lowering.ops.library import FusedOp, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Family
from autofuse.lowering.reference.update import update_by_reference
from autofuse.lowering.torch_internals import group_size, resolve_group

OP = "reduce_update_gather"


class ReduceUpdateGather(NamedTuple):
    """The arguments of the op. `names` has a name for each tensor, for errors."""

    params: Annotated[list[Tensor], "Tensor(a!)[]"]
    grads: Annotated[list[Tensor | None], "Tensor?[]"]
    states: Annotated[list[Tensor], "Tensor(b!)[]"]
    numbers: Tensor
    rule: str
    reduce_op: str
    max_norm: Annotated[float, "float"]
    error_if_nonfinite: bool
    names: Annotated[list[str], "str[]"]
    group_name: str
    order: str
    site: str

    @property
    def world(self) -> int:
        return group_size(self.group_name)

    @property
    def rank(self) -> int:
        return resolve_group(self.group_name).rank()

    @property
    def buckets(self) -> Buckets:
        return buckets_of(tuple(p.numel() for p in self.params), self.world)

    @property
    def device(self) -> torch.device:
        """Of the parameters, and of the norm."""
        return self.params[0].device if self.params else self.numbers.device

    @property
    def wants_norm(self) -> bool:
        return self.max_norm > 0 or self.error_if_nonfinite


def _run_on_gpus(args: ReduceUpdateGather) -> Any:
    from autofuse.lowering.gpu.optimizer.call import run_update

    return run_update(args)


def _fake(args: ReduceUpdateGather) -> Tensor:
    return torch.empty(() if args.wants_norm else (0,), device=args.device)


def _plan_shape(args: ReduceUpdateGather) -> PlanShape:
    return piece_shapes(OP, args.order, args.buckets)[0]


register(
    FusedOp(
        name=OP,
        arguments=ReduceUpdateGather,
        returns="Tensor",
        family=Family.REDUCE,
        replaces="all_reduce",
        fake=_fake,
        reference=update_by_reference,
        cpu=run_update,
        cuda=_run_on_gpus,
        plan_shape=_plan_shape,
        shapes=lambda args: ((sum(p.numel() for p in args.params),),),
    )
)
