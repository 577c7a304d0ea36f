"""Numbers of updates, and rates, on the device of the parameters: for steps that CUDA graphs replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autofuse.lowering.update_rules import NUMBERS

if TYPE_CHECKING:
    from autofuse.optim.batch import Batch
    from autofuse.optim.numbers import RowOf


class OnDevice:
    """Attributes:
    counts: fp64 [T], how often each parameter has been updated.
    rates: fp64 [T, NUMBERS], the rows of the next update, once `advance` was called.
    """

    def __init__(self, groups: Sequence[int], device: torch.device) -> None:
        """groups: number of the param group of each parameter."""
        self.counts = torch.zeros(len(groups), dtype=torch.float64, device=device)
        self.rates = torch.zeros(len(groups), NUMBERS, dtype=torch.float64, device=device)
        self._runs = _runs(groups)
        self._filled: dict[tuple[int, int], float] = {}
        self._given: list[bool] = []
        self._added = self.counts

    def prepare(self, given: list[bool]) -> None:
        """Notes which parameters have gradients. RuntimeError for others than in the last step, which a
        captured one cannot have."""
        if given == self._given:
            return
        if self.counts.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a step is captured with other gradients than the step before it had: run one with the same "
                "gradients first"
            )
        self._given = given
        self._added = torch.tensor(given, device=self.counts.device).double()

    def fill(self, param_groups: Sequence[dict[str, Any]], row_of: RowOf) -> Tensor:
        """The rates of the next update. A graph keeps the numbers of the host that it was captured with; a
        learning rate that is a tensor of the device is read when the graph is replayed."""
        for start, stop, group in self._runs:
            options = param_groups[group]
            t, lr = self.counts[start:stop] + 1, options["lr"]
            if isinstance(lr, Tensor):
                lr = lr.double().expand_as(t) if lr.device == t.device else float(lr)
            for column, number in enumerate(row_of(options, t, lr)):
                if isinstance(number, Tensor) and number.dim():
                    self.rates[start:stop, column] = number
                elif self._filled.get((start, column)) != float(number):
                    self._filled[start, column] = float(number)
                    self.rates[start:stop, column] = float(number)
        return self.rates

    def advance(self) -> None:
        """Counts an update of the parameters with gradients."""
        self.counts += self._added


def is_captured(batches: Sequence[Batch], can_be: bool, name: str) -> bool:
    """Whether a step is part of a CUDA graph. RuntimeError if that would replay the numbers of one update."""
    on_gpu = any(batch.params[0].is_cuda for batch in batches)
    if not on_gpu or not torch.cuda.is_current_stream_capturing():
        return False
    if not can_be:
        raise RuntimeError(
            f"{name}: step() is captured in a CUDA graph; construct the optimizer with capturable=True, and "
            "run a step before the capture"
        )
    return True


def _runs(groups: Sequence[int]) -> list[tuple[int, int, int]]:
    """First and last plus one of neighbours of one param group, and its number."""
    starts = [i for i, group in enumerate(groups) if not i or groups[i - 1] != group]
    return [(a, b, groups[a]) for a, b in zip(starts, [*starts[1:], len(groups)], strict=True)]
