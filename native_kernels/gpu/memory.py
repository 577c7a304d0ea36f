"""The memory that all ranks of a group map, the amount that a call needs, and launches of Triton kernels."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .dependent import is_dependent
from .prepared import record
from .state import MOST_SHARES, MOST_TERMS, STATE_LENGTH, STATE_WORDS, State
from .triton_launch import launched

SHARED_MEMORY = 227 * 1024
"""Bytes that a block may have."""

EVENTS = 512
"""Events of one program that a trace has room for."""

FIRST_CREDIT = 8192
"""Index of the first of W credits in `copy_signals`; the flags of copies lie before."""

FIRST_PRESENCE = FIRST_CREDIT + 8
"""Index of the first of W words of presence in `copy_signals`."""

COPIED = torch.complex128
"""A type of 16 bytes. index_select copies one element a thread; with elements of 2 bytes it takes three times
as long."""

LONGEST_ROW = 1 << 20
"""Most bytes of a row in `inbox`. A second half that begins with a whole row begins up to as many later."""


@dataclass(frozen=True)
class Region:
    """Memory of the same size on every rank.

    views[r]: the memory of rank r as this rank maps it, uint8; addresses: where the views begin, int64 [W],
    on the device.
    """

    views: tuple[Tensor, ...]
    addresses: Tensor

    @classmethod
    def of(cls, views: Sequence[Tensor]) -> "Region":
        addresses = torch.tensor([v.data_ptr() for v in views], dtype=torch.int64)
        return cls(tuple(views), addresses.to(views[0].device))

    def half(self, dtype: torch.dtype, row: int = 1) -> int:
        """The number of elements before the second half, a multiple of `row`. Calls use the halves in turn.

        The first half ends in the middle of the region, whatever `row` is. The second half begins there, or
        less than a row later. So calls with other rows that use the other half share no byte with it.
        """
        middle = self.views[0].numel() // 2 // dtype.itemsize
        return cdiv(middle, row) * row

    def matrix(self, rank: int, dtype: torch.dtype, offset: int, rows: int, cols: int) -> Tensor:
        """`[rows, cols]` of the memory of a rank, from element `offset` on."""
        return self.views[rank].view(dtype)[offset : offset + rows * cols].view(rows, cols)


@dataclass(frozen=True)
class Need:
    """Memory that a call needs in each field of `PeerMemory`: bytes of regions, elements of local memory."""

    inbox: int = 0
    finished: int = 0
    packets: int = 0
    words: int = 0
    gathers: int = 0
    copies: int = 0
    products: int = 0
    signals: int = 0
    copy_signals: int = 0
    pieces: int = 0
    done: int = 0
    outbox: int = 0

    def __or__(self, other: "Need") -> "Need":
        """Memory that is enough for each of the two."""
        return Need(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    def fits(self, capacity: "Need") -> bool:
        return self | capacity == capacity


def grown(need: Need) -> Need:
    """The size of the memory that is allocated for `need`. Sizes differ by at most a quarter, so that memory
    seldom grows."""
    return Need(*(_step(getattr(need, f.name)) for f in fields(need)))


def _step(size: int) -> int:
    """The next of 4, 5, 6, 7, 8, 10, ... KiB; 0 stays 0. Halves of such regions begin at multiples of 512."""
    if not size:
        return 0
    step = max(1024, 1 << max(0, (size - 1).bit_length() - 3))
    return max(4096, cdiv(size, step) * step)


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """Memory and counters of one group on one device, as this rank has them.

    Regions that all ranks map; counters, packets and words are 0 before the first call:
        inbox         tiles and parts from peers, two halves
        finished      sums from peers, two halves
        packets       payload and epoch, int64, two halves; never used for anything else
        words         flag-in-payload (`include/words.cuh`), two halves, 0 between calls
        gathers       flag-in-payload that many blocks read (`gather_words.cu`), three thirds
        copies        what copy engines of peers store, one half
        products      products that torch's kernels add up over the ranks, one half; never used for anything
                      else: they are read behind the last barrier of such a kernel, when a peer may be in the
                      next call
        signals       counters, int32, two halves
        copy_signals  flags that copy engines raise for `copies`; then of every peer a credit, 1 at first;
                      then of every peer its presence: the number of the last call that it has started
    Local memory, the same on no other rank:
        state, record the words that `gpu/state.py` names (`new_state`)
        pieces        partial sums, fp32
        done          counters, int32, 0 between calls
        outbox        bytes that copy engines send
    programs: how many programs run at once; clusters: how many clusters of 1, 2, 4 and 8 blocks run at once
    on every rank, for kernels in CUDA C++.
    """

    rank: int
    world: int
    programs: int
    inbox: Region
    finished: Region
    packets: Region
    words: Region
    gathers: Region
    copies: Region
    products: Region
    signals: Region
    copy_signals: Region
    state: Tensor
    record: Tensor
    pieces: Tensor
    done: Tensor
    outbox: Tensor
    clusters: tuple[int, ...] = ()
    prepared: dict[Callable[..., Any], dict[Hashable, Any]] = field(default_factory=dict, init=False)
    """The results that `per_memory` keeps."""

    def clear(self) -> None:
        """Puts this rank's memory into its first state. No peer may use it meanwhile."""
        for region in (self.packets, self.words, self.gathers, self.signals, self.copy_signals):
            region.views[self.rank].zero_()
        self.copy_signals.views[self.rank].view(torch.int32)[FIRST_CREDIT : FIRST_CREDIT + self.world] = 1
        self.done.zero_()
        self.state[STATE_WORDS:].zero_()
        self.state[State.GIVEN_UP : State.FIRM] = 0

    @property
    def epoch(self) -> Tensor:
        """The number of the last call, int64 [1], on the device, which alone counts calls."""
        return self.state[State.EPOCH : State.EPOCH + 1]

    def received(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A copy of the beginning of the half of this rank's inbox that the last call used. The size is a
        multiple of 16 bytes."""
        count = prod(shape) * dtype.itemsize // COPIED.itemsize
        halves = self.inbox.views[self.rank].view(COPIED).as_strided((2, count), (self.inbox.half(COPIED), 1))
        return halves.index_select(0, self.epoch % 2).view(dtype).view(shape)

    @property
    def claims(self) -> Tensor:
        """int32 [2, MOST_SHARES]: which shares programs have claimed, 0 between calls."""
        return self.state[STATE_WORDS:].view(torch.int32)[: 2 * MOST_SHARES].view(2, MOST_SHARES)


F = TypeVar("F", bound=Callable[..., Any])

MOST_PREPARED = 1024


def per_memory(prepare: F) -> F:
    """A decorator that calls `prepare(memory, *hashable)` once for equal arguments, and keeps the result as
    long as the memory."""

    @wraps(prepare)
    def found(memory: PeerMemory, *key: Hashable) -> Any:
        kept = memory.prepared.setdefault(prepare, {})
        if key not in kept:
            if len(kept) == MOST_PREPARED:
                kept.clear()
            kept[key] = prepare(memory, *key)
        return kept[key]

    return found  # type: ignore[return-value]


def new_state(record: Tensor, presence: Sequence[Tensor], firm: int, device: torch.device) -> Tensor:
    """`PeerMemory.state` before the first call; the limit of waits is not set yet.

    record: in memory that kernels and the host can access; presence: int32 [W] of every rank, as this rank
    maps it; firm: how many programs wait for peers that have not started a call.
    """
    state = torch.zeros(STATE_LENGTH, dtype=torch.int64)
    state[State.RECORD], state[State.FIRM] = record.data_ptr(), firm
    for r, words in enumerate(presence):
        state[State.PRESENCE + r] = words.data_ptr()
    return state.to(device)


def describe(matrix: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """The descriptor by which TMA loads and stores blocks of a row-major matrix."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def describe_weight(w: Tensor, bk: int, bn: int) -> tuple[TensorDescriptor, bool]:
    """The descriptor of blocks of `w: [K, N]`, and whether `w` is the transpose of a row-major matrix."""
    if w.stride(1) == 1:
        return describe(w, bk, bn), False
    return describe(w.t(), bn, bk), True


def describe_terms(
    x: Sequence[Tensor], w: Sequence[Tensor], bm: int, bk: int, bn: int
) -> tuple[list[TensorDescriptor | None], list[int | None], bool]:
    """The arguments of kernels for a sum of `x[i] @ w[i]`: descriptors of x[0], w[0], x[1], ...; the length K
    of each term; whether the weights are transposed, which is equal for all. Both lists have None for terms
    up to MOST_TERMS that the sum does not have."""
    found: list[TensorDescriptor | None] = []
    for xi, wi in zip(x, w, strict=True):
        weight, transposed = describe_weight(wi, bk, bn)
        found += [describe(xi, bm, bk), weight]
    none = [None] * (MOST_TERMS - len(x))
    return [*found, *none, *none], [*(xi.shape[1] for xi in x), *none], transposed


def is_tma(*matrices: Tensor) -> bool:
    """Whether TMA can load the matrices: one stride is 1, the other and the start are multiples of 16 bytes,
    and no two elements share memory.

    The start is the offset in the storage, so that all ranks agree; storages begin at such addresses.
    """
    return all(
        t.storage_offset() * t.element_size() % 16 == 0 and (_are_lines(t, 0, 1) or _are_lines(t, 1, 0))
        for t in matrices
    )


def _are_lines(t: Tensor, outer: int, inner: int) -> bool:
    step = t.stride(outer)
    apart = step >= t.shape[inner] or t.shape[outer] == 1
    return t.stride(inner) == 1 and step * t.element_size() % 16 == 0 and apart


def launch(kernel: Any, programs: int, compile_only: bool, *args: Any, **settings: Any) -> None:
    """Start `programs` programs of a Triton kernel. The kernel must not rely on all of them running at once.

    compile_only: compile, and start nothing. settings: the constants. A kernel that has run with arguments of
    the same kind starts without Triton's dispatch, which takes longer than a small call.
    """
    assert programs <= MOST_SHARES, f"{programs} programs"
    if is_dependent():
        settings["launch_pdl"] = True  # Triton compiles another variant for that
    if compile_only:
        kernel.warmup(*args, grid=(programs,), **settings)
        return
    key = (id(kernel), programs, *map(_kind, args), *settings.values())
    found = _launched.get(key)
    if found is None:
        found = _launched[key] = kernel[(programs,)](*args, **settings)
    else:
        constants = [settings[p.name] for p in kernel.params[len(args) :]]
        found[(programs, 1, 1)](*args, *constants)
    record(lambda: launched(found, programs, args))


_launched: dict[Hashable, Any] = {}


def _kind(arg: Any) -> Hashable:
    """The properties of an argument that Triton specialises a kernel to, and its device."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.device, arg.data_ptr() % 16
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, tuple(arg.block_shape)
    return arg


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
