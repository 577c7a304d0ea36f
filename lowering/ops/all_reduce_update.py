"""all_reduce_update: gradients are summed over the ranks, and every rank updates its parameters and states.

    sum[t] = sum (avg: mean) over the ranks of grads[t]       in fp32, in rank order
    square[t] = |sum[t]|^2                                    with limits
    c = factor(limits, root of the sum of all squares)        without limits: 1
    params[t], states of t = rule(params[t], c * sum[t], states of t, numbers[rows[t]])

    grads[t]: as many elements as params[t], in any shape   state i of tensor t: states[i * T + t]
    numbers: [rows, 12]   limits: [4]   square: [T], float64

Each rank updates all of its own tensors, by its own `numbers` and `limits` (`lowering.update_rules`).
Nothing but the sums depends on other ranks, so that what a program can see is what it would be without the
op. States are float32, and so is what the rule computes. A sum is rounded to the dtype of its gradient, a new
parameter to that of the parameter. Norms are those of the tensors that a rank has: nothing more is exchanged,
and equal tensors become equal bits on all ranks.

Returns `square`, empty without limits, and in one vector the sums of tensors where `keep_sums`, which have
one dtype. The op has no gradient, and its plan is `direct` or `oblivious`."""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.buckets import Buckets, buckets_of
from autofuse.lowering.cpu.update_executor import piece_shapes
from autofuse.lowering.cpu.whole_update import run_whole_update
from autofuse.lowering.ops.library import FusedOp, Gap, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Family
from autofuse.lowering.reference.layout import all_reduce
from autofuse.lowering.torch_internals import group_size
from autofuse.lowering.update_rules import LR, RULES, SIGN, Row, factor, trust
from autofuse.native_kernels.cpu import DTYPES

OP = "all_reduce_update"

MOST_BUCKETS = 512
"""Of a call on GPUs. Every rank sends all its gradients to every other one, in twice their bytes."""


class AllReduceUpdate(NamedTuple):
    """The arguments of the op."""

    params: Annotated[list[Tensor], "Tensor(a!)[]"]
    states: Annotated[list[Tensor], "Tensor(b!)[]"]
    grads: list[Tensor]
    numbers: Tensor
    rows: Annotated[list[int], "int[]"]
    limits: Tensor | None
    rule: str
    reduce_op: str
    keep_sums: list[bool]
    group_name: str
    order: str
    site: str

    @property
    def buckets(self) -> Buckets:
        return buckets_of(tuple(g.numel() for g in self.grads), group_size(self.group_name))

    def every_row(self) -> Tensor:
        """The row of each tensor."""
        return self.numbers[self.rows]

    def room_for_sums(self) -> Tensor:
        """Memory for the sums that are kept."""
        kept = [g for g, keep in zip(self.grads, self.keep_sums, strict=True) if keep]
        return (kept or self.grads)[0].new_empty(sum(g.numel() for g in kept))


def _fake(args: AllReduceUpdate) -> tuple[Tensor, Tensor]:
    count = 0 if args.limits is None else len(args.grads)
    return args.numbers.new_empty(count, dtype=torch.float64), args.room_for_sums()


def _reference(args: AllReduceUpdate) -> tuple[Tensor, Tensor]:
    world, rule = group_size(args.group_name), RULES[args.rule]
    count = len(args.grads)
    sums = [all_reduce(g, args.reduce_op, world, args.group_name) for g in args.grads]
    squares, scale = args.numbers.new_empty(0, dtype=torch.float64), 1.0
    if args.limits is not None:
        squares = torch.stack([s.double().square().sum() for s in sums]).to(args.numbers.device)
        scale = factor(args.limits.tolist(), float(squares.sum().sqrt()))
    rows = _rows(args)
    for t, number in enumerate(args.rows):
        row = rows[number]
        param, states = args.params[t].detach(), [s.detach() for s in args.states[t::count]]
        new = param.float()
        total = sums[t].float().view(new.shape) * (scale * row[SIGN])
        direction = rule.update(new, total, states, row)
        if direction is not None:
            known = [float(number) for number in row]
            of_p, of_u = (float(x.double().square().sum()) for x in (new, direction))
            new.sub_(direction, alpha=known[LR] * trust(known, of_p, of_u))
        if new is not param:
            param.copy_(new)
    torch.autograd.graph.increment_version([*args.params, *args.states])
    kept = [s.reshape(-1) for s, keep in zip(sums, args.keep_sums, strict=True) if keep]
    return squares, torch.cat(kept) if kept else args.room_for_sums()


def _rows(args: AllReduceUpdate) -> list[Row]:
    """The numbers; those on a GPU stay there, so that nobody waits and a CUDA graph can be captured."""
    if args.numbers.is_cuda:
        return [row.unbind() for row in args.numbers.float().unbind()]
    return list(args.numbers.tolist())


def _plan_shape(args: AllReduceUpdate) -> PlanShape:
    return piece_shapes(OP, args.order, args.buckets)[0]


def _cpu(args: AllReduceUpdate) -> Any:
    known = {t.dtype for t in (*args.params, *args.grads)} <= DTYPES.keys()
    wide = all(state.dtype == torch.float32 for state in args.states)
    return run_whole_update(args) if known and wide else NotImplemented


def _run_on_gpus(args: AllReduceUpdate) -> Any:
    from autofuse.lowering.gpu.optimizer.whole_call import run_whole_update

    return run_whole_update(args)


def _are_mixed(args: AllReduceUpdate) -> bool:
    of_tensors = ({t.dtype for t in tensors} for tensors in (args.params, args.grads))
    return any(len(dtypes) > 1 for dtypes in of_tensors)


register(
    FusedOp(
        name=OP,
        arguments=AllReduceUpdate,
        returns="(Tensor, Tensor)",
        family=Family.REDUCE,
        replaces="all_reduce",
        fake=_fake,
        reference=_reference,
        cpu=_cpu,
        cuda=_run_on_gpus,
        gpu_gaps=(
            Gap(
                lambda args: args.limits is not None,
                "GPU kernels do not clip gradients that are reduced whole",
                "clip by `max_norm` of `autofuse.optim`",
            ),
            Gap(
                lambda args: RULES[args.rule].by_norms,
                "GPU kernels do not update whole tensors by LAMB",
                "use `autofuse.optim.LAMB`",
            ),
            Gap(
                _are_mixed,
                "GPU kernels update by gradients of one dtype parameters of one dtype",
                "give the tensors of a flat buffer one dtype",
            ),
        ),
        plan_shape=_plan_shape,
        shapes=lambda args: tuple(tuple(g.shape) for g in args.grads),
    )
)
