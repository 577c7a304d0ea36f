"""Kernels as records, and the ways to run a call that follow from these records.

The record of a kernel has everything that differs from kernel to kernel. The code that chooses, measures,
names and calls ways reads the record, and is the same for all kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from autofuse.native_kernels.gpu.copy_engine import FIRST_CREDIT, CopyEngine
from autofuse.native_kernels.gpu.memory import Need, PeerMemory

from .sources import digest_of, libraries
from .work import Work

P = TypeVar("P")
C = TypeVar("C")

DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of the operands that kernels multiply."""

ORDERS = {"direct": 0, "ring": 1, "oblivious": 2}
"""Orders of the tiles, as kernels number them."""

CUBLAS_NCCL = "cublas+nccl"
"""Name of the way that the ops of matmuls replace."""

MOST_BYTES = 1 << 30
"""A way that needs a larger region than this is left out, unless `Problem.most_bytes` says otherwise."""


class Problem(Hashable, Protocol):
    """A call as the choice of a way sees it: a frozen dataclass. Equal problems take the same way on all
    ranks.

    op, m, k, n, world: by these a measured point is found.
    """

    @property
    def op(self) -> str: ...
    @property
    def m(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def world(self) -> int: ...

    is_whole: ClassVar[bool]
    """Whether it has all sizes that its time depends on. If not, only comparisons of ways mean something."""

    most_bytes: ClassVar[int]
    """A way that needs a larger region than this is left out."""

    def library_ways(self) -> Sequence[Way]:
        """Ways without a kernel of ours; one of them is what the op replaces."""

    def kernels(self) -> Sequence[Kernel[Any, Any]]:
        """The kernels that may run this problem; none where no kernel takes its sizes, dtype or layout."""

    def at(self, op: str, m: int, k: int, n: int, world: int) -> Problem:
        """A problem like this one, of the sizes at which a point was measured. op: `Point.op`."""

    @property
    def measured_as(self) -> str:
        """The name that measured points of this problem have in place of the op. The time of a call depends
        on how its operands are cut, so calls that are cut in another way have another name."""

    def is_kin(self, op: str) -> bool:
        """Whether points that are measured as `op` also tell something about this problem."""

    def rounded(self) -> Problem | None:
        """The problem that `AUTOFUSE_MEASURE` measures in place of this one; None if it measures nothing."""


class OfOp:
    """A problem whose time may be predicted from the points of every plain call of the same op."""

    def is_kin(self: Problem, op: str) -> bool:
        return op == self.op


class Launch(NamedTuple):
    """The arguments that every launch gets besides operands and configuration.

    site: number of the call site, for failure records; compile_only: compile, but do not launch.
    """

    memory: PeerMemory
    engine: CopyEngine
    site: int
    trace: Tensor | None
    compile_only: bool


def _never(config: Any) -> bool:
    return False


def _always(config: Any, problem: Any) -> bool:
    return True


def only_kernels(config: Any) -> bool:
    """The `only_launches` of kernels that do nothing else in any configuration."""
    return True


@dataclass(frozen=True, eq=False)
class Kernel(Generic[P, C]):
    """A GPU kernel: problems of type P, configurations of type C (frozen dataclasses with defaults)."""

    kind: str
    """First word in the names of its ways."""
    configs: Callable[[P], Iterable[C]]
    """Configurations that are worth measuring for a problem."""
    needs: Callable[[C, P], Need]
    """The memory of a call. Regions of dropless experts are not in it: their sizes depend on the number of
    rows, which is known only in the call."""
    launch: Callable[..., Any]
    """`launch(Launch, configuration, ...)`; all kernels of an op take the same operands."""
    work: Callable[[C, P], Work]
    """The work of a configuration for a problem, in sizes. The model predicts its time from them."""
    source: str
    """File of the kernel, under native_kernels. A measured time holds for one version of this file."""
    fits: Callable[[C, P], bool] = _always
    """Whether a configuration can run a problem, if there is enough memory."""
    is_copied: Callable[[C], bool] = _never
    """Whether copy engines move the data between ranks."""
    only_launches: Callable[[C], bool] = _never
    """Whether `launch` gives the driver kernels and commands of copy engines and nothing else, with the same
    parameters in each call but for the addresses of its operands."""
    takes_product: bool = False
    """Whether cuBLAS multiplies before the kernel: `launch` gets the product in place of `x`, and an empty
    `w`."""
    adds: bool = False
    """Whether the kernel can add a matrix to the sums that it stores: the first stage of most tails."""
    is_update: Callable[[C], bool] = _never
    """Whether tiles are added at their owners in the order of their arrival. Such a way runs only where the
    user asks for it (`config.update`)."""


@dataclass(frozen=True)
class Way:
    """One way to run a problem: a kernel in one configuration, or calls of libraries.

    name: equal on all ranks and in all files of measured points; work: the work that it does for a problem;
    need: memory of a call; replaced: whether the way is the computation that the op replaces.
    """

    name: str
    work: Callable[[Any], Sequence[Work]]
    kernel: Kernel[Any, Any] | None = None
    config: Any = None
    need: Need = field(default_factory=Need)
    replaced: bool = False
    by_streams: bool = False
    """A library's pipeline over several streams, such as torch's async TP."""

    @property
    def fused(self) -> bool:
        return self.kernel is not None

    @property
    def source(self) -> str:
        """Digest of the kernel's source, or versions of the libraries: a measured time holds for these."""
        return libraries() if self.kernel is None else digest_of(self.kernel.source)

    @property
    def is_copied(self) -> bool:
        return self.kernel is not None and self.kernel.is_copied(self.config)

    @property
    def is_update(self) -> bool:
        return self.kernel is not None and self.kernel.is_update(self.config)


@lru_cache(maxsize=4096)
def ways_of(problem: Problem) -> Mapping[str, Way]:
    """All ways that can run a problem, by name.

    They depend on nothing but the problem, so that all ranks find the same ways.
    """
    found = {way.name: way for way in problem.library_ways()}
    for kernel in problem.kernels():
        for config in kernel.configs(problem):
            need = kernel.needs(config, problem)
            if _has_room(need, problem) and kernel.fits(config, problem):
                name = settings_of(kernel.kind, config)
                found[name] = Way(name, _work_of(kernel, config), kernel, config, need)
    return found


def _work_of(kernel: Kernel[Any, Any], config: Any) -> Callable[[Any], Sequence[Work]]:
    return lambda problem: (kernel.work(config, problem),)


def replaced(problem: Problem) -> Way:
    """The way that computes as torch does without the op."""
    return next(way for way in ways_of(problem).values() if way.replaced)


def fused_ways(problem: Problem) -> list[str]:
    """Names of the ways that are kernels."""
    return [name for name, way in ways_of(problem).items() if way.fused]


def settings_of(kind: str, config: Any) -> str:
    """`kind`, and every setting of a dataclass that differs from its default."""
    parts = [kind]
    for f in fields(config):
        value, default = getattr(config, f.name), f.default
        assert default is not MISSING
        if value != default:
            parts.append(f"{f.name}={value:d}" if isinstance(value, bool) else f"{f.name}={value}")
    return " ".join(parts)


def _has_room(need: Need, problem: Problem) -> bool:
    sizes = vars(need) | {"pieces": 4 * need.pieces}
    return max(sizes.values()) <= problem.most_bytes and need.copy_signals <= 4 * FIRST_CREDIT
