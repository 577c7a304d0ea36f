"""Memory that the GPUs of one group map, and the rules of its use: who makes it, how it grows, what fails.

Made when a group first needs it, by all its ranks together; grown in steps when a call needs more, never
while a CUDA graph is captured (`allocation.py`). Fused calls of one device run one after another, whatever
their groups and streams: kernels that wait for peers must not run two at once.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from autofuse import config
from autofuse.lowering.cpu.rendezvous import (
    Declined,
    NotShared,
    all_gather,
    host_identity,
    sources_digest,
)
from autofuse.lowering.cpu.workspace import SharedMemoryFull
from autofuse.lowering.gpu.support import why_not
from autofuse.lowering.notes import place
from autofuse.lowering.torch_internals import group_store, resolve_group
from autofuse.native_kernels.cuda.host.gemm import clusters_at_once
from autofuse.native_kernels.cuda.kernels.put_words import put_words
from autofuse.native_kernels.gpu.copy_engine import FIRST_PRESENCE, CopyEngine
from autofuse.native_kernels.gpu.memory import (
    Need,
    PeerMemory,
    Region,
    grown,
    new_state,
)
from autofuse.native_kernels.gpu.state import (
    BAD_INPUT_WORD,
    CODES_PER_SITE,
    RECORD_WORDS,
    State,
    Wait,
)

from .allocation import LEAST, LOCAL, Memory, Refusals, allocate, sizes_of
from .chain import chain_of
from .descriptors import Descriptors

T = TypeVar("T")

_WAITS = {
    Wait.TELLING: "to say where its rows are to go",
    Wait.REDUCING: "to add its part",
    Wait.COPYING: "to send a sum",
    Wait.GATHERING: "to send its part",
    Wait.DISPATCHING: "to send its part",
    Wait.POOLING: "to send its pooled rows",
    Wait.COMBINING: "to send rows of its experts",
    Wait.GRADIENTS: "to send the gradients of its bags",
}
"""What a rank did not come to do, by the code of the wait for it."""


class GpuWorkspace:
    """The memory of `group` on this rank's device.

    Raises NotShared on all ranks if one of them cannot take part.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self.device = weakref.ref(group), device
        self.group_name, self.rank, self.world = group.group_name, group.rank(), group.size()
        self._store: Store = group_store(group)
        # Counting visits tells apart groups that come one after another to the same store under one name.
        self._prefix = f"autofuse/gpu/{self._store.add(f'autofuse/gpu/{self.rank}', 1)}"
        self._meetings = 0
        self._sites: list[str] = [""]
        self._kernels: set[Hashable] = set()
        self._refusals = Refusals()
        self.needs: dict[
            str, tuple[int, str]
        ] = {}  # by field of `Need`, the most that a call needs, and which
        self.calls: dict[Hashable, Any] = {}  # by kind, what came again; for who makes calls
        self._chain = chain_of(device)
        self._capturing = False
        self._failure: str | None = None
        why = why_not(device) or ""
        clusters = "" if why else " ".join(map(str, clusters_at_once(device)))
        told = [a.split("|") for a in self.meet(f"{why}|{host_identity()}|{sources_digest()}|{clusters}")]
        for r, (problem, host, digest, _) in enumerate(told):
            if problem:
                raise Declined(f"rank {r}: {problem}")
            if host != host_identity():
                raise Declined(
                    f"group {self.group_name} spans hosts: rank {self.rank} and rank {r} share none"
                )
            if digest != sources_digest():
                raise RuntimeError(
                    f"group {self.group_name}: ranks {self.rank} and {r} run different versions of autofuse; "
                    f"install the same on all"
                )
        counts = [[int(n) for n in each.split()] for *_, each in told]
        self._clusters = tuple(map(min, zip(*counts, strict=True)))
        self._limit = 0.0
        self._record = torch.zeros(RECORD_WORDS, dtype=torch.int32).pin_memory()
        self._raised = ctypes.c_int32.from_address(self._record.data_ptr())
        self._bad_input = ctypes.c_int64.from_address(self._record.data_ptr() + 8 * BAD_INPUT_WORD)
        self._margin = config.margin
        regions, local, _ = allocate(None, LEAST, group, device, self.meet)
        presence = [view.view(torch.int32)[FIRST_PRESENCE:] for view in regions["copy_signals"].views]
        self._state = new_state(self._record, presence, self._firm, device)
        self.memory, self.capacity = self._described(regions, local), LEAST
        self._held = Memory(self.memory, LEAST)
        weakref.finalize(self, self._held.end).atexit = False
        self.engine = CopyEngine(self.memory)

    @property
    def group(self) -> ProcessGroup:
        """Held weakly: a group that is destroyed takes its workspace with it."""
        group = self._group()
        assert group is not None
        return group

    @cached_property
    def programs(self) -> int:
        """How many programs run at once, one a multiprocessor."""
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @property
    def _firm(self) -> int:
        """How many programs stay where a peer has not started the call."""
        return max(1, self.programs - self._margin)

    def enter(
        self, op: str, site: str, need: Callable[[], Need], way: str, variant: Hashable
    ) -> tuple[PeerMemory, int, bool] | None:
        """Before a launch: the memory, the site's number, and whether this way of this op is new.

        A new kernel is to be compiled, and then all ranks meet, so that none is late by that; later calls
        compile variants of it. None while a CUDA graph is captured if the variant is new, for which a kernel
        may have to be compiled, or the memory would have to grow. RuntimeError if an earlier call has failed,
        SharedMemoryFull on all ranks if one has no room; later calls may find some.
        """
        new = False
        if (way, variant) not in self._kernels:
            self.check()
            if torch.cuda.is_current_stream_capturing():
                return None
            new, grow = (way, op) not in self._kernels, need()
            if not grow.fits(self.capacity):
                self._refusals.check((way, variant))
                try:
                    _apart(self.device, lambda: self._grow(grow))
                except SharedMemoryFull as error:
                    self._refusals.note((way, variant), error)
                    raise
            self._kernels |= {(way, op), (way, variant)}
            self._note(grow, f"{op} at {place(site)}")
        return self.enter_again(), self._number(f"autofuse.{op} at {place(site)}"), new

    def enter_again(self) -> PeerMemory:
        """As `enter`, before a launch like one that it has let in."""
        self.check()
        self._capturing = torch.cuda.is_current_stream_capturing()
        if self._capturing:
            self._held.graphs.note(self.device.index)
        else:
            self._chain.enter()
            if self._limit != config.timeout_s:
                self._limit = config.timeout_s
                self._state[State.LIMIT] = int(self._limit * 1e9)
            if self._margin != config.margin:
                self._margin = config.margin
                self._state[State.FIRM] = self._firm
        return self.memory

    def _note(self, need: Need, call: str) -> None:
        for name, size in vars(need).items():
            if size > self.needs.get(name, (0, ""))[0]:
                self.needs[name] = size, call

    def sizes(self) -> dict[str, int]:
        """Bytes of each part of this rank's memory."""
        return sizes_of(self.memory)

    @staticmethod
    def itemsize(name: str) -> int:
        """Of what `Need` counts of this part."""
        return LOCAL[name].itemsize if name in LOCAL else 1

    @property
    def kept_for_graphs(self) -> dict[str, int]:
        """Bytes of each part of outgrown memory that CUDA graphs may still use."""
        return self._held.outgrown()

    @cached_property
    def descriptors(self) -> Descriptors:
        """Of embedding tables, on the device."""

        def allocate(size: int) -> Tensor:
            return _apart(self.device, lambda: torch.zeros(size, dtype=torch.int64, device=self.device))

        return Descriptors(put_words, allocate)

    def leave(self) -> None:
        """After the launch: later calls on other streams come after it."""
        if not self._capturing:
            self._chain.leave()

    def _number(self, named: str) -> int:
        """Of a site, as failure records have it."""
        if named not in self._sites:
            self._sites.append(named)
        return self._sites.index(named)

    def check(self) -> None:
        """Raises RuntimeError if an earlier kernel gave up waiting, or met an index that is none.

        Never synchronises.
        """
        if self._failure is None and self._bad_input.value:
            self._failure = self._describe_input(self._bad_input.value)
        if self._failure is None and self._raised.value:
            _, code, source, index, epoch = self._record.tolist()[:5]
            what = _WAITS.get(Wait(code % CODES_PER_SITE), "")
            self._failure = (
                f"{self._site(code)}, rank {self.rank} of group {self.group_name}: rank {source} did not "
                f"come {what} (tile {index}, call {epoch}) within {self._limit:g} s "
                f"(AUTOFUSE_TIMEOUT_S sets the limit). What this op and later ones returned is not to be "
                f"used; has rank {source} ended, or does it run another program?"
            )
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _site(self, code: int) -> str:
        site = code // CODES_PER_SITE
        return self._sites[site] if site < len(self._sites) else "a call"

    def _describe_input(self, word: int) -> str:
        """As the kernel has it: code << 48 | table << 32 | index, or bag."""
        code, table, value = word >> 48 & 0xFFFF, word >> 32 & 0xFFFF, ctypes.c_int32(word).value
        what = (
            f"index {value} of table {table} is outside of its rows"
            if code % CODES_PER_SITE == Wait.BAD_INDEX
            else f"bag {value} of table {table} ends before it starts or outside of the indices; "
            "offsets must ascend from 0 to at most the number of indices"
        )
        return (
            f"{self._site(code)}, rank {self.rank} of group {self.group_name}: {what}. "
            "What this op and later ones returned is not to be used"
        )

    def meet(self, value: str) -> list[str]:
        """One string of every rank, which all must bring."""
        self._meetings += 1
        prefix = f"{self._prefix}/{self._meetings}"
        return all_gather(self._store, prefix, self.rank, self.world, value, config.timeout_s, "cuda")

    def _grow(self, need: Need) -> None:
        """Memory for `need`, too, by all ranks together. SharedMemoryFull on all if one has no room."""
        capacity = grown(need | self.capacity)
        found = allocate(self._held, capacity, self.group, self.device, self.meet)
        self._held.replace(self._described(*found[:2]), capacity, keep=found[2])
        self.calls.clear()  # they know the memory of before
        self.memory, self.capacity, self.engine.memory = self._held.now, capacity, self._held.now

    def _described(self, regions: dict[str, Region], local: dict[str, Tensor]) -> PeerMemory:
        parts: dict[str, Any] = {**regions, **local}
        return PeerMemory(
            self.rank, self.world, self.programs, **parts, state=self._state, record=self._record,
            clusters=self._clusters,
        )  # fmt: skip


def workspace_for(group_name: str, device: torch.device) -> GpuWorkspace:
    """The workspace of a group; made on first use, by all its ranks together.

    Raises NotShared on all ranks when one of them cannot take part, RuntimeError when one does not come or
    fails; the same at every later try. SharedMemoryFull on all ranks when one has no room now.
    """
    group = resolve_group(group_name)
    found = _workspaces.get(group)
    if found is None:
        with _making:
            found = _workspaces.get(group)
            if found is None:
                refusals = _refusals.setdefault(group, Refusals())
                refusals.check(device)
                found = _make(group, device)
                if isinstance(found, SharedMemoryFull):
                    refusals.note(device, found)
                else:
                    _workspaces[group] = found
    if isinstance(found, Exception):
        raise found
    return found


def workspace_of(group_name: str, operand: Tensor) -> GpuWorkspace:
    """`workspace_for` the GPU of an operand, which need not be the current one. NotShared if it has none."""
    if operand.device.type != "cuda":
        raise NotShared("operands are not on a GPU")
    with current(operand.device):
        return workspace_for(group_name, operand.device)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, which need not be that of the operands."""
    if device.index == torch.cuda.current_device():
        return nullcontext()  # to enter the other one takes longer than a launch
    return torch.cuda.device(device)


def _make(group: ProcessGroup, device: torch.device) -> GpuWorkspace | Exception:
    if dist.get_backend(group) == "fake":
        return Declined("the group is fake")
    if torch.cuda.is_current_stream_capturing():
        raise NotShared(
            "the group has not met yet, and cannot while a CUDA graph is captured: call autofuse.warmup()"
        )
    try:
        return _apart(device, lambda: GpuWorkspace(group, device))
    except (RuntimeError, OSError) as error:
        return error.with_traceback(None)


def _apart(device: torch.device, work: Callable[[], T]) -> T:
    """`work()` in a thread of its own, for tensors that stay: those of inference mode, which a thread has for
    itself, could not be written outside of it, and while Inductor's CUDA graphs warm up they claim all that
    this thread allocates, and fail where it is not freed. Settings are those of this thread.
    """

    def on_device() -> T:
        with torch.cuda.device(device):
            done = work()
            torch.cuda.synchronize(device)  # the streams of the caller do not wait for those of this thread
        return done

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copy_context().run, on_device).result()


def check(group_name: str | None = None) -> None:
    """Raises RuntimeError if a fused kernel of the group (of any group) has given up waiting for a peer."""
    for group, found in list(_workspaces.items()):
        if isinstance(found, GpuWorkspace) and group_name in (None, group.group_name):
            found.check()


def workspaces() -> list[GpuWorkspace]:
    """Of all groups that have met on GPUs."""
    return [found for found in list(_workspaces.values()) if isinstance(found, GpuWorkspace)]


_refusals: WeakKeyDictionary[ProcessGroup, Refusals] = WeakKeyDictionary()
_workspaces: WeakKeyDictionary[ProcessGroup, GpuWorkspace | Any] = WeakKeyDictionary()
_making = threading.RLock()
