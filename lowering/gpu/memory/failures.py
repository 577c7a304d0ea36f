"""Failures of the kernels of one group: found on this rank or told by a peer, then named, logged and raised.

1. A kernel writes the failure record of its rank, in pinned memory of the host.
2. The host that finds a failure in its record tells its peers through the `Board`.
3. All hosts make the waits of their kernels give up.
4. Each rank writes to the board for which rank it waited. The *lost* rank is the one for which others wait
   and that waits for no rank itself. All ranks name it.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Sequence

from torch import Tensor

from autofuse.lowering import watcher
from autofuse.lowering.cpu.rendezvous import Peer
from autofuse.lowering.limits import silent_s
from autofuse.native_kernels.gpu.prepared import Guard
from autofuse.native_kernels.gpu.state import (
    BAD_INPUT_WORD,
    CODES_PER_SITE,
    RECORD_WORDS,
    SLOW_SOURCE_BIT,
    Record,
    Wait,
)

from .board import Board, Stage
from .chain import Chain

log = logging.getLogger(__name__)

SETTLE_S = 0.05
"""Within this time kernels that are told to stop have stopped."""
PATIENCE_S = 2.0
"""How long a rank waits until its living peers have settled."""
LOOKS_PER_DEATH = 3
"""Looks at the record for each look at the processes of peers."""

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
"""What the awaited rank should have done, by the code of the wait."""

NOT_USED = "What this op and later ones returned is not to be used"


class Failures:
    """The failures of one group, as this rank knows them.

    record: the failure record of this rank, int32 in memory of the host. limit_s: how long a wait of the
    latest call may take.
    """

    def __init__(
        self, group_name: str, rank: int, record: Tensor, board: Board, peers: Sequence[Peer],
        limit_s: float,
    ) -> None:  # fmt: skip
        self.group_name, self.rank, self.peers = group_name, rank, peers
        self._text = ""
        self.failed = ctypes.c_int32(0)
        self.limit_s = limit_s
        self._record, self._board = record, board
        self._words = (ctypes.c_int32 * RECORD_WORDS).from_address(record.data_ptr())
        self._raised = ctypes.c_int32.from_address(record.data_ptr() + 4 * Record.RAISED)
        self._bad_input = ctypes.c_int64.from_address(record.data_ptr() + 8 * BAD_INPUT_WORD)
        self._sites: list[str] = [""]
        self._lock = threading.RLock()
        self._alarmed: float | None = None
        self._told = ""
        self._looks = 0
        self._dead: set[int] = set()
        self._paused = False

    @property
    def text(self) -> str:
        """Why the group cannot be used; empty if it can. `failed`, which launches read, says whether."""
        return self._text

    @text.setter
    def text(self, text: str) -> None:
        self._text = text
        self.failed.value = bool(text)

    def guard(self, generation: ctypes.c_int32, chain: Chain) -> Guard:
        """Addresses of the values that `native_kernels/gpu/launch.cpp` compares before a launch."""
        raised, bad_input = map(ctypes.addressof, (self._raised, self._bad_input))
        return Guard(raised, bad_input, self.failed, generation, chain.last, chain.event)

    def number(self, site: str) -> int:
        """The number that stands for a site in failure records."""
        if site not in self._sites:
            self._sites.append(site)
        return self._sites.index(site)

    def check(self) -> None:
        """Raises RuntimeError if a kernel of the group gave up waiting, or read an index out of range.

        Never synchronises.
        """
        while self.text or self._raised.value or self._bad_input.value:
            self.look()
            if self.text:
                raise RuntimeError(self.text)
            time.sleep(0.01)

    def tell(self, problem: str) -> None:
        """This rank cannot go on: all ranks of the group fail for this reason."""
        with self._lock:
            self._told = self._told or problem
            self.look()

    def look(self) -> None:
        """Finds out whether something has failed; `watcher` asks this some times a second."""
        with self._lock:
            if self.text or self._paused:
                return
            self._look_for_the_slow()
            self._look_for_the_dead()
            world, now = range(len(self.peers)), time.monotonic()
            if self._alarmed is None:
                ours = self._raised.value or self._bad_input.value or self._told
                if not ours and not any(self._board.stage(r) for r in world):
                    return
                self._alarmed = now
                self._words[Record.STOP] = -1
                self._write(Stage.ALARMED)
            since = now - self._alarmed
            if since >= SETTLE_S and self._board.stage(self.rank) is not Stage.SETTLED:
                self._write(Stage.SETTLED)
            others = [self._board.stage(r) for r in world if r not in self._dead]
            if since >= PATIENCE_S or all(stage is Stage.SETTLED for stage in others):
                self.text = self._name()
                watcher.failed.add(self.group_name)
                log.error("%s", self.text)

    def pause(self) -> None:
        """Nothing fails until `forget`, which begins anew: no peer writes between them."""
        with self._lock:
            self._paused = True

    def forget(self) -> None:
        """The record and this rank's row are empty again; peers may not have come as far (`resume`)."""
        with self._lock:
            self._words[:] = [0] * RECORD_WORDS
            self._board.write(self.rank, Stage.FINE, [0] * RECORD_WORDS, "")
            self.text = self._told = ""
            self._alarmed = None

    def resume(self) -> None:
        """All ranks have forgotten."""
        with self._lock:
            self._paused = False
        watcher.failed.discard(self.group_name)

    def _write(self, stage: Stage) -> None:
        text = self._told
        if not text and self._bad_input.value:
            text = self._describe_input(self._bad_input.value)
        words = list(self._words)
        if not text:
            text = self._site(words[Record.CODE])
        words[Record.RAISED] = words[Record.RAISED] and not self._told and not self._bad_input.value
        words[Record.STOP] = bool(self._told or self._bad_input.value)
        self._board.write(self.rank, stage, words, text)

    def _look_for_the_slow(self) -> None:
        if not (word := self._words[Record.SLOW]):
            return
        self._words[Record.SLOW] = 0
        source, code = word >> SLOW_SOURCE_BIT, (word & (1 << SLOW_SOURCE_BIT) - 1) - 1
        limit = self.limit_s
        log.warning(
            "%s, rank %d of group %s: has waited %g of %g s for rank %d %s",
            *(self._site(code), self.rank, self.group_name, silent_s(limit), limit, source, _what(code)),
        )

    def _look_for_the_dead(self) -> None:
        """Waits for a rank whose process has ended give up, and those that do not know for whom they wait."""
        self._looks += 1
        if self._looks % LOOKS_PER_DEATH:
            return
        for r, peer in enumerate(self.peers):
            if r != self.rank and r not in self._dead and peer.is_dead():
                self._dead.add(r)
                self._words[Record.STOP] |= 1 << r | 1 << self.rank

    def _name(self) -> str:
        """What has failed; the same on all ranks that have read the same rows."""
        world = range(len(self.peers))
        alarmed = [r for r in world if self._board.stage(r)]
        rows = {r: self._board.words(r) for r in alarmed}
        for r in alarmed:
            if rows[r][Record.STOP]:
                return self._board.text(r)
        waits = {r: {s: rows[r][Record.WAITED + s] - 1 for s in world if s != r} for r in alarmed}
        for r in alarmed:
            if rows[r][Record.RAISED] and rows[r][Record.SOURCE] != r:
                waits[r][rows[r][Record.SOURCE]] = rows[r][Record.CODE]
            waits[r] = {s: code for s, code in waits[r].items() if code >= 0}
        lost = lost_rank(waits, self._dead)
        if lost is None:  # a wait for any rank, told by none
            return f"group {self.group_name}: a call has failed; rank {self.rank} cannot say why. {NOT_USED}"
        witness = min(r for r in waits if lost in waits[r])
        row, code = rows[witness], waits[witness][lost]
        tile = f"tile {row[Record.INDEX]}, " if row[Record.SOURCE] == lost else ""
        came = f"did not come {_what(code)} ({tile}call {row[Record.EPOCH]})"
        where = f"{self._board.text(witness) or 'a call'}, rank {witness} of group {self.group_name}"
        if lost in self._dead:
            return f"{where}: rank {lost} (pid {self.peers[lost].pid}) has died: it {came}. {NOT_USED}"
        return (
            f"{where}: rank {lost} {came} within {self.limit_s:g} s (AUTOFUSE_TIMEOUT_S sets the limit). "
            f"{NOT_USED}; has rank {lost} ended, or does it run another program?"
        )

    def _site(self, code: int) -> str:
        site = code // CODES_PER_SITE
        return self._sites[site] if site < len(self._sites) else "a call"

    def _describe_input(self, word: int) -> str:
        """As the kernel has it: code << 48 | table << 32 | index, or bag; of calls that overlap, the call."""
        code, table, value = word >> 48 & 0xFFFF, word >> 32 & 0xFFFF, ctypes.c_int32(word).value
        if code % CODES_PER_SITE == Wait.OVERLAP:
            return (
                f"two calls of group {self.group_name} ran at the same time on the GPU of rank {self.rank} "
                f"(at call {value & 0xFFFFFFFF}): graphs on two streams, parallel branches of one, or a "
                f"replay beside an eager call; order them by events, or give each its group. {NOT_USED}"
            )
        what = (
            f"index {value} of table {table} is outside of its rows"
            if code % CODES_PER_SITE == Wait.BAD_INDEX
            else f"bag {value} of table {table} ends before it starts or outside of the indices; "
            "offsets must ascend from 0 to at most the number of indices"
        )
        return f"{self._site(code)}, rank {self.rank} of group {self.group_name}: {what}. {NOT_USED}"


def lost_rank(waits: dict[int, dict[int, int]], dead: set[int]) -> int | None:
    """The rank for which all wait, in the end. waits[r][s]: the code of a wait of rank r for rank s.

    A dead one; else one that waits for nobody; else, as all wait in a circle, one of which more than sums is
    wanted: a rank computes sums only after it has heard from others.
    """
    wanted = [s for r in sorted(waits) for s in sorted(waits[r])]
    direct = [s for r in sorted(waits) for s, code in sorted(waits[r].items()) if not _is_sum(code)]
    idle = [s for s in wanted if not waits.get(s)]
    for found in ([s for s in wanted if s in dead], idle, direct, wanted):
        if found:
            return min(found)
    return None


def _is_sum(code: int) -> bool:
    return code % CODES_PER_SITE == Wait.COPYING


def _what(code: int) -> str:
    return _WAITS.get(Wait(code % CODES_PER_SITE), "")
