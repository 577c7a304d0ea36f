"""Updates inside of the backward: a batch of parameters as soon as all of them have their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autofuse.lowering.torch_internals import after_backward, backward_number, in_other_backward
from autofuse.optim.batch import Batch

_updated = WeakIdKeyDictionary()
"""The names of parameters that some optimizer updates in the backward, for as long as they live."""

BATCH_BYTES = 25 << 20
"""Of the gradients of a batch, as in a bucket of DDP."""

NONE = -1
"""The number of no backward."""


class Backward:
    """Runs batches in one order on all ranks, the order in which they were made.

    A batch waits for those before it. What is left when the backward ends runs then: parameters without a
    gradient on all ranks stay as they are. A backward that runs inside of another one updates nothing, since
    a parameter may get gradients from several such backwards.

    Attributes:
        known: how many batches there were when one was last updated; 0 if none since this was set to 0.
    """

    def __init__(self, step: Callable[[Batch], None]) -> None:
        self._step = step
        self._batches: list[Batch] = []
        self._missing: list[int] = []
        self._next = 0
        self._running, self._syncs = NONE, True
        self.known = 0

    def watch(self, batches: list[Batch]) -> None:
        """Update these batches, too, from the next backward on. ValueError for a parameter that another
        optimizer updates in the backward."""
        for batch in batches:
            for param, name in zip(batch.params, batch.names, strict=True):
                if param in _updated:
                    raise ValueError(
                        f"in_backward: {name} is updated in the backward already, by another optimizer, as "
                        f"{_updated[param]}; give each parameter to one optimizer"
                    )
                _updated[param] = name
        for batch in batches:
            number = len(self._batches)
            self._batches.append(batch)
            self._missing.append(len(batch.params))
            for param in batch.params:
                frozen = not param.requires_grad
                param.requires_grad_(True)  # a frozen one takes no hook, but may be frozen no longer some day
                param.register_post_accumulate_grad_hook(lambda _, number=number: self._arrived(number))
                param.requires_grad_(not frozen)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In it, gradients add up and nothing is updated."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @torch.compiler.disable
    def _arrived(self, number: int) -> None:
        if not self._syncs:
            return
        # A backward that has raised an exception never ended.
        if self._running != (current := backward_number()):
            if in_other_backward():
                return
            self._running, self._next = current, 0
            self._missing = [len(batch.params) for batch in self._batches]
            after_backward(partial(self._finish, current))
        self._missing[number] -= 1
        while self._next < len(self._batches) and self._missing[self._next] == 0:
            self._run()

    def _finish(self, backward: int) -> None:
        if self._running == backward:
            while self._next < len(self._batches):
                self._run()
            self._running, self._next = NONE, 0
            self._refuse_late()

    def _refuse_late(self) -> None:
        """RuntimeError if a parameter has got a gradient after its update."""
        for batch in self._batches:
            for param, name in zip(batch.params, batch.names, strict=True):
                if param.grad is not None:
                    raise RuntimeError(
                        f"in_backward: {name} has been updated, and got another gradient in the same "
                        "backward, from a checkpoint with use_reentrant=True: give use_reentrant=False"
                    )

    @torch.no_grad()
    def _run(self) -> None:
        batch = self._batches[self._next]
        self._next += 1
        self.known = len(self._batches)
        try:
            self._step(batch)
        except BaseException:
            self._running, self._next = NONE, 0
            raise
        for param in batch.params:
            param.grad = None


def cut(params: list[Tensor]) -> list[list[Tensor]]:
    """Batches of at most `BATCH_BYTES`, or of one parameter; the last parameters first, as in a backward."""
    batches: list[list[Tensor]] = []
    nbytes = 0
    for param in reversed(params):
        if not batches or nbytes + param.nbytes > BATCH_BYTES:
            batches.append([])
            nbytes = 0
        batches[-1].append(param)
        nbytes += param.nbytes
    return batches
