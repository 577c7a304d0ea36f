"""Allocates the memory of a group, on all ranks or on none, and frees it.

Memory is freed when larger memory has replaced it, and when its group is destroyed. It is kept as long as a
CUDA graph that was captured with it may be replayed, on this rank or on a peer. The ranks tell each other of
such graphs when they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from autofuse.lowering import torch_internals
from autofuse.lowering.cpu.rendezvous import Declined
from autofuse.lowering.cpu.workspace import SharedMemoryFull
from autofuse.native_kernels.gpu.copy_engine import FIRST_CREDIT, FIRST_PRESENCE
from autofuse.native_kernels.gpu.memory import Need, PeerMemory, Region

from .graphs import Graphs

T = TypeVar("T")

LEAST = Need(
    inbox=16 << 20,
    finished=16 << 20,
    packets=4 << 20,
    words=8 << 20,
    gathers=4 << 20,
    copies=0,
    products=0,
    signals=1 << 18,
    copy_signals=4 * FIRST_CREDIT,
    pieces=1 << 20,
    done=1 << 12,
    outbox=0,
)
"""What a workspace starts with (bytes; elements of pieces and done). Copy signals never grow."""

REGIONS = ("inbox", "finished", "packets", "words", "gathers", "copies", "products", "signals")
LOCAL = {"pieces": torch.float32, "done": torch.int32, "outbox": torch.uint8}

LEAST_BYTES = 16
"""Size of a region that no call has needed yet."""


def least_bytes() -> int:
    """Bytes of a rank's memory before it grows."""
    return sum(size * itemsize_of(name) for name, size in vars(LEAST).items())


MOST_SKIPPED = 1024
"""Calls at most that `Refusals` turns away before all ranks try again."""


@dataclass(eq=False)
class Memory:
    """The memory of a group: the present memory, and older memory that graphs still use."""

    now: PeerMemory
    capacity: Need
    graphs: Graphs = field(default_factory=Graphs)
    before: list[tuple[PeerMemory, Graphs]] = field(default_factory=list)

    @property
    def all(self) -> list[PeerMemory]:
        return [self.now, *(memory for memory, _ in self.before)]

    def replace(self, memory: PeerMemory, capacity: Need, keep: bool) -> None:
        """Makes `memory` the present memory. keep: whether a graph that uses the memory before it lives, on
        this rank or another one."""
        if keep:
            self.before.append((self.now, self.graphs))
            self.graphs = Graphs()
        self.now, self.capacity = memory, capacity
        self.give_back()

    def give_back(self) -> None:
        """Drops older memory that no graph uses any more."""
        self.before = [(memory, graphs) for memory, graphs in self.before if graphs.any]

    def outgrown(self) -> dict[str, int]:
        """Bytes by part of the memory that was replaced and is still kept."""
        self.give_back()
        parts = {id(part): None for part in _parts(self.now).values()}
        found: dict[str, int] = {}
        for memory, _ in self.before:
            for name, part in _parts(memory).items():
                if id(part) not in parts:
                    parts[id(part)] = None
                    found[name] = found.get(name, 0) + _bytes_of(part)
        return found

    def end(self) -> None:
        """The group is gone: only graphs keep its memory."""
        _without_group.extend([*self.before, (self.now, self.graphs)])
        if not torch.cuda.is_current_stream_capturing():
            give_back()


def allocate(
    old: Memory | None, capacity: Need, group: ProcessGroup, device: torch.device,
    meet: Callable[[str], list[str]],
) -> tuple[dict[str, Region], dict[str, Tensor], bool]:  # fmt: skip
    """Regions and local tensors of `capacity`, which all ranks allocate together, and whether a graph on some
    rank still uses the old ones.

    Parts that are large enough stay. New memory is 0, except for credits. If a rank has no room, all ranks
    raise SharedMemoryFull, and nothing has changed.
    """
    give_back()
    torch.cuda.synchronize(device)
    have = None if old is None else old.now
    made, problem = _own(have, capacity, group.size(), device)
    torch.cuda.synchronize(device)
    used = old is not None and old.graphs.any
    told = [each.split("|", 1) for each in meet(f"{int(used)}|{problem}")]  # all have cleared theirs
    for r, (_, why) in enumerate(told):
        if why:
            made.clear()
            raise SharedMemoryFull(
                f"rank {r} of group {group.group_name} has no room on its GPU for memory of the group: {why}"
            )
    regions: dict[str, Region] = {} if have is None else {name: getattr(have, name) for name in REGIONS}
    regions |= {} if have is None else {"copy_signals": have.copy_signals}
    local: dict[str, Tensor] = {} if have is None else {name: getattr(have, name) for name in LOCAL}
    if old is None:
        _try_to_map(made["signals"], group, meet)
    for name, own in made.items():
        if name in LOCAL:
            local[name] = own
        else:
            regions[name] = Region.of(torch_internals.symmetric_views(own, group))
    return regions, local, any(int(graphs) for graphs, _ in told)


def apart(device: torch.device, work: Callable[[], T]) -> T:
    """`work()` in a thread of its own, which allocates tensors that outlive the call.

    A tensor that is made in inference mode cannot be written outside of that mode, and the mode belongs to a
    thread. While Inductor's CUDA graphs warm up, they claim all memory that the calling thread allocates, and
    fail if it is not freed. The new thread has the settings of the calling thread.
    """

    def on_device() -> T:
        with torch.cuda.device(device):
            done = work()
            torch.cuda.synchronize(device)  # the streams of the caller do not wait for those of this thread
        return done

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copy_context().run, on_device).result()


def _try_to_map(own: Tensor, group: ProcessGroup, meet: Callable[[str], list[str]]) -> None:
    """Raises Declined on all ranks if torch's symmetric memory does not work on one of them, as in some
    containers and on GPUs that it does not know."""
    problem = ""
    try:
        torch_internals.symmetric_views(own, group)
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
    for r, told in enumerate(meet(problem)):
        if told:
            raise Declined(f"rank {r}: torch's symmetric memory cannot map the GPUs of its peers: {told}")


def _own(
    have: PeerMemory | None, capacity: Need, world: int, device: torch.device
) -> tuple[dict[str, Tensor], str]:
    """The new parts of this rank's memory; without room no parts, and the reason."""
    missing = _missing(have, capacity)
    total = sum(size * itemsize_of(name) for name, size in missing.items())
    problem = ""
    for _ in range(2):
        made: dict[str, Tensor] = {}
        try:
            for name, size in missing.items():
                if name in LOCAL:
                    made[name] = torch.zeros(size, dtype=LOCAL[name], device=device)
                else:
                    made[name] = torch_internals.symmetric_empty(size, torch.uint8, device).zero_()
            if have is None:
                signals = 4 * (FIRST_PRESENCE + world)
                own = torch_internals.symmetric_empty(signals, torch.uint8, device).zero_()
                own.view(torch.int32)[FIRST_CREDIT : FIRST_CREDIT + world] = 1
                made["copy_signals"] = own
            return made, ""
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            said = str(error).partition("\n")[0]
            problem = f"{total} bytes, out of memory" if "out of memory" in said.lower() else said
        made.clear()
        torch.cuda.empty_cache()  # torch keeps what it has freed, and symmetric memory is not made of that
    return {}, problem


def _missing(have: PeerMemory | None, capacity: Need) -> dict[str, int]:
    """The number of elements of each region and local tensor that has to be allocated."""

    def elements(name: str) -> int:
        if have is None:
            return 0
        held = getattr(have, name)
        return int(held.views[0].numel() if isinstance(held, Region) else held.numel())

    sizes = {name: max(getattr(capacity, name), LEAST_BYTES) for name in (*REGIONS, *LOCAL)}
    return {name: size for name, size in sizes.items() if elements(name) < size}


def _parts(memory: PeerMemory) -> dict[str, Region | Tensor]:
    return {name: getattr(memory, name) for name in (*REGIONS, "copy_signals", *LOCAL)}


def _bytes_of(part: Region | Tensor) -> int:
    own = part.views[0] if isinstance(part, Region) else part
    return own.numel() * own.element_size()


def sizes_of(memory: PeerMemory) -> dict[str, int]:
    """Bytes of each part of one rank's memory."""
    return {name: _bytes_of(part) for name, part in _parts(memory).items()}


def itemsize_of(name: str) -> int:
    """Bytes of one of the elements in which `Need` counts a part."""
    return LOCAL.get(name, torch.uint8).itemsize


class Refusals:
    """Allocations that found no room, and when all ranks try again: after 1, 2, 4, ... calls. All ranks count
    the same calls."""

    def __init__(self) -> None:
        self._refused: dict[Hashable, tuple[SharedMemoryFull, int, int]] = {}

    def check(self, key: Hashable) -> None:
        """Raises SharedMemoryFull while it is not time to try again."""
        error, wait, left = self._refused.get(key, (None, 0, 0))
        if error is not None and left:
            self._refused[key] = error, wait, left - 1
            raise error

    def note(self, key: Hashable, error: SharedMemoryFull) -> None:
        wait = min(2 * self._refused[key][1], MOST_SKIPPED) if key in self._refused else 1
        self._refused[key] = error.with_traceback(None), wait, wait

    def forget(self, key: Hashable) -> None:
        self._refused.pop(key, None)


def give_back() -> None:
    """Frees the memory of destroyed groups that no graph uses any more.

    Freeing synchronises: not to be called while this thread captures a graph."""
    _without_group[:] = [(memory, graphs) for memory, graphs in _without_group if graphs.any]


_without_group: list[tuple[PeerMemory, Graphs]] = []
"""Memory of destroyed groups that graphs may still use."""
