"""Numbers of updates, and rates, on the device of the parameters: for steps that CUDA graphs replay."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autofuse.lowering.update_rules import NUMBERS, Term

if TYPE_CHECKING:
    from autofuse.optim.batch import Batch
    from autofuse.optim.numbers import TermsOf


class OnDevice:
    """Attributes:
    counts: fp64 [T], how often each parameter has been updated.
    """

    def __init__(self, groups: Sequence[int], like: Tensor) -> None:
        """groups: number of the param group of each parameter; like: a parameter."""
        device, self._groups = like.device, sorted(set(groups))
        order = {group: i for i, group in enumerate(self._groups)}
        self.counts = torch.zeros(len(groups), dtype=torch.float64, device=device)
        wide = like.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32  # in which kernels read them
        self._numbers = torch.zeros(len(groups), NUMBERS, dtype=dtype, device=device)
        self._order = torch.tensor([order[group] for group in groups], dtype=torch.int32, device=device)
        length = 1 + NUMBERS * len(fields(Term))
        self._options = torch.zeros(len(order), length, dtype=torch.float64, device=device)
        self._told = [b""] * len(order)
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

    def rows(self, param_groups: Sequence[dict[str, Any]], terms_of: TermsOf, counts: bool) -> Tensor:
        """[T, NUMBERS], the numbers of the next update, by a kernel. counts: the update is counted, too. A
        graph keeps the options that it was captured with, but for a learning rate that is a tensor of the
        device."""
        from autofuse.native_kernels.triton.update_numbers import launch_update_numbers

        for i, group in enumerate(self._groups):
            self._tell(i, param_groups[group]["lr"], terms_of(param_groups[group]))
        added = self._added if counts else None
        launch_update_numbers(self.counts, added, self._order, self._options, self._numbers)
        return self._numbers

    def advance(self) -> None:
        """Counts an update of the parameters with gradients."""
        self.counts += self._added

    def _tell(self, group: int, lr: Any, terms: Sequence[Term]) -> None:
        """Stores the options of a group on the device: a learning rate, then its terms."""
        from autofuse.native_kernels.cuda.kernels.put_words import put_words

        is_there = isinstance(lr, Tensor) and lr.device == self.counts.device
        words = words_of(0.0 if is_there else float(lr), terms)
        if words != self._told[group]:
            put_words(self._options[group].view(torch.int64), words)
            self._told[group] = words
        if is_there:
            self._options[group, 0] = lr


def words_of(lr: float, terms: Sequence[Term]) -> bytes:
    """The options of a group as `update_numbers` reads them."""
    values = [lr]
    for term in terms:
        log_beta = math.log(term.beta) if term.beta else -math.inf
        values += [term.constant, term.of_lr, log_beta, term.power, term.first]
    return struct.pack(f"{len(values)}d", *values)


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
