"""all_reduce_update: a gradient is summed over the ranks, and every rank updates its parameter and states.

    sum = sum (avg: mean) over the ranks of grad          in fp32, in rank order
    params[0], states = rule(params[0], sum, states, numbers)

Each rank updates all elements of its own tensors, by its own `numbers` (a row of `lowering.update_rules`):
nothing but the sum depends on other ranks, so that what a program can see is what it would be without the op.
States are float32, and so is what the rule computes. The sum is rounded to the dtype of the gradient, the new
parameter to that of the parameter. Norms (LAMB) are those of the tensors that a rank has: nothing more is
exchanged, and equal tensors become equal bits on all ranks.

Returns the sum if `keep_sum`, else an empty tensor. The op has no gradient, and its plan is `direct` or
`oblivious`."""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.buckets import buckets_of
from autofuse.lowering.cpu.update_executor import piece_shapes
from autofuse.lowering.cpu.whole_update import run_whole_update
from autofuse.lowering.ops.library import FusedOp, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Family
from autofuse.lowering.reference.layout import all_reduce
from autofuse.lowering.torch_internals import group_size
from autofuse.lowering.update_rules import LR, RULES, SIGN, trust
from autofuse.native_kernels.cpu import DTYPES

OP = "all_reduce_update"


class AllReduceUpdate(NamedTuple):
    """The arguments of the op. `params` has one tensor."""

    params: Annotated[list[Tensor], "Tensor(a!)[]"]
    states: Annotated[list[Tensor], "Tensor(b!)[]"]
    grad: Tensor
    numbers: Tensor
    rule: str
    reduce_op: str
    keep_sum: bool
    group_name: str
    order: str
    site: str


def _fake(args: AllReduceUpdate) -> Tensor:
    return args.grad.new_empty(args.grad.shape if args.keep_sum else (0,))


def _reference(args: AllReduceUpdate) -> Tensor:
    world = group_size(args.group_name)
    reduced = all_reduce(args.grad, args.reduce_op, world, args.group_name)
    states, param = [s.detach() for s in args.states], args.params[0].detach()
    new, row = param.float(), args.numbers.tolist()
    direction = RULES[args.rule].update(new, reduced.float() * row[SIGN], states, row)
    if direction is not None:
        of_p, of_u = (float(x.double().square().sum()) for x in (new, direction))
        new.sub_(direction, alpha=row[LR] * trust(row, of_p, of_u))
    if new is not param:
        param.copy_(new)
    torch.autograd.graph.increment_version([*args.params, *args.states])
    return reduced if args.keep_sum else args.grad.new_empty(0)


def _plan_shape(args: AllReduceUpdate) -> PlanShape:
    buckets = buckets_of((args.grad.numel(),), group_size(args.group_name))
    return piece_shapes(OP, args.order, buckets)[0]


def _cpu(args: AllReduceUpdate) -> Any:
    known = {args.params[0].dtype, args.grad.dtype} <= DTYPES.keys()
    wide = all(state.dtype == torch.float32 for state in args.states)
    return run_whole_update(args) if known and wide else NotImplemented


register(
    FusedOp(
        name=OP,
        arguments=AllReduceUpdate,
        returns="Tensor",
        family=Family.REDUCE,
        replaces="all_reduce",
        fake=_fake,
        reference=_reference,
        cpu=_cpu,
        plan_shape=_plan_shape,
        shapes=lambda args: (tuple(args.grad.shape),),
    )
)
