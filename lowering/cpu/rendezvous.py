"""How the ranks of a group find each other's memory: their identities, whether they are alive, their
segments.

Ranks meet through the key-value store that the group already has, so that no collective runs here. Afterwards
they talk through shared memory only.
"""

import hashlib
import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import Store

from autofuse.lowering import notes
from autofuse.native_kernels import cpu

from .names import locked, remove_left_behind

VISITS = ("autofuse", "autofuse/gpu", "autofuse/proofs")
"""Keys in the store of a group, of its visits by CPU ranks, by GPU ranks, and to compare proofs of graphs."""

RESETS = "autofuse/reset"
"""Key in the store of a group, of how often a rank has reset it."""


class NotShared(RuntimeError):
    """The ranks of a group share no memory, and all ranks know it: all of them run the reference."""


class GroupSpansHosts(NotShared):
    """The ranks of a group do not all see the same shared memory."""


class Declined(NotShared):
    """A rank has said that it will never share memory with the group."""


@dataclass(frozen=True)
class Peer:
    """The identity of a rank. `namespace` and `started` make `pid` unique."""

    pid: int
    started: str
    namespace: str
    host: str
    segments: str

    @staticmethod
    def myself() -> "Peer":
        pid = os.getpid()
        return Peer(pid, _started(pid), _namespace(), host_identity(), f"/af-{pid}-{secrets.token_hex(4)}")

    def segment(self, generation: int) -> str:
        """Name of this rank's segment number `generation`, while it has one (macOS allows 31 characters)."""
        return f"{self.segments}-{generation}"

    def is_dead(self) -> bool:
        """Whether the process has ended. False where that is not known, as in another pid namespace."""
        return self.namespace == _namespace() and _started(self.pid) != self.started


def make_segment(name: str, nbytes: int) -> Tensor:
    """New shared memory that peers open by its name. Raises NoRoom, or RuntimeError."""
    return map_segment(locked(lambda: cpu.create_segment(name, nbytes)), nbytes)


def map_segment(fd: int, nbytes: int) -> Tensor:
    """The shared memory behind `fd` as a uint8 tensor `[nbytes]`; closes `fd`. The memory is unmapped when
    the last tensor that views it is gone."""
    try:
        mapped = cpu.map_segment(fd, nbytes)
    finally:
        os.close(fd)
    # A tensor that is made in inference mode could not be written outside of it.
    with torch.inference_mode(False):
        return torch.frombuffer(mapped, dtype=torch.uint8)


def all_gather(
    store: Store,
    prefix: str,
    rank: int,
    peers: Sequence[Peer | None],
    value: str,
    timeout_s: float,
    device: str | None = "cpu",
    purpose: str = "to set up shared memory",
    resets: bool = False,
) -> list[str]:
    """One string of every rank, through `store`.

    peers: the process of each rank, None while that is not known. device: ranks that have declined to share
    memory of such devices will not come; None if all ranks come. resets: the ranks reset the group.

    Raises Declined when a rank will never come, RuntimeError naming the ranks that died, reset the group
    instead, or did not come within `timeout_s`.
    """
    reset = reset_step(visits(store, RESETS, rank) + 1, 0)
    store.set(f"{prefix}/{rank}", value)
    missing = list(range(len(peers)))
    deadline = time.monotonic() + timeout_s
    pause = 0.0005
    while True:
        missing = [r for r in missing if not store.check([f"{prefix}/{r}"])]
        if not missing:
            return [store.get(f"{prefix}/{r}").decode() for r in range(len(peers))]
        for r in missing:
            if device is not None and (why := notes.declined(store, r, device)):
                raise Declined(f"rank {r} leaves its collectives as they are: {why}")
            # A rank that has come before its reset may have done so since we looked.
            if not resets and store.check([f"{reset}/{r}"]) and not store.check([f"{prefix}/{r}"]):
                raise RuntimeError(f"rank {r} gave up: autofuse.reset was called")
        for r in missing:
            peer = peers[r]
            if peer is not None and peer.is_dead():
                raise RuntimeError(f"rank {r} (pid {peer.pid}) has died while the group was meeting")
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"rank {rank} waited {timeout_s:g} s for ranks {missing} {purpose}: did they "
                f"skip the call, or are they still compiling? AUTOFUSE_TIMEOUT_S sets the limit; "
                f"{'; '.join(notes.kept_by(store, r) for r in missing)}"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def reset_step(number: int, step: int) -> str:
    """Key of a meeting of ranks that reset a group for the time `number`."""
    return f"{RESETS}/{number}/{step}"


def visits(store: Store, key: str, rank: int) -> int:
    """How often this rank has visited the store to meet. Visits tell apart groups that use one store one
    after another under the same name."""
    return int(store.add(f"{key}/{rank}", 0))


def set_visits(store: Store, key: str, rank: int, count: int) -> None:
    """The next visit of this rank has the number after `count`."""
    store.add(f"{key}/{rank}", count - visits(store, key, rank))


def visit(store: Store, key: str, rank: int) -> int:
    """The number of one more visit."""
    return int(store.add(f"{key}/{rank}", 1))


def meet(
    store: Store, group_name: str, rank: int, known: Sequence[Peer | None], nbytes: int, timeout_s: float
) -> tuple[list[Peer], list[Tensor], Callable[[], None]]:
    """Make a segment of `nbytes` and map those of all peers; known: as `identities.known`.

    Returns the peers, their segments, and a function to call once all ranks have returned from here: it
    removes the names. Raises NotShared, or RuntimeError when a rank fails or has other sources of autofuse.
    """
    me = Peer.myself()
    remove_left_behind()
    prefix = f"{VISITS[0]}/{visit(store, VISITS[0], rank)}"
    # Plans are never compared action by action: equal arguments and equal sources make equal plans.
    versions = all_gather(store, f"{prefix}/version", rank, known, sources_digest(), timeout_s)
    for r, version in enumerate(versions):
        if version != versions[0]:
            raise RuntimeError(
                f"group {group_name}: the ranks run different versions of autofuse: the sources of its plans "
                f"have the digest {versions[0]} on rank 0, {version} on rank {r}; install the same on all"
            )
    found = all_gather(store, f"{prefix}/peer", rank, known, json.dumps(asdict(me)), timeout_s)
    peers = [Peer(**json.loads(text)) for text in found]
    for r, peer in enumerate(peers):
        if peer.host != peers[0].host:
            raise GroupSpansHosts(
                f"group {group_name} spans hosts: rank 0 is on {peers[0].host}, rank {r} on {peer.host}; "
                f"shared memory needs one machine, one /dev/shm and one user"
            )

    def unlink() -> None:
        cpu.unlink_segment(me.segment(0))

    try:
        try:
            segment, problem = make_segment(me.segment(0), nbytes), ""
        except (RuntimeError, OSError) as error:
            segment, problem = torch.empty(0, dtype=torch.uint8), str(error)
        problems = all_gather(store, f"{prefix}/made", rank, peers, problem, timeout_s)
        for r, problem in enumerate(problems):
            if problem:
                raise RuntimeError(f"group {group_name}: rank {r} {problem}")
        segments = [
            segment if r == rank else map_segment(cpu.open_segment(p.segment(0)), nbytes)
            for r, p in enumerate(peers)
        ]
    except BaseException:
        discard(peers, 0)
        raise
    return peers, segments, unlink


@cache
def sources_digest() -> str:
    """Digest of the sources that make and run plans, and of the constants that choose kernels."""
    digest = hashlib.sha256()
    kernels = Path(cpu.__file__).parents[1]
    for path in [*sorted(Path(__file__).parents[1].rglob("*.*")), *sorted(kernels.rglob("*.*"))]:
        if path.suffix in (".py", ".json", ".cpp", ".h", ".cu", ".cuh"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def discard(peers: list[Peer], generation: int) -> None:
    """Remove the names of a generation that failed, also those of ranks that have died."""
    for peer in peers:
        cpu.unlink_segment(peer.segment(generation))


def host_identity() -> str:
    """A text that is equal in two processes exactly when they can share memory."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} (boot {boot}, /dev/shm {os.stat('/dev/shm').st_dev}, user {os.getuid()})"
    return f"{platform.node()} (user {os.getuid()})"


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return platform.node()


def _started(pid: int) -> str:
    """The start time of the process, which tells a pid that is used again apart; empty when it has ended."""
    if not os.path.exists("/proc/self/stat"):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        return "running"
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
