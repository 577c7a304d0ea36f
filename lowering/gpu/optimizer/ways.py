"""reduce_update_gather as a problem: its ways on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import MOST_BYTES, Kernel, Launch, Way, only_kernels
from autofuse.lowering.gpu.choice.work import Rows, Work
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.triton.update_exchange import (
    KINDS,
    UpdateConfig,
    launch_update_exchange,
    update_needs,
)

OP = "reduce_update_gather"

TORCH_NCCL = "torch+nccl"
"""What the kernel replaces: flat copies, collectives, and kernels of torch."""


@dataclass(frozen=True)
class UpdateProblem:
    """A call. elements: of all tensors; longest: most buckets that a rank owns; dtypes: of gradients, and of
    parameters; states: flat tensors of float32 that it changes; programs: multiprocessors."""

    elements: int
    longest: int
    rule: str
    dtypes: tuple[torch.dtype, torch.dtype]
    states: int
    world: int
    programs: int = 132
    op: str = OP

    k: ClassVar[int] = 1
    is_whole: ClassVar[bool] = False
    """The lengths of tensors count, too."""
    most_bytes: ClassVar[int] = MOST_BYTES

    @property
    def m(self) -> int:
        return max(1, self.elements)

    @property
    def n(self) -> int:
        """Bytes of gradient, parameter and states of an element."""
        return sum(dtype.itemsize for dtype in self.dtypes) + 4 * self.states

    def library_ways(self) -> Sequence[Way]:
        return (Way(TORCH_NCCL, lambda problem: (_work("torch", problem),), replaced=True),)

    def kernels(self) -> Sequence[Kernel[UpdateProblem, Any]]:
        return (BUCKETS,) if self.world <= 8 and self.elements else ()

    def at(self, m: int, k: int, n: int, world: int) -> UpdateProblem:
        return replace(self, elements=m, world=world)

    @property
    def measured_as(self) -> str:
        return f"{self.op} {self.rule}"

    def rounded(self) -> None:
        """A step changes parameters, so that no training tries the ways. `autofuse bench optimizer` does."""


def _work(name: str, p: UpdateProblem) -> Work:
    grad, param = (dtype.itemsize for dtype in p.dtypes)
    touched = p.elements * (2 * grad + 2 * param + 8 * p.states / p.world)
    sent = p.elements * (grad + param) * (p.world - 1) / p.world
    return Rows(f"{p.op} {name}", touched, sent, False)


def _configs(problem: UpdateProblem) -> Iterator[UpdateConfig]:
    """Differ in how much is on its way in a multiprocessor."""
    yield UpdateConfig()
    yield UpdateConfig(group=2, per_sm=3)


def _needs(config: UpdateConfig, problem: UpdateProblem) -> Need:
    grad, param = (dtype.itemsize for dtype in problem.dtypes)
    return update_needs(config, problem.longest, grad, param, problem.world)


def _launch(
    at: Launch, config: UpdateConfig, words: Tensor, buckets: Tensor, rates: Tensor, states: Sequence[Tensor],
    master: Tensor | None, most: int, dtypes: tuple[torch.dtype, torch.dtype], unit: int, rule: int,
    mean: bool,
) -> None:  # fmt: skip
    launch_update_exchange(
        at.memory, words, buckets, rates, states, master, most, dtypes, unit, rule, mean, config, at.site,
        at.compile_only,
    )  # fmt: skip


BUCKETS: Kernel[UpdateProblem, UpdateConfig] = Kernel(
    "buckets",
    _configs,
    needs=_needs,
    launch=_launch,
    only_launches=only_kernels,
    work=lambda config, problem: _work("kernel", problem),
    source="triton/update_exchange.py",
)

DTYPES = tuple(KINDS)
"""That gradients and parameters may have."""
