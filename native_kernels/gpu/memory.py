"""What the launchers take: memory of a group, mapped by all its ranks, and how much of it a call needs."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .state import State

SHARED_MEMORY = 227 * 1024
"""Bytes that a block may have."""

EVENTS = 512
"""Events that a trace has room for, a program."""

LONGEST_ROW = 1 << 20
"""Most bytes of a row in `inbox`: halves begin with whole rows, up to this is unused at a half's end."""


@dataclass(frozen=True)
class Region:
    """The same number of bytes on every rank. `views[r]`: those of rank r, uint8, as this rank maps them.

    `addresses`: where they begin, int64 [W], on the device.
    """

    views: tuple[Tensor, ...]
    addresses: Tensor

    @classmethod
    def of(cls, views: Sequence[Tensor]) -> "Region":
        addresses = torch.tensor([v.data_ptr() for v in views], dtype=torch.int64)
        return cls(tuple(views), addresses.to(views[0].device))

    def half(self, dtype: torch.dtype) -> int:
        """Elements in one of the two halves that calls use by turns, whatever their sizes."""
        return self.views[0].numel() // 2 // dtype.itemsize

    def matrix(self, rank: int, dtype: torch.dtype, offset: int, rows: int, cols: int) -> Tensor:
        """`[rows, cols]` of the memory of a rank, from element `offset` on."""
        return self.views[rank].view(dtype)[offset : offset + rows * cols].view(rows, cols)


@dataclass(frozen=True)
class Need:
    """Bytes of each region, and elements of local memory, that a call uses."""

    inbox: int = 0
    finished: int = 0
    packets: int = 0
    words: int = 0
    gathers: int = 0
    copies: int = 0
    signals: int = 0
    copy_signals: int = 0
    pieces: int = 0
    done: int = 0
    outbox: int = 0

    def __or__(self, other: "Need") -> "Need":
        """Enough for either."""
        return Need(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    def fits(self, capacity: "Need") -> bool:
        return self | capacity == capacity


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """Memory and counters of one group on one device; all counters and packets are 0 before the first call.

    inbox: tiles and parts on their way, two halves; finished: sums on their way, two halves; packets: int64,
    two halves, never used for anything else; words: as words.cuh has them, two halves, 0 between calls;
    gathers: as gather_words.cu has it;
    copies: what copy engines store, one half; signals: int32 counters; copy_signals: those of `copies`, and a
    word of credit a peer, 1 at first. state, record: words that `state.py` names; pieces: fp32, done: int32,
    0 between calls, outbox: what copy engines take, bytes; these are local; programs: how many run at once;
    clusters: how many of 1, 2, 4 and 8 blocks run at once on every rank, for kernels in CUDA C++.
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
    signals: Region
    copy_signals: Region
    state: Tensor
    record: Tensor
    pieces: Tensor
    done: Tensor
    outbox: Tensor
    clusters: tuple[int, ...] = ()

    @property
    def epoch(self) -> Tensor:
        """The number of the last call, int64 [1], on the device, which alone counts calls."""
        return self.state[State.EPOCH : State.EPOCH + 1]


def describe(matrix: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """How TMA loads and stores blocks of a row-major matrix."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


def describe_weight(w: Tensor, bk: int, bn: int) -> tuple[TensorDescriptor, bool]:
    """Blocks of `w: [K, N]`, which may be the transpose of a row-major matrix; whether it is."""
    if w.stride(1) == 1:
        return describe(w, bk, bn), False
    return describe(w.t(), bn, bk), True


def is_tma(*matrices: Tensor) -> bool:
    """Whether TMA can load them: one stride 1, the other and the start multiples of 16 bytes.

    Asked of the offset in the storage, which is the same on all ranks; storages begin at such addresses.
    """
    return all(
        t.storage_offset() * t.element_size() % 16 == 0
        and (
            (t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0)
            or (t.stride(0) == 1 and t.stride(1) * t.element_size() % 16 == 0)
        )
        for t in matrices
    )


def launch(kernel: Any, programs: int, compile_only: bool, *args: Any, **settings: Any) -> None:
    """Start `programs` programs that may wait for each other; or only compile, so that no rank is late.

    A kernel that has run with arguments of this kind starts without asking Triton again what to compile,
    which takes longer than many a call. `settings` has the constants.
    """
    if compile_only:
        kernel.warmup(*args, grid=(programs,), launch_cooperative_grid=True, **settings)
        return
    key = (id(kernel), programs, *map(_kind, args), *settings.values())
    found = _launched.get(key)
    if found is None:
        _launched[key] = kernel[(programs,)](*args, launch_cooperative_grid=True, **settings)
        return
    constants = [settings[p.name] for p in kernel.params[len(args) :]]
    found[(programs, 1, 1)](*args, *constants)


_launched: dict[Hashable, Any] = {}


def _kind(arg: Any) -> Hashable:
    """What Triton specialises a kernel to, and where it has loaded it."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.device, arg.data_ptr() % 16
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, tuple(arg.block_shape)
    return arg


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
