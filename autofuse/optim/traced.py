"""The step of an optimizer in a graph: one op, that changes parameters and states.

What changes from step to step, such as rates and numbers of updates, is read when the op runs, so that it
makes no graph anew.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from autofuse.lowering.ops.library import LIBRARY

F = TypeVar("F", bound=Callable[..., Any])


class Steps(Protocol):
    """What the op needs of an optimizer."""

    def run(self, params: list[Tensor], grads: list[Tensor | None], states: list[Tensor]) -> Tensor: ...


_optimizers: WeakValueDictionary[int, Steps] = WeakValueDictionary()
_numbers = count()


def number_of(optimizer: Steps) -> int:
    """A new number, under which the op finds the optimizer."""
    number = next(_numbers)
    _optimizers[number] = optimizer
    return number


def constant_in_graphs(function: F) -> F:
    """Called when a graph is traced, not when it runs."""
    marked: F = torch.compiler.assume_constant_result(function)
    return marked


def _step(
    params: list[Tensor], grads: list[Tensor | None], states: list[Tensor], wants_norm: bool, optimizer: int
) -> Tensor:
    return _optimizers[optimizer].run(params, grads, states)


def _fake(
    params: list[Tensor], grads: list[Tensor | None], states: list[Tensor], wants_norm: bool, optimizer: int
) -> Tensor:
    if wants_norm and params:
        return torch.empty((), device=params[0].device)
    return torch.empty(0, device="cpu")


LIBRARY.define(
    "optimizer_step(Tensor(a!)[] params, Tensor?[] grads, Tensor(b!)[] states, bool wants_norm, "
    "int optimizer) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),  # numbers are read on the host
)
LIBRARY.impl("optimizer_step", _step, "CompositeExplicitAutograd")
torch.library.register_fake("autofuse::optimizer_step", _fake, lib=LIBRARY)

optimizer_step = torch.ops.autofuse.optimizer_step
