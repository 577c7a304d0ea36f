"""reduce_update_gather as a problem: its ways on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import MOST_BYTES, Kernel, Launch, Way, only_kernels
from autofuse.lowering.gpu.choice.work import Rows, Work
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.triton.clipped_update import launch_clipped_update, squares_of
from autofuse.native_kernels.triton.update_exchange import (
    KINDS,
    UpdateConfig,
    launch_update_exchange,
    update_needs,
)

OP = "reduce_update_gather"

TORCH_NCCL = "torch+nccl"
"""What the kernel replaces: flat copies, collectives, and kernels of torch."""


WITH_CLIPPING = ", clipped"
"""What points of such calls have behind the rule."""


class Clipping(NamedTuple):
    """What a call has that clips. owned: elements of this rank; norm: where the norm of all gradients is
    stored; max_norm: 0 clips nothing; check: called once the norm has been computed, before any parameter
    changes."""

    owned: int
    norm: Tensor
    max_norm: float
    check: Callable[[], None]


@dataclass(frozen=True)
class UpdateProblem:
    """A call. elements: of all tensors; longest: most buckets that a rank owns; dtypes: of gradients, and of
    parameters; states: flat tensors of float32 that it changes; programs: multiprocessors; clips: the norm of
    all gradients is known before any parameter changes."""

    elements: int
    longest: int
    rule: str
    dtypes: tuple[torch.dtype, torch.dtype]
    states: int
    world: int
    programs: int = 132
    op: str = OP
    clips: bool = False

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
        if self.world > 8 or not self.elements:
            return ()
        return (CLIPPED,) if self.clips else (BUCKETS,)

    def at(self, op: str, m: int, k: int, n: int, world: int) -> UpdateProblem:
        return replace(self, elements=m, world=world)

    @property
    def measured_as(self) -> str:
        return f"{self.op} {self.rule}{WITH_CLIPPING if self.clips else ''}"

    def rounded(self) -> None:
        """A step changes parameters, so that no training tries the ways. `autofuse bench optimizer` does."""


def _work(name: str, p: UpdateProblem) -> Work:
    grad, param = (dtype.itemsize for dtype in p.dtypes)
    kept = 8 * (p.states + p.clips) / p.world  # sums are kept until their norm is known
    touched = p.elements * (2 * grad + 2 * param + kept)
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


def _launch_clipped(
    at: Launch, config: UpdateConfig, words: Tensor, buckets: Tensor, rates: Tensor, states: Sequence[Tensor],
    master: Tensor | None, most: int, dtypes: tuple[torch.dtype, torch.dtype], unit: int, rule: int,
    mean: bool, clipping: Clipping,
) -> None:  # fmt: skip
    owned, device = clipping.owned, words.device
    sums = torch.empty(owned, dtype=torch.float32, device=device)
    count = squares_of(config, most, at.memory.world)
    squares = torch.empty(count, dtype=torch.float64, device=device)
    launch_clipped_update(
        at.memory, words, buckets, rates, states, master, sums, squares, clipping.norm, most, dtypes, unit,
        rule, mean, clipping.max_norm, clipping.check, config, at.site, at.compile_only,
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

CLIPPED: Kernel[UpdateProblem, UpdateConfig] = Kernel(
    "clipped",
    _configs,
    needs=_needs,
    launch=_launch_clipped,
    work=lambda config, problem: _work("kernel", problem),
    source="triton/clipped_update.py",
)

DTYPES = tuple(KINDS)
"""That gradients and parameters may have."""
