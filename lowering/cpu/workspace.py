"""Symmetric memory plus signals that one group owns: `workspaces.workspace_for(group_name).call(...)`.

Every rank has two segments that all ranks map: a *control* segment (`control.py`), and a *data* segment,
which holds two buffers, by parity of the epoch, and grows on demand. The numbers in slots (epochs, meetings)
only grow, so that no slot is ever reset. Two copies of everything are enough: in each call every rank waits
for every other rank, so that no rank can be two calls (or meetings) ahead of another.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed import Store

from autofuse.lowering import notes
from autofuse.lowering.cpu import identities, rendezvous
from autofuse.lowering.cpu.control import VALUES, Control, epoch_of, nbytes_of, text_of
from autofuse.lowering.cpu.failures import Failures
from autofuse.lowering.limits import default_limit_s, limit_s, silent_s
from autofuse.lowering.torch_internals import resolve_group
from autofuse.native_kernels import cpu

log = logging.getLogger(__name__)

ALIGNMENT = 64  # of every tensor in a buffer

SMALLEST_BUFFER = 1 << 16
_LARGEST_STEP = 1 << 26  # buffers grow in steps of at most a quarter, and of at most this
_SPIN_US = 15  # with more ranks than processors, spinning keeps the awaited rank from running
_LONG_SPIN_US = 100  # with a processor for each rank: about the time to fall asleep and wake up
_SLICE_MS = 200  # how often a waiting rank checks that its peer is alive
_MOST_KEYS = 4096


class SharedMemoryFull(RuntimeError):
    """A call needs more shared memory than one of the ranks can get; the workspace stays usable."""


class Workspace:
    """The shared memory of one process group, seen from this rank.

    `workspace_for` makes it, on all ranks of the group together. After an error it stays unusable, because no
    rank knows how far the others came: every later call raises the first error again.
    """

    def __init__(self, group_name: str, rank: int, world: int, store: Store) -> None:
        self.group_name = group_name
        self.rank = rank
        self.world = world
        self.capacity = 0
        self._store = store
        self._lock = threading.Lock()
        self._epoch = 0
        self._meeting = 0
        self._generation = 0
        self._failure = ""
        self._can_spin = world <= (os.cpu_count() or 1)
        self._keys: dict[tuple[str, str, str, int], tuple[int, bytes]] = {}
        self._data: list[Tensor] = []
        self._typed: dict[torch.dtype, list[Tensor]] = {}

        group = resolve_group(group_name)
        self._default_limit = default_limit_s(group, torch.device("cpu"))

        self._peers, self._segments, unlink = rendezvous.meet(
            store, group_name, rank, identities.known(group), nbytes_of(world), limit_s(self._default_limit)
        )
        identities.remember(group, self._peers)
        self._control = control = Control(rank, self._segments)
        self._failures = Failures(rank, self._peers, control.failures, control.failure_bytes)
        try:
            with self.call("set up shared memory", "workspace", "", SMALLEST_BUFFER):
                unlink()
        except BaseException:
            rendezvous.discard(self._peers, 0)
            raise

    def call(self, op: str, site: str, key: str, nbytes: int, spin_us: int = _LONG_SPIN_US) -> "Call":
        """A collective call; enter it with `with`. `op`, `site` (but for folders), `key` (shapes, plan)
        and `nbytes`, the bytes needed of every rank's buffer, must be the same on all ranks; otherwise
        entering it or the first wait raises RuntimeError on all. Calls of one process run one by one.

        spin_us: how long a wait spins before it sleeps, if every rank has a processor."""
        return Call(self, op, site, key, nbytes, spin_us)

    def _fail(self, reason: str, tell: bool = True, in_a_call: bool = True) -> None:
        """Make this and all later calls raise `reason`, here and, with `tell`, on ranks that wait for us."""
        if self._failure:
            return
        self._failure = reason
        if tell:
            self._failures.tell(reason, in_a_call)

    def _identify(self, op: str, site: str, key: str, nbytes: int) -> tuple[int, bytes]:
        shape = f"{key}; {nbytes} bytes; {self.world} ranks"
        text = f"{op} at {site} ({shape})".encode()
        alike = f"{op} at {notes.place(site)} ({shape})".encode()
        return int.from_bytes(hashlib.blake2b(alike, digest_size=8).digest(), "little"), text


class Call:
    """One epoch of a workspace. All methods are for use inside `with`."""

    def __init__(self, workspace: Workspace, op: str, site: str, key: str, nbytes: int, spin_us: int) -> None:
        self.op, self.site, self.nbytes = op, site, nbytes
        self._spin_us = spin_us if workspace._can_spin else _SPIN_US
        self.epoch = 0
        self._warned = 0
        self._ws = workspace
        self._key = key

    def __enter__(self) -> "Call":
        ws = self._ws
        ws._lock.acquire()
        try:
            if ws._failure:
                raise RuntimeError(f"autofuse: group {ws.group_name} cannot be used after: {ws._failure}")
            self._begin()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and kind is not SharedMemoryFull:  # which is raised on all ranks
            self._ws._fail(str(error) or type(error).__name__)
        self._ws._lock.release()

    def tensor(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """View of `rank`'s buffer of this epoch: contiguous, `offset` bytes (a multiple of 64) from its
        start. The content is undefined at first. Valid until the call ends."""
        ws = self._ws
        stride, size = [], 1
        for length in reversed(shape):
            stride.append(size)
            size *= length
        itemsize = dtype.itemsize
        if offset % ALIGNMENT or offset < 0 or offset + size * itemsize > ws.capacity:
            raise ValueError(
                f"{self.op}: a tensor {tuple(shape)} of {dtype} at {offset} is not aligned to {ALIGNMENT} or "
                f"not inside a buffer of {ws.capacity} bytes; pass a larger nbytes to call() or reserve()"
            )
        typed = ws._typed.get(dtype) or _typed(ws, dtype)
        return typed[rank].as_strided(shape, stride[::-1], (self._offset + offset) // itemsize)

    def address(self, rank: int, offset: int) -> int:
        """The address of the tensor that `tensor` returns for this offset."""
        return cpu.address(self._ws._data[rank]) + self._offset + offset

    def signal(self, dest: int, slot: int) -> None:
        """Signal `dest` that all stores of this rank so far have arrived."""
        cpu.signal(self._ws._control.signal_to(dest, slot), self.epoch)

    def wait(self, source: int, slot: int, tile: int = -1) -> None:
        """Wait until `source` has signalled `slot` in this epoch. Raises RuntimeError when it does not come
        in time, when `source` has died or failed, or when it is in a different call.
        `tile` is for the error text."""
        self._await(self._ws._control.signal_from(source, slot), self.epoch, source, tile)

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """All-gather of up to 512 int64 a rank; the number may differ from rank to rank. Also a barrier."""
        if len(values) > VALUES:
            raise ValueError(f"{self.op}: exchange takes up to {VALUES} values a rank, got {len(values)}")
        ws = self._ws
        ws._meeting += 1
        parity = ws._meeting & 1
        control = ws._control
        control.values[parity][ws.rank][: 1 + len(values)] = [len(values), *values]
        headers = control.headers_of[self.epoch & 1]
        how = self.epoch, self._hash, self._spin_us, self._slice_ms
        if cpu.meet(*control.meetings, ws.world, ws._meeting, headers, *how) != cpu.OK:
            for source in range(ws.world):
                self._await(control.meetings_in[source], ws._meeting, source, -1)
        return [row[1 : 1 + row[0]] for row in control.values[parity]]

    def reserve(self, nbytes: int) -> None:
        """Make every rank's buffer hold at least `nbytes`, the same number on all ranks. The contents of the
        buffers are lost, and earlier results of `tensor` are invalid. Raises SharedMemoryFull on all ranks if
        one rank has no room."""
        if nbytes > self._ws.capacity:
            self.exchange([])
            self._grow(nbytes)

    def _begin(self) -> None:
        ws = self._ws
        self._timeout_s = limit_s(ws._default_limit)
        self._slice_ms = max(1, min(_SLICE_MS, int(self._timeout_s * 1000)))
        ws._epoch += 1
        self.epoch = ws._epoch
        parity = self.epoch & 1
        self._offset = parity * ws.capacity
        self._header = ws._control.headers[parity]
        key = (self.op, self.site, self._key, self.nbytes)
        known = ws._keys.get(key)
        new = known is None
        if known is None:
            if len(ws._keys) == _MOST_KEYS:  # all ranks forget at the same call
                ws._keys.clear()
            known = ws._keys[key] = ws._identify(*key)
        self._hash, text = known
        cpu.publish(self._header[ws.rank], self.epoch, self._hash, text, len(text))
        if new or self.nbytes > ws.capacity:
            self.exchange([])
            if self.nbytes > ws.capacity:
                self._grow(self.nbytes)

    def _grow(self, nbytes: int) -> None:
        """Replace the data segments. All ranks are in this call, so that no rank reads the old ones any more.

        Raises SharedMemoryFull on all ranks if one rank has no room; the workspace stays usable.
        """
        ws = self._ws
        step = min(max(SMALLEST_BUFFER, 1 << max(0, (nbytes - 1).bit_length() - 3)), _LARGEST_STEP)
        capacity = -(-nbytes // step) * step
        ws._typed.clear()
        ws._data = []
        ws.capacity = 0
        self.exchange([])  # all ranks free the old memory before any rank asks for new memory
        ws._generation += 1
        generation, total = ws._generation, 2 * capacity
        name, problem = ws._peers[ws.rank].segment(generation), ""
        mine = torch.empty(0)
        try:
            try:
                mine = rendezvous.make_segment(name, total)
            except cpu.NoRoom as error:
                problem = str(error)
            without = [rank for rank, (full,) in enumerate(self.exchange([bool(problem)])) if full]
            if without:
                cpu.unlink_segment(name)
                other = f"rank {without[0]} cannot get {total} bytes of shared memory"
                raise SharedMemoryFull(f"{self.op}: {problem or other}")
            ws._data = [
                mine
                if r == ws.rank
                else rendezvous.map_segment(cpu.open_segment(p.segment(generation)), total)
                for r, p in enumerate(ws._peers)
            ]
            self.exchange([])
            cpu.unlink_segment(name)
        except SharedMemoryFull:
            raise
        except BaseException as error:
            # Publish the reason first: a peer that finds a segment gone must be able to read it.
            ws._fail(str(error) or type(error).__name__)
            rendezvous.discard(ws._peers, generation)
            raise
        ws.capacity = capacity
        self._offset = (self.epoch & 1) * capacity

    def _await(self, slot: int, value: int, source: int, tile: int) -> None:
        ws = self._ws
        status = cpu.wait(
            slot, value, self._header[source], self.epoch, self._hash, self._spin_us, self._slice_ms
        )
        if status == cpu.OK:
            return
        ws._failures.await_(source)
        begun = time.monotonic() - self._slice_ms / 1000
        deadline, silent = begun + self._timeout_s, silent_s(self._timeout_s)
        while status == cpu.TIMED_OUT:
            problem, now = ws._failures.why_not(source), time.monotonic()
            if now >= begun + silent and self._warned < self.epoch:
                self._warned = self.epoch
                waited = f"has waited {silent:g} of {self._timeout_s:g} s for"
                log.warning("%s", self._told(f"{waited} {self._whereabouts(source)}"))
            if not problem and now >= deadline:
                problem = f"waited {self._timeout_s:g} s for {self._whereabouts(source)}"
            # A signal that the peer raised before it failed counts.
            limit = 0 if problem else self._slice_ms
            status = cpu.wait(slot, value, self._header[source], self.epoch, self._hash, 0, limit)
            if problem and status == cpu.TIMED_OUT:
                self._raise(problem, tile)
        ws._failures.await_(None)
        if status == cpu.MISMATCH:
            ours, theirs = text_of(self._header[ws.rank]), text_of(self._header[source])
            self._raise(f"the ranks disagree: rank {ws.rank} runs {ours}, rank {source} runs {theirs}", tile)

    def _whereabouts(self, source: int) -> str:
        """The rank that a wait for `source` is for in the end, its latest call, and the sites that it has
        kept."""
        ws = self._ws
        lost = ws._failures.lost(source)
        epoch, header = max((epoch_of(h[lost]), h[lost]) for h in ws._control.headers)
        kept = notes.kept_by(ws._store, lost, self.site)
        via = f"rank {source}, which waits for rank {lost}" if lost != source else f"rank {source}"
        return (
            f"{via}; it is late or has skipped this call (AUTOFUSE_TIMEOUT_S sets the limit). Its latest "
            f"call on this group is epoch {epoch}, {text_of(header)}; {kept}"
        )

    def _raise(self, problem: str, tile: int) -> NoReturn:
        raise RuntimeError(self._told(problem, tile))

    def _told(self, problem: str, tile: int = -1) -> str:
        ws = self._ws
        at = f"tile {tile}, " if tile >= 0 else ""
        return (
            f"autofuse.{self.op} at {self.site}, {at}epoch {self.epoch}, "
            f"rank {ws.rank} of group {ws.group_name}: {problem}"
        )


def _typed(workspace: Workspace, dtype: torch.dtype) -> list[Tensor]:
    with torch.inference_mode(False):
        workspace._typed[dtype] = [t.view(dtype) for t in workspace._data]
    return workspace._typed[dtype]
