"""The workspace of a group: the memory that its GPUs map, and the checks before every launch.

All ranks of a group make the memory together when the group first needs it. It grows in steps when a call
needs more, but never while a CUDA graph is captured (`allocation.py`). Fused calls of one device run one
after another, whatever their groups and streams, because two kernels that wait for peers must not run at the
same time.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from autofuse import config
from autofuse.lowering.cpu import identities
from autofuse.lowering.cpu.rendezvous import (
    VISITS,
    Declined,
    NotShared,
    Peer,
    all_gather,
    host_identity,
    sources_digest,
    visit,
)
from autofuse.lowering.cpu.workspace import SharedMemoryFull
from autofuse.lowering.gpu.links import check_links
from autofuse.lowering.gpu.support import is_serial, why_not
from autofuse.lowering.limits import default_limit_s, limit_s
from autofuse.lowering.notes import place
from autofuse.lowering.torch_internals import group_store, resolve_group
from autofuse.lowering.watcher import watch
from autofuse.native_kernels.cuda.host.gemm import clusters_at_once
from autofuse.native_kernels.cuda.kernels.put_words import put_words
from autofuse.native_kernels.gpu.copy_engine import FIRST_PRESENCE, CopyEngine
from autofuse.native_kernels.gpu.memory import Need, PeerMemory, Region, grown, new_state
from autofuse.native_kernels.gpu.state import RECORD_WORDS, State

from .again import Again
from .allocation import LEAST, Memory, Refusals, allocate, apart
from .board import Board
from .chain import chain_of
from .comparing import Kinds, Parts
from .descriptors import Descriptors
from .failures import Failures


class GpuWorkspace:
    """The memory of `group` on this rank's device.

    Raises NotShared on all ranks if one of them cannot take part.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self.device = weakref.ref(group), device
        self.group_name, self.rank, self.world = group.group_name, group.rank(), group.size()
        self._store: Store = group_store(group)
        self._prefix = f"{VISITS[1]}/{visit(self._store, VISITS[1], self.rank)}"
        self._meetings = 0
        self._margin = config.margin
        self._limit = 0.0
        self._limit_s = partial(limit_s, default_limit_s(group, device))  # how long a wait may take
        self._kernels: set[Hashable] = set()
        self._entered: set[Hashable] = set()
        self._compared, self._parts = Kinds(self.group_name), Parts(self.group_name)
        self._refusals = Refusals()
        self.needs: dict[str, tuple[int, str]] = {}  # by field of `Need`: the most of a call, and which
        self.calls: dict[Hashable, Any] = {}  # by kind, what came again; for who makes calls
        self._chain = chain_of(device)
        self._capturing = False
        self._peers = identities.known(group)
        self._introduced = False
        board, why = "", why_not(device) or ""
        with ExitStack() as named:
            if self.rank == 0 and not why:
                try:
                    board = named.enter_context(Board.create(self.world))
                except OSError as error:
                    why = f"no shared memory of the host: {error}"
            self._introduce(why, board)
            regions, local, _ = allocate(None, LEAST, group, device, self.meet)  # all have opened the board
        presence = [view.view(torch.int32)[FIRST_PRESENCE:] for view in regions["copy_signals"].views]
        self._state = new_state(self._record, presence, self._firm, device)
        self._held = Memory(self._described(regions, local), LEAST)
        weakref.finalize(self, self._held.end).atexit = False
        self.engine, self.again = CopyEngine(self.memory), Again(self.failures, self._chain)
        watch(self.failures)

    def _introduce(self, why: str, board: str) -> None:
        """Ranks exchange who they are and what they can. NotShared or RuntimeError on all if they do not
        fit."""
        me = {
            "why": why,
            "digest": sources_digest(),
            "clusters": [] if why else clusters_at_once(self.device),
            "serial": not why and is_serial(self.device),
            "gpu": "" if why else str(torch.cuda.get_device_properties(self.device).uuid),
            "peer": asdict(Peer.myself()),
            "board": board,
        }
        told = [json.loads(each) for each in self.meet(json.dumps(me))]
        for r, other in enumerate(told):
            if other["why"]:
                raise Declined(f"rank {r}: {other['why']}")
            if other["peer"]["host"] != host_identity():
                raise Declined(
                    f"group {self.group_name} spans hosts: rank {self.rank} and rank {r} share no memory"
                )
            if other["digest"] != sources_digest():
                raise RuntimeError(
                    f"group {self.group_name}: ranks {self.rank} and {r} run different versions of autofuse; "
                    f"install the same on all"
                )
        self.serial = any(other["serial"] for other in told)
        """Whether launches of some rank return only after their kernels have ended. Such a host cannot tell
        copy engines to move tiles of a running kernel."""
        check_links([other["gpu"] for other in told], self.rank, self.meet)
        self._clusters = tuple(map(min, zip(*(other["clusters"] for other in told), strict=True)))
        peers = [Peer(**other["peer"]) for other in told]
        self._peers = list(peers)
        identities.remember(self.group, peers)
        self._record = torch.zeros(RECORD_WORDS, dtype=torch.int32).pin_memory()
        opened = Board(told[0]["board"], self.world)
        self.failures = Failures(self.group_name, self.rank, self._record, opened, peers, self._limit_s())
        self._introduced = True

    @property
    def group(self) -> ProcessGroup:
        """Held weakly: a group that is destroyed takes its workspace with it."""
        group = self._group()
        assert group is not None
        return group

    @property
    def memory(self) -> PeerMemory:
        return self._held.now

    @property
    def capacity(self) -> Need:
        return self._held.capacity

    @cached_property
    def programs(self) -> int:
        """How many programs run at once: one on each multiprocessor."""
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @property
    def _firm(self) -> int:
        """How many programs stay on the GPU while a peer has not started the call."""
        return max(8, self.programs - self._margin)

    def enter(
        self, op: str, site: str, need: Callable[[], Need], way: str, variant: Hashable, problem: Hashable
    ) -> tuple[PeerMemory, int, bool] | None:
        """Before a launch: the memory, the site's number, and whether this way of this op is new.

        All ranks meet before the first call of a kind (op, site, way, problem). If the way is new, the caller
        compiles its kernel and meets all ranks again, so that none is late. Later variants need no meeting.

        None if ranks have parts of different sizes; also while a CUDA graph is captured, if the variant is
        new: a kernel may have to be compiled, or the memory to grow. RuntimeError if ranks make different
        calls or an earlier call has failed. SharedMemoryFull on all ranks if one of them has no room now.
        """
        new, at, call = False, place(site), (op, site, way, variant)
        if call not in self._entered:
            self.failures.check()
            capturing, known = torch.cuda.is_current_stream_capturing(), (way, variant) in self._kernels
            if capturing and not known:
                return None
            if not capturing:
                if not self._compared.are_alike(op, at, way, problem, self.meet, self._entered.clear):
                    return None
                if not known:
                    new = (way, op) not in self._kernels
                    self._make_room(need(), (way, variant), f"{op} at {at}")
                    self._kernels |= {(way, op), (way, variant)}
                self._entered.add(call)
        return self.enter_again(), self.failures.number(f"autofuse.{op} at {at}"), new

    def has_equal_parts(self, op: str, site: str, problem: Hashable, capturing: bool) -> bool:
        """Whether all ranks have parts of equal sizes (see `Parts`). If not, all of them run what the op
        replaces. All ranks ask before a way is chosen; they meet if sizes are new, but in no capture."""
        meet = None if capturing else self.meet
        return self._parts.are_equal(op, place(site), problem, meet, self.calls.clear)

    def _make_room(self, need: Need, kernel: Hashable, call: str) -> None:
        if not need.fits(self.capacity):
            self._refusals.check(kernel)
            try:
                apart(self.device, lambda: self._grow(need))
            except SharedMemoryFull as error:
                self._refusals.note(kernel, error)
                raise
        for name, size in vars(need).items():
            if size > self.needs.get(name, (0, ""))[0]:
                self.needs[name] = size, call

    def enter_again(self) -> PeerMemory:
        """As `enter`, before a launch of a kind that has entered before."""
        self.failures.check()
        self._capturing = torch.cuda.is_current_stream_capturing()
        if self._capturing:
            self._held.graphs.note(self.device.index)
        else:
            self._chain.enter()
            if self.again.renew():
                self.calls.clear()
            if self._limit != (limit := self._limit_s()):
                self._limit = self.failures.limit_s = limit
                self._state[State.LIMIT] = int(self._limit * 1e9)
            if self._margin != config.margin:
                self._margin = config.margin
                self._state[State.FIRM] = self._firm
        return self.memory

    @cached_property
    def descriptors(self) -> Descriptors:
        """Descriptors of embedding tables in the memory of the device."""

        def allocate(size: int) -> Tensor:
            return apart(self.device, lambda: torch.zeros(size, dtype=torch.int64, device=self.device))

        return Descriptors(put_words, allocate)

    def leave(self) -> None:
        """To be called after the launch: later calls on other streams run behind it."""
        if not self._capturing:
            self._chain.leave()

    def leave_again(self) -> None:
        """As `leave`, of a call that has repeated a launch and launched more. Such a call is not captured."""
        self._chain.leave()

    def check(self) -> None:
        """Raises RuntimeError if an earlier call has failed, here or on a peer. Never synchronises."""
        self.failures.check()

    def meet(self, value: str) -> list[str]:
        """The values of all ranks. All ranks must call it; if one does not come, all raise an error."""
        self._meetings += 1
        where, limit = f"{self._prefix}/{self._meetings}", self._limit_s()
        try:
            return all_gather(self._store, where, self.rank, self._peers, value, limit, "cuda")
        except NotShared:
            raise
        except RuntimeError as error:
            if self._introduced:
                self.failures.tell(f"group {self.group_name}: {error}")
            raise

    def reset(self, number: int, meet: Callable[[str], list[str]]) -> None:
        """Puts all memory into its first state, for the reset of this number. All ranks call it together.

        Between the two meetings no kernel and no copy runs on any rank.
        """
        self.failures.pause()
        try:
            torch.cuda.synchronize(self.device)
            if len(set(meet(repr(self.capacity)))) > 1:
                raise RuntimeError(
                    f"group {self.group_name} cannot be reset: its memory has grown on some ranks only; "
                    "destroy the group and make another one"
                )
            for memory in self._held.all:
                memory.clear()
            torch.cuda.synchronize(self.device)
            self.failures.forget()
            # The ranks may have stopped at different calls, so they agree on everything anew.
            self._prefix, self._meetings = f"{self._prefix.partition('/reset')[0]}/reset/{number}", 0
            for known in (self._kernels, self._entered, self._compared, self._parts):
                known.clear()
            self.again.forget(self.calls)
            self._refusals = Refusals()
            for each in agreements:
                each.pop(self, None)
            meet("")
        finally:
            self.failures.resume()

    def _grow(self, need: Need) -> None:
        """Grows the memory by `need`, on all ranks. SharedMemoryFull on all of them if one has no room."""
        capacity = grown(need | self.capacity)
        found = allocate(self._held, capacity, self.group, self.device, self.meet)
        self._held.replace(self._described(*found[:2]), capacity, keep=found[2])
        self.again.forget(self.calls)  # they hold the old memory
        self.engine.memory = self.memory

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
    if found.device != device:
        raise RuntimeError(
            f"group {group_name} runs fused ops on {found.device}, got tensors on {device}: use one GPU a "
            "group, or make another group"
        )
    return found


def workspace_of(group_name: str, operand: Tensor) -> GpuWorkspace:
    """`workspace_for` the GPU of an operand, which need not be the current one. NotShared if it has none."""
    if operand.device.type != "cuda":
        raise NotShared("operands are not on a GPU")
    with current(operand.device):
        return workspace_for(group_name, operand.device)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` the current device, on which kernels are launched."""
    if device.index == torch.cuda.current_device():
        return nullcontext()  # entering torch.cuda.device takes longer than a launch
    return torch.cuda.device(device)


def _make(group: ProcessGroup, device: torch.device) -> GpuWorkspace | Exception:
    if dist.get_backend(group) == "fake":
        return Declined("the group is fake")
    if torch.cuda.is_current_stream_capturing():
        raise NotShared(
            "the group has not met yet, and cannot while a CUDA graph is captured: call autofuse.warmup()"
        )
    try:
        return apart(device, lambda: GpuWorkspace(group, device))
    except (RuntimeError, OSError) as error:
        return error.with_traceback(None)


def made_of(group: ProcessGroup) -> GpuWorkspace | None:
    """The workspace of a group that has met."""
    found = _workspaces.get(group)
    return found if isinstance(found, GpuWorkspace) else None


def reset(group: ProcessGroup, number: int, meet: Callable[[str], list[str]]) -> None:
    """Calls `GpuWorkspace.reset` for a group for which all ranks have a workspace."""
    found = _workspaces[group]
    with current(found.device):
        found.reset(number, meet)


def forget(group: ProcessGroup) -> None:
    """The ranks of the group meet again before its next call, unless they cannot share memory."""
    with _making:
        if not isinstance(_workspaces.get(group), NotShared):
            _workspaces.pop(group, None)
            _refusals.pop(group, None)


agreements: list[WeakKeyDictionary[GpuWorkspace, Any]] = []
"""Tables of other modules with what the ranks of a group have agreed on. A reset empties them."""


def workspaces() -> list[GpuWorkspace]:
    """The workspaces of all groups that have met on GPUs."""
    return [found for found in list(_workspaces.values()) if isinstance(found, GpuWorkspace)]


_refusals: WeakKeyDictionary[ProcessGroup, Refusals] = WeakKeyDictionary()
_workspaces: WeakKeyDictionary[ProcessGroup, GpuWorkspace | Any] = WeakKeyDictionary()
_making = threading.RLock()
