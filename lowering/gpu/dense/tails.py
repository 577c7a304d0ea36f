"""Tails on GPUs: their description for kernels, and the kernel that applies a tail after any way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Kernel, Launch
from autofuse.lowering.gpu.memory.comparing import Answers
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, agreements
from autofuse.lowering.gpu.operands import aligned
from autofuse.lowering.proofs import UNPROVEN
from autofuse.lowering.reference.tail import TailStage, check_tail, steps, tail_reference
from autofuse.native_kernels.gpu.dependent import dependent_launches
from autofuse.native_kernels.gpu.prepared import record
from autofuse.native_kernels.triton.tail_alone import launch_tail
from autofuse.native_kernels.triton.tails import (
    CODES,
    DTYPES,
    NO_TAIL,
    Stage,
    TailSpec,
    rows_fit,
)

if TYPE_CHECKING:
    from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce
    from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter

    from .reductions import Reduce
    from .ways import DenseProblem

Operand: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of an operand."""


def with_tail(
    problem: DenseProblem, args: MatmulAllReduce | MatmulReduceScatter, workspace: GpuWorkspace
) -> tuple[DenseProblem, TailSpec]:
    """The problem of a call and its tail. problem: that of the call without its tail.

    Owners of rows may apply the tail if all ranks have the same proof that it is equal on all of them. If
    not, each rank applies its own tail."""
    if not args.tail:
        return problem, NO_TAIL
    sizes = [problem.m, problem.n]
    sizes[problem.dim] //= 1 if problem.everywhere else problem.world
    rows, columns = sizes
    check_tail(sizes, args.tail_operands, args.tail, problem.op, problem.by_rows)
    tail = tail_of(args.tail, problem.dtype, rows, args.tail_operands)
    owners = problem.everywhere and args.order != "ring" and _agreed(workspace, args)
    return replace(problem, written=sum(tail.row_bytes(columns)) if owners else 0), tail


def _agreed(workspace: GpuWorkspace, args: MatmulAllReduce | MatmulReduceScatter) -> bool:
    """Whether all ranks have the same proof. Ranks whose `proof` is not empty meet before the first call that
    is not captured. A call that is captured before that counts as unproven."""
    if not args.proof:
        return False
    # Not in `workspace.calls`: one rank alone may clear these, and would then meet alone.
    known, kind = _compared.setdefault(workspace, Answers()), (args.tail, args.proof, args.site)
    if torch.cuda.is_current_stream_capturing():
        return bool(known.get(kind))

    def meet() -> bool:
        told = workspace.meet(f"the proof of {args.tail!r} at {args.site}: {args.proof}")
        return len(set(told)) == 1 and args.proof != UNPROVEN

    return known.find(kind, meet, workspace.calls.clear)


_compared: WeakKeyDictionary[GpuWorkspace, Answers] = WeakKeyDictionary()
agreements.append(_compared)


def tail_of(text: str, dtype: torch.dtype, rows: int, operands: Sequence[Tensor]) -> TailSpec:
    """The tail as kernels take it. It is applied to `V: [rows, .]` in `dtype`, and `check_tail` has accepted
    its operands."""
    return _tail_of(text, dtype, rows, tuple((tuple(t.shape), t.dtype) for t in operands))


@lru_cache(maxsize=2048)
def _tail_of(text: str, dtype: torch.dtype, rows: int, operands: tuple[Operand, ...]) -> TailSpec:
    columns = 2  # any number
    value = torch.empty((rows, columns), dtype=dtype, device="meta")
    given = [torch.empty((1,) * len(shape), dtype=t, device="meta") for shape, t in operands]
    stages, kept = list[Stage](), list[tuple[torch.dtype, bool]]()
    for stage, value, more in steps(value, given, text):  # noqa: B020 - V behind each stage
        stages.append(_stage(stage, value.dtype))
        kept += [(t.dtype, t.shape[1] == columns) for t in more]
    kinds = tuple(_kind(shape, rows) for shape, _ in operands)
    added = stages[0].operand if stages and _adds_matrix(stages[0], dtype, rows, operands) else -1
    return TailSpec(text, tuple(stages), kinds, ((value.dtype, True), *kept), added)


def _adds_matrix(first: Stage, dtype: torch.dtype, rows: int, operands: tuple[Operand, ...]) -> bool:
    """Whether the first stage adds an operand of the shape and dtype of V."""
    if first.code != CODES["add"] or first.operand < 0 or first.dtype != DTYPES[dtype]:
        return False
    shape, kind = operands[first.operand]
    high, wide = (1, 1, *shape)[-2:]
    return high == rows and wide > 1 and kind == dtype


def _stage(stage: TailStage, dtype: torch.dtype) -> Stage:
    name = f"gelu {stage.approximate}" if stage.name == "gelu" else stage.name
    operand = -1 if stage.operand is None else stage.operand
    second = stage.mask if stage.scale is None else stage.scale
    mask = -1 if second is None else second
    number = 0.0 if stage.number is None else float(stage.number)
    return Stage(CODES[name], operand, mask, number, DTYPES[dtype], stage.keep)


def _kind(shape: tuple[int, ...], rows: int) -> tuple[bool, bool]:
    """Whether an operand has one value for each row, and whether it has one for each column."""
    high, wide = (1, 1, *shape)[-2:]
    return high == rows and rows > 1, wide > 1


class Behind(NamedTuple):
    """How a tail is applied to the sum that a kernel stores.

    added: the number of the operand that this kernel adds to the sum; -1 for none. rest: the part of the tail
    that a second kernel applies, which is launched if the part has stages. operands: the numbers of the
    operands of `rest`. keeps: the sum, with the added operand, is also a result of the tail.
    """

    added: int
    rest: TailSpec
    operands: tuple[int, ...]
    keeps: bool

    def results(self, found: Sequence[Tensor]) -> list[Tensor]:
        """The results of the tail, given the sum and the results of `rest`."""
        if not self.rest.stages:
            return [found[0]]
        value, first, *kept = found
        return [first, *([value] if self.keeps else []), *kept]


@lru_cache(maxsize=2048)
def behind_of(tail: TailSpec, adds: bool) -> Behind:
    """How the tail is applied behind a kernel. adds: whether this kernel can add a matrix to the sum. Then
    the second kernel neither reads this matrix nor stores the new sum, even if the tail keeps it."""
    keeps = len(tail.stages) > 1 and tail.stages[1].code == CODES["keep"]
    stages = tail.stages[1 + keeps :]
    if not adds or tail.added < 0:
        return Behind(-1, tail, tuple(range(len(tail.operands))), False)
    taken = sorted({i for stage in stages for i in (stage.operand, stage.mask) if i >= 0})
    number = {-1: -1} | {i: place for place, i in enumerate(taken)}
    renumbered = (s._replace(operand=number[s.operand], mask=number[s.mask]) for s in stages)
    v, *kept = tail.results
    results = (v, *kept[keeps:]) if stages else ()
    rest = TailSpec(tail.text, tuple(renumbered), tuple(tail.operands[i] for i in taken), results)
    return Behind(tail.added, rest, tuple(taken), keeps)


def with_tail_behind(kernel: Kernel[DenseProblem, Any]) -> Callable[..., None]:
    """The launch of a dense kernel, and of the kernel that applies the tail behind it. Instead of one result
    it takes the sum, and the results of the second kernel."""

    def launch_both(
        at: Launch, config: Any, x: Sequence[Tensor], w: Sequence[Tensor], results: Sequence[Tensor],
        how: Reduce, operands: Sequence[Tensor], tail: TailSpec,
    ) -> None:  # fmt: skip
        value, *found = results
        behind = behind_of(tail, kernel.adds)
        if behind.added >= 0:
            how = how._replace(added=aligned(operands[behind.added]))
            if how.added is not operands[behind.added]:
                record(lambda: None)  # not to be repeated: each call makes an aligned copy of its own
        with dependent_launches():
            kernel.launch(at, config, x, w, value, how)
            if behind.rest.stages:
                launch_tail(
                    value, [operands[i] for i in behind.operands], found, behind.rest, at.compile_only
                )

    return launch_both


def behind(
    value: Tensor, operands: Sequence[Tensor], tail: TailSpec, out: Tensor | None = None
) -> list[Tensor]:
    """The results of a tail of `value: [M, N]`, which torch has computed. value, operands: contiguous; out:
    memory for the result, for a tail that has only one."""
    kind = (tail, value.dtype, value.shape[1])
    capturing = torch.cuda.is_current_stream_capturing()
    if not rows_fit(value.shape[1]) or (capturing and kind not in _launched):
        found = tail_reference(value, operands, tail.text)  # no kernel is compiled during a capture
        return found if out is None else [out.copy_(found[0])]
    results = tail.empty(value, *value.shape) if out is None else [out]
    launch_tail(value, operands, results, tail)
    _launched.add(kind)
    return results


_launched: set[Hashable] = set()
