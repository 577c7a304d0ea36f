"""reduce_scatter_update_all_gather: the step of an optimizer on this rank's slice, as ZeRO-1 has it.

    sum = rows of this rank of the sum (avg: mean) over the ranks of grad          in fp32, in rank order
    new, states = rule(param, sum, states, numbers)
    gathered = the rows `new` of all ranks

    grad: [W * n, ...]   param, states, sum, new: [n, ...]   gathered: [W * n, ...] of dtype `gathered`

Each rank updates the slices that it gives, whatever they are slices of, by its own `numbers` (a row of
`lowering.update_rules`). In a state of more elements the slice begins at element `start`. States are float32,
and so is what the rule computes. If `param` is None, the slice of the parameter is the last of `states` and
becomes `new`; a float32 one is then a master weight where `gathered` is narrower. Otherwise the parameter has
the dtype `gathered`. The sum is rounded to the dtype of the gradient, `new` to those of the parameter and of
`gathered`. Rules with norms (LAMB) have no such form: a norm is one of all slices.

Returns what is gathered. The op has no gradient, and its plan is `direct` or `oblivious`."""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.buckets import Buckets, buckets_of
from autofuse.lowering.cpu.sliced_update import run_sliced_update
from autofuse.lowering.cpu.update_executor import piece_shapes
from autofuse.lowering.ops.library import FusedOp, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Family
from autofuse.lowering.reference.layout import all_gather, reduce_scatter
from autofuse.lowering.torch_internals import group_size
from autofuse.lowering.update_rules import RULES, SIGN
from autofuse.native_kernels.cpu import DTYPES

OP = "reduce_scatter_update_all_gather"


class ReduceScatterUpdateAllGather(NamedTuple):
    """The arguments of the op."""

    param: Tensor | None
    states: Annotated[list[Tensor], "Tensor(a!)[]"]
    grad: Tensor
    numbers: Tensor
    rule: str
    reduce_op: str
    gathered: torch.dtype
    start: int
    group_name: str
    order: str
    site: str

    @property
    def slice(self) -> Tensor:
        """Of the parameter."""
        return self.states[-1] if self.param is None else self.param

    def offset(self, state: Tensor) -> int:
        """Where the slice begins in a state."""
        return 0 if state.numel() == self.slice.numel() else self.start

    @property
    def buckets(self) -> Buckets:
        """The elements of the gradient, as many for each owner."""
        return buckets_of((self.grad.numel(),), group_size(self.group_name), 1)


def _fake(args: ReduceScatterUpdateAllGather) -> Tensor:
    return args.grad.new_empty(args.grad.shape, dtype=args.gathered)


def _reference(args: ReduceScatterUpdateAllGather) -> Tensor:
    world, rows = group_size(args.group_name), args.grad.unsqueeze(-1).flatten(1)
    total = reduce_scatter(rows, args.reduce_op, 0, 1, world, args.group_name)
    param, rule = args.slice.detach(), RULES[args.rule]
    new = param.to(torch.float32, copy=True).contiguous()
    states = [s.detach() for s in args.states[: len(rule.states)]]
    flat = [s.contiguous().view(-1) for s in states]
    slices = [s[args.offset(s) :][: new.numel()] for s in flat]
    row = args.numbers.tolist()
    rule.update(new.view(-1), total.view(-1).float() * row[SIGN], slices, row)
    for state, changed in zip(states, flat, strict=True):
        if not state.is_contiguous():
            state.copy_(changed.view(state.shape))
    if args.param is None:
        param.copy_(new)
    torch.autograd.graph.increment_version(args.states)
    every = all_gather(new.to(args.gathered).unsqueeze(-1).flatten(1), 0, 1, world, args.group_name)
    return every.view(args.grad.shape)


def _plan_shape(args: ReduceScatterUpdateAllGather) -> PlanShape:
    return piece_shapes(OP, args.order, args.buckets)[0]


def _cpu(args: ReduceScatterUpdateAllGather) -> Any:
    known = {args.slice.dtype, args.grad.dtype, args.gathered} <= DTYPES.keys()
    wide = all(s.dtype == torch.float32 for s in args.states[: len(RULES[args.rule].states)])
    return run_sliced_update(args) if known and wide else NotImplemented


register(
    FusedOp(
        name=OP,
        arguments=ReduceScatterUpdateAllGather,
        returns="Tensor",
        family=Family.REDUCE,
        replaces="reduce_scatter",
        fake=_fake,
        reference=_reference,
        cpu=_cpu,
        plan_shape=_plan_shape,
        shapes=lambda args: (tuple(args.grad.shape),),
    )
)
