"""The dense ops on GPUs, as `FusedOp.cuda` calls them: choose a way, run it.

The arguments have no gap: `FusedOp.gpu_gap` was asked before. A call with an empty matrix runs the reference,
after the ranks have compared the sizes that may differ between them. All decisions depend only on values that
are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autofuse import config
from autofuse.lowering.gpu.choice.calls import Calls, GpuCall, remember, run_call
from autofuse.lowering.gpu.choice.kernel import Way, replaced
from autofuse.lowering.gpu.choice.launcher import UNEVEN
from autofuse.lowering.gpu.choice.quick import Quick, sizes_of
from autofuse.lowering.gpu.embedding import vocabulary
from autofuse.lowering.gpu.embedding.reduced import reduced_call as bags_call
from autofuse.lowering.gpu.experts import reduced as tokens
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, current, workspace_for, workspace_of
from autofuse.lowering.gpu.operands import aligned, as_read
from autofuse.lowering.ops.all_gather_matmul import AllGatherMatmul
from autofuse.lowering.ops.matmul_all_gather import MatmulAllGather
from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce, is_added_up
from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter
from autofuse.lowering.reference.product import is_grouped, is_pooled, parse
from autofuse.lowering.runs import Note

from .factors import Factors
from .measure import trials
from .reductions import reads_x
from .run import Gather, Publication, Reduction, of_factors, of_weights, problem_of
from .tails import with_tail
from .token_rows import AddedRows, Again, again_of, call_of
from .ways import GATHER, PUBLISH, REDUCE, SCATTER, DenseProblem

ReduceArguments: TypeAlias = MatmulAllReduce | MatmulReduceScatter


def run_reduce(op: str, args: ReduceArguments) -> Any:
    """matmul_all_reduce and matmul_reduce_scatter. The product is one of matmuls or of rows of a table, and
    may have a tail; or it is a sum of rows of bags or experts."""
    x, b = args.x, args.w
    if is_added_up(args):
        return run_call(reduce_call(op, args))
    is_empty = any(map(_is_empty, x, b))
    if is_empty and _is_empty_everywhere(x[0], b[0]):
        return NotImplemented
    if not is_empty and (call := call_of(op, args, _added_rows(op, args))) is not None:
        return run_call(call)
    with current(x[0].device):
        workspace = workspace_for(args.group_name, x[0].device)
        a = [as_read(xi) for xi in x]
        capturing = torch.cuda.is_current_stream_capturing()
        if is_empty:
            return _left(_reduce_call(workspace, op, args, a)[0], capturing)
        kind = _reduce_kind(op, args, a, capturing)
        reduction = workspace.calls.get(kind)
        if reduction is None:
            call, prepared = _reduce_call(workspace, op, args, a)
            reduction = _settle(call, prepared, kind, capturing)
        return _reduced(reduction, args, _x_of(args, reduction.reads_x))


def _reduced(reduction: Reduction, args: ReduceArguments, x: Sequence[Tensor]) -> list[Tensor]:
    return reduction(Factors.of(args, x), [t.contiguous() for t in args.tail_operands])


def _x_of(args: ReduceArguments, read: bool) -> list[Tensor]:
    """`args.x`, contiguous where the reader needs that. read: whether a kernel of ours reads it. torch takes
    any strides, except in float8."""
    copies = read or parse(args.product).contraction == "scaled_mm"
    return [xi.contiguous() for xi in args.x] if copies else args.x


def _reduce_kind(op: str, args: ReduceArguments, a: Sequence[Tensor], capturing: bool) -> Hashable:
    update = op == SCATTER and config.update
    return (
        op, *map(_layout, a), *map(_layout, args.w), args.product, args.keep_product,
        *((t.dtype, t.shape) for t in args.operands), args.reduce_op, args.dim, args.outer, args.order,
        args.site, capturing, update, args.tail, args.proof, *map(_layout, args.tail_operands),
    )  # fmt: skip


def reduce_call(op: str, args: ReduceArguments) -> GpuCall | None:
    """The call of `run_reduce` as a record; None for a call that is left to the reference."""
    x = args.x
    if is_pooled(args.product):
        return bags_call(op, args)
    call = call_of(op, args, _added_rows(op, args))
    if call is not None or is_grouped(args.product):
        return call
    if any(map(_is_empty, x, args.w)):
        return None
    return _reduce_call(workspace_of(args.group_name, x[0]), op, args, [as_read(xi) for xi in x])[0]


def _added_rows(op: str, args: ReduceArguments) -> AddedRows | None:
    """The call of a kernel that adds up or reads rows; None if the product is another one."""
    return (tokens if is_grouped(args.product) else vocabulary).added_rows(op, args)


def _reduce_call(
    workspace: GpuWorkspace, op: str, args: ReduceArguments, a: Sequence[Tensor]
) -> tuple[GpuCall, Callable[..., Reduction]]:
    """The call, and a function that prepares it in a way. a: x as kernels read it."""
    mean, factors = args.reduce_op == "avg", Factors.of(args, a)
    problem, tail = with_tail(of_factors(op, factors, workspace, args.dim, args.outer), args, workspace)
    strides = args.w[0].stride()

    def prepared(way: Way, note: Note | None = None) -> Reduction:
        return Reduction(
            workspace, way, problem, strides, mean, args.order, args.site, note=note, tail=tail,
            keep=args.keep_product,
        )  # fmt: skip

    x_of = cache(partial(_x_of, args))  # copied once, so that measured times do not contain the copy

    def run(way: Way) -> list[Tensor]:
        return _reduced(prepared(way), args, x_of(reads_x(way)))

    variant = strides, args.reduce_op, args.order, tail, args.product
    call = _call(op, args, workspace, problem, run, variant)
    # A call whose owners apply the tail is measured as it is; other calls are measured without their tail.
    return replace(call, trials=None) if problem.written else call, prepared


def run_gather(args: AllGatherMatmul) -> Any:
    """all_gather_matmul of rows. Each weight may have a bias [N]."""
    x, w = args.x, args.w
    if not x.numel():  # on all ranks
        return NotImplemented
    with current(x.device):
        workspace = workspace_for(args.group_name, x.device)
        part = x.contiguous()
        biases = [_row(args.bias_of(i)) for i in range(len(w))]
        capturing = torch.cuda.is_current_stream_capturing()
        if any(_is_empty(x, wi) for wi in w):
            return _left(_gather_call(workspace, args, part)[0], capturing)
        kind = _gather_kind(args, part, capturing)
        gather = workspace.calls.get(kind)
        if gather is None:
            call, prepared = _gather_call(workspace, args, part)
            gather = _settle(call, prepared, kind, capturing)
        return gather(part, w, biases)


def _gather_kind(args: AllGatherMatmul, part: Tensor, capturing: bool) -> Hashable:
    biased = (args.bias_of(i) is not None for i in range(len(args.w)))
    return (
        GATHER, _layout(part), *map(_layout, args.w), args.outer, args.keep_gathered, *biased, args.site,
        capturing,
    )  # fmt: skip


def gather_call(args: AllGatherMatmul) -> GpuCall | None:
    """The call of `run_gather` as a record; None for a call that is left to the reference."""
    x = args.x
    if any(_is_empty(x, wi) for wi in args.w):
        return None
    return _gather_call(workspace_of(args.group_name, x), args, x.contiguous())[0]


def _gather_call(
    workspace: GpuWorkspace, args: AllGatherMatmul, part: Tensor
) -> tuple[GpuCall, Callable[..., Gather]]:
    w, keep, site = args.w, args.keep_gathered, args.site
    biases = [_row(args.bias_of(i)) for i in range(len(w))]
    problem = of_weights(problem_of(GATHER, part, w[0], workspace, args.dim, args.outer), w, biases)
    more, biased = keep or len(w) > len(problem.columns), biases[0] is not None

    def prepared(way: Way, note: Note | None = None) -> Gather:
        strides = w[0].stride()
        return Gather(workspace, way, problem, strides, more, keep, site, biased=biased, note=note)

    def run(way: Way) -> list[Tensor]:
        return prepared(way)(part, w, biases)

    return _call(GATHER, args, workspace, problem, run, (w[0].stride(), more, biased)), prepared


def run_publish(args: MatmulAllGather) -> Any:
    """matmul_all_gather of one matmul, which may have a bias [N]."""
    x, w = args.x[0], args.w[0]
    is_empty = _is_empty(x, w)
    if is_empty and _is_empty_everywhere(x, w):
        return NotImplemented
    with current(x.device):
        workspace = workspace_for(args.group_name, x.device)
        a, bias = x.contiguous(), _row(args.bias)
        capturing = torch.cuda.is_current_stream_capturing()
        if is_empty:
            return _left(_publish_call(workspace, args, a)[0], capturing)
        kind = _publish_kind(args, a, capturing)
        publication = workspace.calls.get(kind)
        if publication is None:
            call, prepared = _publish_call(workspace, args, a)
            publication = _settle(call, prepared, kind, capturing)
        return [publication(a, w, bias)]


def _publish_kind(args: MatmulAllGather, a: Tensor, capturing: bool) -> Hashable:
    return (
        PUBLISH, _layout(a), _layout(args.w[0]), args.dim, args.outer, args.bias is not None, args.site,
        capturing,
    )  # fmt: skip


def publish_call(args: MatmulAllGather) -> GpuCall | None:
    """The call of `run_publish` as a record; None for a call that is left to the reference."""
    x = args.x[0]
    if _is_empty(x, args.w[0]):
        return None
    return _publish_call(workspace_of(args.group_name, x), args, x.contiguous())[0]


def _publish_call(
    workspace: GpuWorkspace, args: MatmulAllGather, a: Tensor
) -> tuple[GpuCall, Callable[..., Publication]]:
    w, bias = args.w[0], _row(args.bias)
    problem = problem_of(PUBLISH, a, w, workspace, args.dim, args.outer)

    def prepared(way: Way, note: Note | None = None) -> Publication:
        return Publication(workspace, way, problem, w.stride(), bias is not None, args.site, note=note)

    def run(way: Way) -> list[Tensor]:
        return [prepared(way)(a, w, bias)]

    return _call(PUBLISH, args, workspace, problem, run, (w.stride(), bias is not None)), prepared


CALLS: Calls = {
    REDUCE: partial(reduce_call, REDUCE),
    SCATTER: partial(reduce_call, SCATTER),
    GATHER: gather_call,
    PUBLISH: publish_call,
}


# --- Again, past the dispatcher (`lowering/direct.py`) ----------------------------------------------------


def _kind(given: tuple[Any, ...]) -> Hashable:
    x, w, more, *rest = given
    sizes = sizes_of([x] if isinstance(x, Tensor) else x, w, more)
    return None if sizes is None else (*sizes, *rest)


def _reduce_kind_of(given: tuple[Any, ...]) -> Hashable:
    """`Quick.kind` of reductions. Calls of bags are never prepared: they look up new numbers of rows."""
    x, w, more, product, *rest, operands, tail, proof, group, order, site = given
    if is_pooled(product):
        return None
    sizes = sizes_of(x, w, [*more, *operands])
    return None if sizes is None else (*sizes, len(more), product, *rest, tail, proof, group, order, site)


def _quick_reduce(op: str) -> Quick:
    def made(workspace: GpuWorkspace, args: ReduceArguments) -> Any:
        found = again_of(op, args, _added_rows(op, args))
        return workspace.calls.get(_reduce_kind(op, args, args.x, False)) if found is None else found

    def again(found: Reduction | Again, given: tuple[Any, ...]) -> list[Tensor] | None:
        x, w, operands, product = given[:4]
        if isinstance(found, Again):
            return found.again(x, w, operands)
        return found.again(Factors(x, w, operands, product, found.kind), given[-6])

    return Quick(_reduce_kind_of, made, again)


def _gather_made(workspace: GpuWorkspace, args: AllGatherMatmul) -> Any:
    return workspace.calls.get(_gather_kind(args, args.x, False))


def _gather_again(gather: Gather, given: tuple[Any, ...]) -> list[Tensor] | None:
    part, w, bias, *_ = given
    return gather.again(part, w, [b if b.numel() else None for b in bias] if bias else [None] * len(w))


def _publish_made(workspace: GpuWorkspace, args: MatmulAllGather) -> Any:
    return workspace.calls.get(_publish_kind(args, args.x[0], False))


def _publish_again(publication: Publication, given: tuple[Any, ...]) -> list[Tensor] | None:
    out = publication.again(given[0][0], given[1][0], given[2][0] if given[2] else None)
    return None if out is None else [out]


QUICK: Mapping[str, Quick] = {
    REDUCE: _quick_reduce(REDUCE),
    SCATTER: _quick_reduce(SCATTER),
    GATHER: Quick(_kind, _gather_made, _gather_again),
    PUBLISH: Quick(_kind, _publish_made, _publish_again),
}


def _call(
    op: str,
    args: Any,
    workspace: GpuWorkspace,
    problem: DenseProblem,
    run: Callable[[Way], list[Tensor]],
    variant: Hashable,
) -> GpuCall:
    return GpuCall(op, args, workspace, problem, run, variant, lambda: run(replaced(problem)), trials)


def _settle(call: GpuCall, prepared: Callable[..., Any], kind: Hashable, capturing: bool) -> Any:
    """Prepares a call in the way that policy `auto` takes. Once the way is settled, it is kept for the calls
    of this kind that follow."""
    way, settled = call.decide(capturing)
    note = call.note(way, capturing)
    if not call.has_equal_parts(capturing):
        note.fell_back(UNEVEN)
    elif way.replaced:
        note.ran()
    made = prepared(way, note)
    if settled:
        remember(call.workspace, kind, made)
    return made


def _is_empty(x: Tensor, w: Tensor) -> bool:
    return not (x.numel() and w.numel())


def _is_empty_everywhere(x: Tensor, w: Tensor) -> bool:
    """Whether the product has no elements on any rank. K does not decide, since each rank has its own. An
    empty table has no rows to look up."""
    return x.dim() != 2 or w.dim() != 2 or not (x.shape[0] and w.shape[1]) or x.shape[1] != w.shape[0]


def _left(call: GpuCall, capturing: bool) -> Any:
    """Leaves a call to the reference, since a matmul of this rank has no elements. Other ranks may have some:
    this rank compares sizes with them, by a problem that differs from theirs."""
    problem = call.problem
    assert isinstance(problem, DenseProblem)
    problem = replace(problem, n=0) if call.op == GATHER else replace(problem, k=0)
    replace(call, problem=problem).meet_others(capturing)
    return NotImplemented


def _row(bias: Tensor | None) -> Tensor | None:
    """The bias as kernels read it."""
    return None if bias is None else aligned(bias)


def _layout(t: Tensor) -> Hashable:
    """All properties of an operand on which the launch of its call depends."""
    return t.dtype, t.shape, t.stride(), t.storage_offset()
