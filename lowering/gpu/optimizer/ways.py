"""reduce_update_gather as a problem: its ways on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import MOST_BYTES, Kernel, Launch, OfOp, Way, only_kernels
from autofuse.lowering.gpu.choice.work import Rows, Work
from autofuse.lowering.update_rules import RULES
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.triton.clipped_update import Clipping, launch_clipped_update
from autofuse.native_kernels.triton.lamb_packets import lamb_packets_needs, launch_lamb_packets
from autofuse.native_kernels.triton.lamb_update import launch_lamb_update
from autofuse.native_kernels.triton.update_exchange import launch_update_exchange
from autofuse.native_kernels.triton.update_launch import KINDS, UpdateConfig, update_needs
from autofuse.native_kernels.triton.update_packet_parts import MOST_BUCKETS, UpdatePacketsConfig
from autofuse.native_kernels.triton.update_packets import launch_update_packets, update_packets_needs
from autofuse.native_kernels.triton.update_parts import LENGTH

OP = "reduce_update_gather"

TORCH_NCCL = "torch+nccl"
"""Name of the way that the kernel replaces: flat copies, collectives, and kernels of torch."""


WITH_CLIPPING = ", clipped"
"""Stands behind the rule in the points of calls that clip gradients."""


@dataclass(frozen=True)
class Kept:
    """The memory that a step keeps until it ends: squares in float64; sums or directions of the elements that
    this rank owns, and a number for each tensor, in float32. All lie in one tensor of float64."""

    squares: int = 0
    owned: int = 0
    tensors: int = 0

    @property
    def words(self) -> int:
        return sum(n // 2 for n in self._floats)

    @property
    def _floats(self) -> tuple[int, int, int]:
        """The numbers of float32 of the three parts, padded so that the next part is aligned."""
        counts = (2 * self.squares, self.owned, self.tensors)
        return tuple(-(-n // 4) * 4 for n in counts)  # type: ignore[return-value]

    def new(self, device: torch.device) -> Tensor:
        return torch.empty(self.words, dtype=torch.float64, device=device)

    def split(self, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        squares, sums, numbers = kept.view(torch.float32).split(self._floats)
        return squares.view(torch.float64), sums, numbers


class OfElements(OfOp):
    """A step of an optimizer. Its size is the number of elements, summed over all tensors."""

    elements: int

    k: ClassVar[int] = 1
    is_whole: ClassVar[bool] = True
    """The time depends little on the lengths of tensors."""
    most_bytes: ClassVar[int] = MOST_BYTES

    @property
    def m(self) -> int:
        return max(1, self.elements)

    def rounded(self) -> None:
        """None: a step changes parameters, so a training cannot try ways. `autofuse bench optimizer` measures
        them."""


@dataclass(frozen=True)
class UpdateProblem(OfElements):
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

    @property
    def n(self) -> int:
        """Bytes of gradient, parameter and states of an element."""
        return sum(dtype.itemsize for dtype in self.dtypes) + 4 * self.states

    def library_ways(self) -> Sequence[Way]:
        return (Way(TORCH_NCCL, lambda problem: (_work("torch", problem),), replaced=True),)

    def kernels(self) -> Sequence[Kernel[UpdateProblem, Any]]:
        if self.world > 8 or not self.elements:
            return ()
        kernel = kernel_of(self.rule, self.clips)
        if self.clips or self.longest > MOST_BUCKETS:
            return (kernel,)
        return (kernel, LAMB_PACKETS if kernel is LAMB else PACKETS)

    def at(self, op: str, m: int, k: int, n: int, world: int) -> UpdateProblem:
        return replace(self, elements=m, world=world)

    @property
    def measured_as(self) -> str:
        return f"{self.op} {self.rule}{WITH_CLIPPING if self.clips else ''}"


def _work(name: str, p: UpdateProblem) -> Work:
    grad, param = (dtype.itemsize for dtype in p.dtypes)
    by_norms = RULES[p.rule].by_norms
    # Sums are kept until their norm is known, and the direction of LAMB until that of its tensor is.
    kept = (8 * (p.states + p.clips + by_norms) + param * by_norms) / p.world
    touched = p.elements * (2 * grad + 2 * param + kept)
    sent = p.elements * (grad + param) * (p.world - 1) / p.world
    model, fused = f"{p.op} {name}", name != "torch"
    # Torch reduces, updates and gathers, one after another. Norms are exchanged before the gather.
    return Rows(model, touched, sent, together=fused, starts=1 if fused else 3 + p.clips + by_norms)


def _packets_work(p: UpdateProblem) -> Work:
    grad, param = (dtype.itemsize for dtype in p.dtypes)
    packets = 2 * 8 * max(p.elements / p.world, LENGTH.value) * (p.world - 1)
    by_norms = RULES[p.rule].by_norms
    touched = p.elements * (2 * grad + 2 * param + (8 * p.states + 16 * by_norms) / p.world)
    model = f"{p.op} {'lamb_packets' if by_norms else 'packets'}"
    return Rows(model, touched + 2 * packets, packets, together=False)


def _configs(problem: UpdateProblem) -> Iterator[UpdateConfig]:
    """Configurations with different numbers of buckets that a multiprocessor loads at a time."""
    yield UpdateConfig()
    yield UpdateConfig(per_sm=3)


def _needs(config: UpdateConfig, problem: UpdateProblem) -> Need:
    grad, param = (dtype.itemsize for dtype in problem.dtypes)
    return update_needs(config, problem.longest, grad, param, problem.world)


def kept_of(
    config: UpdateConfig | UpdatePacketsConfig, problem: UpdateProblem, owned: int, tensors: int
) -> Kept:
    """owned: elements of this rank; tensors: of all ranks."""
    if isinstance(config, UpdatePacketsConfig):
        return Kept()
    if RULES[problem.rule].by_norms:
        return Kept(2 * max(problem.longest, 1), owned, tensors)
    if problem.clips:
        return Kept(max(problem.longest, 1), owned)
    return Kept()


def _launch(launch: Callable[..., None]) -> Callable[..., None]:
    """The `launch` of a kernel's record, given a function that takes the memory first, and the configuration
    behind the operands."""

    def run(at: Launch, config: UpdateConfig | UpdatePacketsConfig, *operands: Any) -> None:
        launch(at.memory, *operands, config, at.site, at.compile_only)

    return run


def _launch_clipped(
    at: Launch, config: UpdateConfig, words: Tensor, buckets: Tensor, rates: Tensor, states: Sequence[Tensor],
    master: Tensor | None, most: int, dtypes: tuple[torch.dtype, torch.dtype], unit: int, rule: int,
    mean: bool, kept: Tensor, sizes: Kept, clipping: Clipping,
) -> None:  # fmt: skip
    squares, sums, _ = sizes.split(kept)
    launch_clipped_update(
        at.memory, words, buckets, rates, states, master, squares, sums, most, dtypes, unit, rule, mean,
        clipping, config, at.site, at.compile_only,
    )  # fmt: skip


def _launch_lamb(
    at: Launch, config: UpdateConfig, words: Tensor, buckets: Tensor, rates: Tensor, states: Sequence[Tensor],
    master: Tensor | None, most: int, dtypes: tuple[torch.dtype, torch.dtype], unit: int, rule: int,
    mean: bool, kept: Tensor, sizes: Kept, clipping: Clipping | None = None,
) -> None:  # fmt: skip
    launch_lamb_update(
        at.memory, words, buckets, rates, states, master, *sizes.split(kept), most, dtypes, unit, mean,
        clipping, config, at.site, at.compile_only,
    )  # fmt: skip


def _launch_lamb_packets(
    at: Launch, config: UpdatePacketsConfig, words: Tensor, buckets: Tensor, rates: Tensor,
    states: Sequence[Tensor], master: Tensor | None, most: int, dtypes: tuple[torch.dtype, torch.dtype],
    unit: int, rule: int, mean: bool,
) -> None:  # fmt: skip
    launch_lamb_packets(
        at.memory, words, buckets, rates, states, master, most, dtypes, unit, mean, config, at.site,
        at.compile_only,
    )  # fmt: skip


def _packets(
    kind: str, needs: Callable[[int, int], Need], launch: Callable[..., None], source: str
) -> Kernel[UpdateProblem, UpdatePacketsConfig]:
    return Kernel(
        kind,
        lambda problem: (UpdatePacketsConfig(),),
        needs=lambda config, problem: needs(problem.longest, problem.world),
        launch=launch,
        only_launches=only_kernels,
        work=lambda config, problem: _packets_work(problem),
        source=f"triton/{source}.py",
    )


def _kernel(
    kind: str, launch: Callable[..., None], source: str, waits: bool = False
) -> Kernel[UpdateProblem, UpdateConfig]:
    """waits: the host may wait for the norm between two kernels."""
    return Kernel(
        kind,
        _configs,
        needs=_needs,
        launch=launch,
        only_launches=lambda config: not waits,
        work=lambda config, problem: _work("kernel", problem),
        source=f"triton/{source}.py",
    )


BUCKETS = _kernel("buckets", _launch(launch_update_exchange), "update_exchange")
PACKETS = _packets("packets", update_packets_needs, _launch(launch_update_packets), "update_packets")
"""The kernel of packets, for the rules and calls that `BUCKETS` runs."""
CLIPPED = _kernel("clipped", _launch_clipped, "clipped_update", waits=True)
LAMB = _kernel("lamb", _launch_lamb, "lamb_update")
LAMB_PACKETS = _packets("lamb_packets", lamb_packets_needs, _launch_lamb_packets, "lamb_packets")
CLIPPED_LAMB = _kernel("lamb_clipped", _launch_lamb, "lamb_update", waits=True)


def kernel_of(rule: str, clips: bool) -> Kernel[UpdateProblem, UpdateConfig]:
    if RULES[rule].by_norms:
        return CLIPPED_LAMB if clips else LAMB
    return CLIPPED if clips else BUCKETS


DTYPES = tuple(KINDS)
"""Dtypes that gradients and parameters may have."""
