"""What CPU ranks tell each other about failures, in their control segments: why a rank has given up, and for
which rank it waits."""

import ctypes
from collections.abc import Sequence

from autofuse.lowering.cpu.rendezvous import Peer
from autofuse.native_kernels import cpu

_AWAITED, _TEXT = 64, 128  # each on a cache line of its own, behind the slot that says that there is a text
_BETWEEN_CALLS, _IN_A_CALL = 1, 2  # what the slot says


class Failures:
    """The failures of all ranks of a group. at[r]: the address of the `nbytes` of rank r."""

    def __init__(self, rank: int, peers: Sequence[Peer], at: Sequence[int], nbytes: int) -> None:
        self._rank, self._peers, self._slots, self._most = rank, peers, at, nbytes - _TEXT - 1
        self._awaited = [ctypes.c_int64.from_address(a + _AWAITED) for a in at]

    def tell(self, reason: str, in_a_call: bool = True) -> None:
        """This rank has given up: in a call, which then fails on all ranks, or between calls."""
        text = reason.encode()[: self._most] + b"\0"
        ctypes.memmove(self._slots[self._rank] + _TEXT, text, len(text))
        cpu.signal(self._slots[self._rank], _IN_A_CALL if in_a_call else _BETWEEN_CALLS)

    def await_(self, rank: int | None) -> None:
        """Publishes that this rank has waited for `rank` for some time; None: that it waits for no rank."""
        self._awaited[self._rank].value = 0 if rank is None else rank + 1

    def why_not(self, rank: int) -> str:
        """Why a wait for `rank` is in vain, or an empty string: a rank has given up in a call, or this one
        has between calls, or has died."""
        for r in (rank, *range(len(self._peers))):
            least = _BETWEEN_CALLS if r == rank else _IN_A_CALL
            if cpu.wait(self._slots[r], least, None, 0, 0, 0, 0) == cpu.OK:
                text = ctypes.string_at(self._slots[r] + _TEXT)
                return f"rank {r} gave up: {text.decode(errors='replace')}"
        if self._peers[rank].is_dead():
            return f"rank {rank} (pid {self._peers[rank].pid}) has died"
        return ""

    def lost(self, rank: int) -> int:
        """The rank at the end of the chain of waits that starts at `rank`.

        It is `rank` itself if that waits for nobody, or if the chain is a circle.
        """
        lost, seen = rank, {self._rank}
        while lost not in seen and (awaited := self._awaited[lost].value):
            seen.add(lost)
            lost = awaited - 1
        return rank if lost in seen else lost
