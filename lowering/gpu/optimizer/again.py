"""Repeats a step of an optimizer, with the same parameters and gradients of the same layout.

The hosts still tell each other that they make the step. The descriptors of the tensors differ from those of
the step before only in the addresses of gradients and in the rates.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from itertools import repeat
from operator import is_, or_
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering import agreement
from autofuse.lowering.gpu.choice.launcher import Launcher
from autofuse.lowering.gpu.choice.quick import Quick
from autofuse.lowering.gpu.embedding.again import Same
from autofuse.lowering.gpu.memory.told import values_of_all
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace
from autofuse.lowering.gpu.operands import ALIGNED
from autofuse.lowering.ops.reduce_update_gather import ReduceUpdateGather
from autofuse.lowering.torch_internals import alike
from autofuse.native_kernels.triton.update_parts import FIELDS

from .tables import rates_of
from .ways import OP, Kept

_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]

TOLD = "gradients of all ranks"
"""The word in messages for the values that the hosts exchange."""


class Step:
    """A step that the kernel has made, with a gradient for each parameter.

    told: the message of this rank to the others; rates, words, rows: the rates and descriptors that the
    kernel was given, and the row of rates of each tensor; table: the words of buckets; sizes: of the memory
    that a step keeps until it ends; long: makes a step on which the ranks have agreed, without a prepared
    launch."""

    def __init__(
        self, workspace: GpuWorkspace, launcher: Launcher, args: ReduceUpdateGather, told: Sequence[int],
        words: bytes, rows: Sequence[int], table: Tensor, sizes: Kept,
        long: Callable[[ReduceUpdateGather], Tensor | None],
    ) -> None:  # fmt: skip
        self.group = weakref.ref(workspace.group)
        self._workspace, self._launcher, self._long = workspace, launcher, long
        self._kind, _, *self._codes = told
        self._params, self._states = Same(args.params), Same(args.states)
        self._numels = [p.numel() for p in args.params]
        given = [g for g in args.grads if g is not None]
        self._dtypes, self._alike = set(map(_dtype, given)), alike(given)
        self._words, self._rows, self._table = array("q", words), [*rows], table
        self._sizes = sizes
        self._first = len(self._words) - FIELDS.value * len(args.params)
        self._nothing = torch.empty(0, device=args.device)

    def again(self, args: ReduceUpdateGather) -> Tensor | None:
        """Makes the step and returns the op's result. None if the step has to go the long way; then this rank
        has told the others nothing. Raises Disagreement on all ranks, as the long way does."""
        # The last fused call may read the old descriptors, so new ones must be stored behind it.
        if not (self._launcher.is_short and self._launcher.is_next() and self._launcher.goes_on()):
            return None
        grads = self._addresses(args.grads)
        if grads is None or not self._params.ask(args.params) or not self._states.ask(args.states):
            return None
        rates, rows = rates_of(args.numbers)
        if rows != self._rows:
            return None
        self._agree(args)
        words = self._words[:]
        words[self._first :: FIELDS.value] = array("q", grads)
        at = self._workspace.descriptors.place(rates + words.tobytes(), False).data_ptr()
        kept = [self._sizes.new(args.device)] if self._sizes.words else []
        if not self._launcher.starts(
            at + len(rates), self._table.data_ptr(), at, *self._states.addresses, *map(Tensor.data_ptr, kept)
        ):
            return self._long(args)
        torch.autograd.graph.increment_version([*args.params, *args.states])
        return self._nothing

    def _addresses(self, grads: Sequence[Tensor | None]) -> list[int] | None:
        """The addresses of the gradients. None if one is not as kernels take it, or has a new dtype."""
        if any(map(is_, grads, repeat(None))):
            return None
        given: Sequence[Tensor] = grads  # type: ignore[assignment]
        if not self._alike(*given):
            if set(map(type, given)) != {Tensor} or set(map(_dtype, given)) != self._dtypes:
                return None
            if list(map(Tensor.numel, given)) != self._numels or not all(map(Tensor.is_contiguous, given)):
                return None
            self._alike = alike(given)
        found = list(map(Tensor.data_ptr, given))
        return None if reduce(or_, found) % ALIGNED else found

    def _agree(self, args: ReduceUpdateGather) -> None:
        values = [self._kind, agreement.digest(args.numbers), *self._codes]
        told = values_of_all(self._workspace, OP, args.site, TOLD, values)
        if any(theirs != told[0] for theirs in told):
            raise agreement.Disagreement(agreement.problem(OP, told, args.names))


def step_kind(args: ReduceUpdateGather) -> Hashable:
    """The key of steps that a `Step` may repeat; None for steps that are never repeated."""
    if args.numbers.is_cuda or args.wants_norm:
        return None
    return OP, "step", *map(id, args.params), args.rule, args.reduce_op, args.group_name, args.site


def _kind(given: tuple[Any, ...]) -> Hashable:
    return step_kind(ReduceUpdateGather(*given))


def _made(workspace: GpuWorkspace, args: ReduceUpdateGather) -> Any:
    return workspace.calls.get(step_kind(args))


def _again(step: Step, given: tuple[Any, ...]) -> Tensor | None:
    return step.again(ReduceUpdateGather(*given))


QUICK = {OP: Quick(_kind, _made, _again)}
