"""Tails on CPU ranks: by C++ where it has every stage and dtype, else by the reference's ops."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from autofuse.lowering.cpu.recipes import Spec, State
from autofuse.lowering.cpu.tiles import Run
from autofuse.lowering.reference.tail import TailStage, steps, tail_reference
from autofuse.native_kernels.cpu import DTYPES, reduce_rows
from autofuse.native_kernels.cpu.tail import CODES, TailCall, bits, fits


class Place(Protocol):
    """Where a matrix lies in a call; its columns are adjacent, `stride` elements lie between its rows."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def stride(self) -> int: ...

    def tensor(self, s: State) -> Tensor: ...

    def address(self, s: State) -> int: ...


@dataclass(frozen=True, slots=True)
class Tail:
    """A tail of V in `dtype`, with operands of given dtypes.

    `results`: dtype and columns of V behind the tail and of what it keeps. `stages`: as the C++ kernel reads
    them; None where it lacks a stage or a dtype.
    """

    text: str
    dtype: torch.dtype
    results: tuple[tuple[torch.dtype, int], ...]
    stages: tuple[int, ...] | None


class ApplyTail:
    """A step: the tail of some rows, from the parts of each run of columns to the results of these rows."""

    def __init__(
        self,
        tail: Tail,
        run: Run,
        scale: float,
        source: Sequence[Sequence[Place]],
        operands: Spec,
        results: Sequence[Place],
    ) -> None:
        self._tail, self._run, self._scale, self._source, self._results = tail, run, scale, source, results
        self._parts = [part for parts in source for part in parts]
        self._kernel: TailCall | None = None
        if tail.stages is not None:
            segments = [(parts[0].shape[1], [(p.stride, p.dtype) for p in parts]) for parts in source]
            strides = [result.stride for result in results]
            self._kernel = TailCall(
                run.start, run.length, tail.dtype, scale, segments, operands, tail.stages, strides
            )

    def __call__(self, s: State) -> None:
        if self._kernel is not None and all(map(fits, s.tail_operands)):
            addresses = [part.address(s) for part in self._parts]
            self._kernel(addresses, s.tail_operands, [result.address(s) for result in self._results])
            return
        runs = []
        for parts in self._source:
            runs.append(torch.empty(parts[0].shape, dtype=self._tail.dtype))
            reduce_rows(runs[-1], [part.tensor(s) for part in parts], self._scale)
        operands = [self._run.read_operand(t, 0) for t in s.tail_operands]
        found = tail_reference(torch.cat(runs, 1), operands, self._tail.text)
        for result, value in zip(self._results, found, strict=True):
            result.tensor(s).copy_(value)


@lru_cache(maxsize=2048)
def tail_of(
    text: str, dtype: torch.dtype, columns: int, operands: tuple[tuple[int, torch.dtype], ...]
) -> Tail:
    """operands: how many dims each has, and its dtype."""
    value = torch.empty((2, columns), dtype=dtype, device="meta")
    given = [torch.empty((1,) * dims, dtype=t, device="meta") for dims, t in operands]
    found: list[tuple[torch.dtype, int]] = []
    words: list[int] | None = []
    before = dtype
    for stage, after, more in steps(value, given, text):
        found += [(t.dtype, t.shape[1]) for t in more]
        other = operands[stage.operand] if stage.operand is not None else None
        of_stage = _words(stage, before, after.dtype, other)
        if stage.scale is not None and operands[stage.scale][1] not in DTYPES:
            of_stage = None
        words = None if words is None or of_stage is None else [*words, *of_stage]
        before = after.dtype
    stages = None if words is None or dtype not in DTYPES else tuple(words)
    return Tail(text, dtype, ((before, columns), *found), stages)


def _words(
    stage: TailStage, before: torch.dtype, dtype: torch.dtype, other: tuple[int, torch.dtype] | None
) -> tuple[int, ...] | None:
    """A stage as the kernel reads it, None if it does not have it.

    before, dtype: dtypes of V before and behind it; other: dims and dtype of its operand. (An operand without
    dims is rounded to the dtype of V by some ops of torch and not by others; numbers by sums and clamps.)
    """
    if stage.name not in CODES or dtype not in DTYPES:
        return None
    if other is not None and (other[1] not in DTYPES or (other[0] == 0 and other[1] != before)):
        return None
    number = 0 if stage.number is None else stage.number
    if stage.name in ("add", "sub", "rsub", "clamp_min", "clamp_max"):
        number = torch.tensor(number, dtype=before).item()
    try:
        of_number = bits(number)
    except OverflowError:
        return None
    operand = int(stage.keep) if stage.is_norm else -1 if stage.operand is None else stage.operand
    mask = stage.mask if stage.scale is None else stage.scale
    return CODES[stage.name], DTYPES[dtype], operand, -1 if mask is None else mask, of_number
