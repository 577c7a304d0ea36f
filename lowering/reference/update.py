"""reduce_update_gather with plain collectives: for devices, dtypes and groups that no executor serves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from autofuse.lowering import agreement
from autofuse.lowering.buckets import Buckets, Segment
from autofuse.lowering.reference.layout import all_gather, all_to_all
from autofuse.lowering.update_rules import LR, RULES, SIGN, trust

if TYPE_CHECKING:
    from autofuse.lowering.ops.reduce_update_gather import ReduceUpdateGather

OP = "reduce_update_gather"

Row: TypeAlias = Sequence[float]
"""The numbers of a tensor."""


def update_by_reference(args: ReduceUpdateGather, agreed: bool = False) -> Tensor:
    """The op. RuntimeError or ValueError on all ranks, before anything is written, if the ranks disagree.
    agreed: it is known that they do not."""
    if args.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{OP}: no kernel can run this step while it is captured in a CUDA graph: it takes 2 to 8 GPUs "
            "of one host, gradients of one dtype, parameters of one dtype, and a step before the capture"
        )
    buckets, dtype = args.buckets, math_dtype(args.params)
    if not agreed:
        check(args, buckets, dtype)
        codes = [agreement.code(p, g) for p, g in zip(args.params, args.grads, strict=True)]
        problem = agreement.problem(OP, _all_gather_numbers(args, tell(args, buckets, codes)), args.names)
        if problem:
            raise agreement.Disagreement(problem)
    norm = torch.empty(0, device=args.device)
    sums = _reduce(args, buckets, dtype) if buckets.offsets[-1] else norm.to(dtype)
    factor: float | Tensor = 1.0
    if args.wants_norm:
        squares = _over_ranks(args, sums.double().square().sum().reshape(1))
        norm = squares[0].sqrt().float()
        if args.error_if_nonfinite and not math.isfinite(float(norm)):
            raise agreement.not_finite(OP, float(norm))
        factor = _clip(norm, args.max_norm).to(dtype)
    _update(args, buckets, sums, factor)
    return norm


def _clip(norm: Tensor, max_norm: float) -> Tensor:
    """`update_rules.clip` where the norm is: the host need not wait for it."""
    return (max_norm / (norm.double() + 1e-6)).clamp(max=1) if max_norm else torch.ones_like(norm)


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
    numbers = 0 if args.numbers.is_cuda else agreement.digest(args.numbers)
    return agreement.told(kind, numbers, codes)


@lru_cache(maxsize=256)
def _kind(buckets: Buckets, *values: Any) -> int:
    return agreement.digest(buckets.numels, *values)


def math_dtype(params: list[Tensor]) -> torch.dtype:
    """In what a rule is computed."""
    return torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32


def _all_gather_numbers(args: ReduceUpdateGather, values: list[int]) -> list[list[int]]:
    world = args.world
    told = torch.tensor(values, dtype=torch.int64, device=args.device)
    return (
        all_to_all(told.repeat(world), [len(values)] * world, [len(values)] * world, args.group_name)
        .view(world, len(values))
        .tolist()
    )


def _over_ranks(args: ReduceUpdateGather, values: Tensor) -> Tensor:
    """Sums of float64 values over the ranks, in rank order."""
    world, n = args.world, len(values)
    every = all_to_all(values.repeat(world), [n] * world, [n] * world, args.group_name).view(world, n)
    return _in_rank_order(every, values.dtype)


def _reduce(args: ReduceUpdateGather, buckets: Buckets, dtype: torch.dtype) -> Tensor:
    """The sums or means of the elements that this rank owns; 0 where a tensor has no gradient. Gradients are
    exchanged in their own dtype, if they have one."""
    wire = _common([g.dtype for g in args.grads if g is not None], dtype)
    whole = torch.cat(
        [
            torch.zeros_like(p, dtype=wire).reshape(-1) if g is None else g.reshape(-1).to(wire)
            for p, g in zip(args.params, args.grads, strict=True)
        ]
    )
    sent = [buckets.owned(r) for r in range(args.world)]
    owned = sent[args.rank]
    received = all_to_all(whole, [owned] * args.world, sent, args.group_name)
    total = _in_rank_order(received.view(args.world, owned), dtype)
    return total.mul_(1 / args.world) if args.reduce_op == "avg" else total


def _in_rank_order(parts: Tensor, dtype: torch.dtype) -> Tensor:
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total


def _common(dtypes: list[torch.dtype], otherwise: torch.dtype) -> torch.dtype:
    return dtypes[0] if len(set(dtypes)) == 1 else otherwise


def _update(args: ReduceUpdateGather, buckets: Buckets, sums: Tensor, factor: float | Tensor) -> None:
    rule, rows = RULES[args.rule], args.numbers.tolist()
    states, master = args.states[: len(rule.states)], args.states[len(rule.states) :]
    flat = [p.detach().reshape(-1) for p in args.params]
    owned = list(buckets.segments(*buckets.starts[args.rank : args.rank + 2]))
    old = [sums[:0], *(flat[s.tensor][s.start : s.start + s.length].to(sums.dtype) for s in owned)]
    new = master[0].clone() if master else torch.cat(old)
    changed = [s for s in owned if args.grads[s.tensor] is not None]
    direction = torch.empty_like(new) if rule.by_norms else None
    for at, row in _runs(changed, rows):
        u = rule.update(new[at], sums[at] * (factor * row[SIGN]), [s[at] for s in states], row)
        if direction is not None and u is not None:
            direction[at] = u
    if direction is not None:
        _apply(args, rows, changed, new, direction)
    if master:
        for at, _ in _runs(changed, rows):
            master[0][at] = new[at]
    _gather(args, buckets, new)


def _runs(segments: Sequence[Segment], rows: Sequence[Row]) -> list[tuple[slice, Row]]:
    """The elements of neighbours with equal rows, which are updated at once."""
    runs: list[tuple[slice, Row]] = []
    for each in segments:
        start, row = each.at, rows[each.tensor]
        if runs and runs[-1][0].stop == start and runs[-1][1] == row:
            start = runs.pop()[0].start
        runs.append((slice(start, each.at + each.length), row))
    return runs


def _apply(
    args: ReduceUpdateGather,
    rows: Sequence[Sequence[float]],
    changed: Sequence[Segment],
    new: Tensor,
    u: Tensor,
) -> None:
    """The second phase of LAMB."""
    at = [slice(s.at, s.at + s.length) for s in changed]
    norms = torch.zeros(2, len(rows), dtype=torch.float64, device=new.device)
    if changed:
        tensors = torch.tensor([s.tensor for s in changed], device=new.device)
        for norm, of in zip(norms, (new, u), strict=True):
            parts = torch._foreach_norm([of[a] for a in at], 2, dtype=torch.float64)
            norm.index_add_(0, tensors, torch.stack(list(parts)).square())
    of_p, of_u = _over_ranks(args, norms.flatten()).view(2, -1).tolist()
    for each, a in zip(changed, at, strict=True):
        row, t = rows[each.tensor], each.tensor
        new[a].sub_(u[a], alpha=row[LR] * trust(row, of_p[t], of_u[t]))


def _gather(args: ReduceUpdateGather, buckets: Buckets, new: Tensor) -> None:
    """Every rank gets what the owners have made of the parameters, in their dtype, if they have one."""
    if not buckets.offsets[-1]:
        return
    sizes = [buckets.owned(r) for r in range(args.world)]
    padded = new.new_zeros(max(sizes), dtype=_common([p.dtype for p in args.params], new.dtype))
    padded[: len(new)] = new
    every = all_gather(padded.view(1, -1), 0, 1, args.world, args.group_name)
    whole = torch.cat([part[:size] for part, size in zip(every, sizes, strict=True)])
    pairs = zip(args.params, args.grads, whole.split(list(buckets.numels)), strict=True)
    changed = [(p, values.view(p.shape)) for p, g, values in pairs if g is not None]
    if changed:
        torch._foreach_copy_([p.detach() for p, _ in changed], [values for _, values in changed])
    torch.autograd.graph.increment_version([*(p for p, _ in changed), *args.states])
