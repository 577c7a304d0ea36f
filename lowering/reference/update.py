"""reduce_update_gather with plain collectives: for devices, dtypes and groups that no executor serves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autofuse.lowering import agreement
from autofuse.lowering.buckets import Buckets, Segment
from autofuse.lowering.reference.layout import all_to_all
from autofuse.lowering.update_rules import RULES, clip, trust

if TYPE_CHECKING:
    from autofuse.lowering.ops.reduce_update_gather import ReduceUpdateGather


def update_by_reference(args: ReduceUpdateGather) -> Tensor:
    """The op. RuntimeError or ValueError on all ranks, before anything is written, if the ranks disagree."""
    from autofuse.lowering.ops.reduce_update_gather import OP

    buckets, dtype = args.buckets, math_dtype(args.params)
    check(args, buckets, dtype)
    codes = [agreement.code(p, g) for p, g in zip(args.params, args.grads, strict=True)]
    problem = agreement.problem(OP, _all_gather_numbers(args, tell(args, buckets, codes)), args.names)
    if problem:
        raise ValueError(problem)
    sums = _reduce(args, buckets, dtype) if buckets.offsets[-1] else args.numbers.new_empty(0, dtype=dtype)
    norm = args.numbers.new_empty(0, dtype=torch.float32)
    factor = 1.0
    if args.wants_norm:
        squares = _over_ranks(args, sums.double().square().sum().reshape(1))
        norm = squares[0].sqrt().float()
        if args.error_if_nonfinite and not math.isfinite(float(norm)):
            raise agreement.not_finite(OP, float(norm))
        factor = clip(float(norm), args.max_norm)
    _update(args, buckets, sums, factor)
    return norm.to(args.numbers.device)


def check(args: ReduceUpdateGather, buckets: Buckets, dtype: torch.dtype) -> None:
    """Raises ValueError for arguments that are wrong on this rank, whatever others have. dtype: of states."""
    rule = RULES[args.rule]
    extra = len(args.states) - len(rule.states)
    if extra not in (0, 1) or len(args.params) != len(args.grads) or len(args.numbers) != len(args.params):
        raise ValueError(
            f"reduce_update_gather: {len(args.params)} tensors with {len(args.grads)} gradients, "
            f"{len(args.numbers)} rows and {len(args.states)} states; {args.rule} has {len(rule.states)}"
        )
    if args.order == "ring":
        raise ValueError("reduce_update_gather: sums are in rank order; use order='direct'")
    owned = buckets.owned(args.rank)
    for state in args.states:
        if state.shape != (owned,) or state.dtype != dtype or not state.is_contiguous():
            raise ValueError(
                f"reduce_update_gather: a state is {state.dtype} {list(state.shape)}; "
                f"expected contiguous {dtype} [{owned}]"
            )


def tell(args: ReduceUpdateGather, buckets: Buckets, codes: Sequence[int]) -> list[int]:
    """What this rank tells the others. codes: those of the gradients."""
    dtypes = *(p.dtype for p in args.params), *(None if g is None else g.dtype for g in args.grads)
    options = (args.rule, args.reduce_op, len(args.states), args.max_norm, args.error_if_nonfinite)
    kind = _kind(buckets, dtypes, options)
    return agreement.told(kind, agreement.digest(args.numbers.cpu()), codes)


@lru_cache(maxsize=256)
def _kind(buckets: Buckets, *values: Any) -> int:
    return agreement.digest(buckets.numels, *values)


def math_dtype(params: list[Tensor]) -> torch.dtype:
    """In what a rule is computed."""
    return torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32


def _all_gather_numbers(args: ReduceUpdateGather, values: list[int]) -> list[list[int]]:
    device, world = args.numbers.device if not args.params else args.params[0].device, args.world
    told = torch.tensor(values, dtype=torch.int64, device=device)
    return (
        all_to_all(told.repeat(world), [len(values)] * world, [len(values)] * world, args.group_name)
        .view(world, len(values))
        .tolist()
    )


def _over_ranks(args: ReduceUpdateGather, values: Tensor) -> Tensor:
    """Sums of float64 values over the ranks, in rank order."""
    world, n = args.world, len(values)
    every = all_to_all(values.repeat(world), [n] * world, [n] * world, args.group_name).view(world, n)
    return _in_rank_order(every)


def _in_rank_order(parts: Tensor) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _reduce(args: ReduceUpdateGather, buckets: Buckets, dtype: torch.dtype) -> Tensor:
    """The sums or means of the elements that this rank owns; 0 where a tensor has no gradient."""
    whole = torch.cat(
        [
            torch.zeros_like(p, dtype=dtype).reshape(-1) if g is None else g.reshape(-1).to(dtype)
            for p, g in zip(args.params, args.grads, strict=True)
        ]
    )
    sent = [buckets.owned(r) for r in range(args.world)]
    owned = sent[args.rank]
    received = all_to_all(whole, [owned] * args.world, sent, args.group_name)
    total = _in_rank_order(received.view(args.world, owned))
    return total.mul_(1 / args.world) if args.reduce_op == "avg" else total


def _update(args: ReduceUpdateGather, buckets: Buckets, sums: Tensor, factor: float) -> None:
    rule, rows = RULES[args.rule], args.numbers.tolist()
    states, master = args.states[: len(rule.states)], args.states[len(rule.states) :]
    start, stop = buckets.starts[args.rank : args.rank + 2]
    flat = [p.detach().reshape(-1) for p in args.params]
    new = torch.empty_like(sums)
    norms = torch.zeros(len(rows), 2, dtype=torch.float64, device=sums.device)
    directions: list[Tensor] = []

    def parts() -> Iterator[tuple[Segment, slice]]:
        for each in buckets.segments(start, stop):
            if args.grads[each.tensor] is not None:
                yield each, slice(each.at, each.at + each.length)

    for each, at in parts():
        row = rows[each.tensor]
        p = new[at]
        p.copy_(master[0][at] if master else flat[each.tensor][each.start : each.start + each.length])
        u = rule.update(p, sums[at] * (factor * row[10]), [s[at] for s in states], row)
        if u is not None:
            directions.append(u)
            norms[each.tensor] += torch.stack([p.double().square().sum(), u.double().square().sum()])
    if rule.by_norms:
        of_all = _over_ranks(args, norms.flatten()).view(-1, 2).tolist()
        for (each, at), u in zip(parts(), directions, strict=True):
            row = rows[each.tensor]
            new[at].sub_(u, alpha=row[8] * trust(row, *of_all[each.tensor]))
    if master:
        for _, at in parts():
            master[0][at] = new[at]
    _gather(args, buckets, new)


def _gather(args: ReduceUpdateGather, buckets: Buckets, new: Tensor) -> None:
    """Every rank gets what the owners have made of the parameters."""
    world, sizes = args.world, [buckets.owned(r) for r in range(args.world)]
    if not buckets.offsets[-1]:
        return
    whole = all_to_all(new.repeat(world), sizes, [len(new)] * world, args.group_name)
    changed = []
    for p, g, values in zip(args.params, args.grads, whole.split(list(buckets.numels)), strict=True):
        if g is not None:
            p.detach().copy_(values.view(p.shape))
            changed.append(p)
    torch.autograd.graph.increment_version([*changed, *args.states])
