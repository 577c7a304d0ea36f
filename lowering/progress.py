"""Proves that kernels go on whichever of their programs are placed: all interleavings of a small world.

The abstract kernel is the one of `native_kernels/triton/shares.py`. Share s of a rank has a part A, which
sends piece s to every rank, and a part B, which waits for piece s of all ranks. Kernels differ in what comes
behind A:

    GATHER   part B is local
    SUM      part B sends a sum; a third part, which every program does for itself, waits for the sums of all
    TICKETS  instead of shares of B, tickets: sums in order, and `lag` later the sums of the peers
    LEFT     as GATHER; a program that leaves keeps its share of B, and the last program of the rank does it
    LENT     part B waits for all pieces and is local; the first program that decides about a share of the
             margin says whether its own program does it or one before the margin (`gather_words.cu`)

Some programs of each rank are late: they run when all others have ended or leave room. A state is what memory
holds and where every program is. `check` visits every state that some interleaving reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import combinations, product
from typing import Any


class Kind(Enum):
    """What comes behind part A."""

    GATHER = "gather"
    SUM = "sum"
    TICKETS = "tickets"
    LEFT = "left"
    LENT = "lent"


Where = tuple[str, int]
"""What a program does next, and with which share or ticket."""

START, SEND, LOOK, SCAN, ASK, DRAW, END = "start", "send", "look", "scan", "ask", "draw", "end"
WAIT, LOOK_B, SCAN_B, OWN, REDUCE, COPY = "wait", "look b", "scan b", "own", "reduce", "copy"
THROUGH, REST, BORROW = "through", "rest", "borrow"

LEAVER = -2
"""In the place of a claim: the program of the share has left. Of LENT: others do the share."""


@dataclass(frozen=True)
class Rank:
    """Local memory of a rank, and its programs; a claim is the number of the program, or -1."""

    programs: tuple[Where, ...]
    a: tuple[int, ...]
    b: tuple[int, ...]
    started: int = 0
    left: int = 0
    through: int = 0
    tickets: int = 0
    sent: tuple[int, ...] = ()
    added: tuple[int, ...] = ()


State = tuple[Rank, ...]


@dataclass(frozen=True)
class World:
    """A kernel on `ranks` ranks of `programs` programs, of which `firm` stay where a rank is not present.

    late[r]: programs of rank r that are placed late; absent: ranks that start when nothing else moves, and
    then all programs are placed in the order of their numbers.
    """

    kind: Kind
    ranks: int
    programs: int
    firm: int
    late: tuple[frozenset[int], ...]
    absent: frozenset[int] = frozenset()
    lag: int = 1

    def first(self) -> State:
        nobody = (-1,) * self.programs
        return (Rank(((START, 0),) * self.programs, nobody, nobody),) * self.ranks

    def steps(self, state: State, r: int, p: int) -> Iterator[State]:
        """Every state after the next step of program p of rank r; none if it must wait."""
        rank, (where, share) = state[r], state[r].programs[p]

        def go(to: str, share: int = 0, **changes: Any) -> State:
            programs = (*rank.programs[:p], (to, share), *rank.programs[p + 1 :])
            return (*state[:r], replace(rank, programs=programs, **changes), *state[r + 1 :])

        match where:
            case "start":
                if self.absent and p > rank.started:
                    return  # multiprocessors take programs in the order of their numbers
                changes: dict[str, Any] = {"started": rank.started + 1}
                claims = self.kind is Kind.LEFT or (p < self.firm and self._claims)
                if claims and rank.b[p] == -1:
                    changes["b"] = _put(rank.b, p, p)
                if rank.a[p] < 0:
                    yield go(SEND, p, a=_put(rank.a, p, p), **changes)
                else:
                    yield go(LOOK, **changes)
            case "send":
                assert share not in rank.sent, f"rank {r} sends piece {share} twice"
                yield go(LOOK, sent=(*rank.sent, share))
            case "look":
                yield go(ASK if rank.started == self.programs else SCAN)
            case "scan":
                found = _free(rank.a)
                yield go(ASK) if found < 0 else go(SEND, found, a=_put(rank.a, found, p))
            case "ask" if self.kind is Kind.LENT:
                if p < self.firm:
                    yield go(WAIT, p)
                elif rank.b[p] == LEAVER:
                    yield go(END)
                elif self._is_here(state, p):
                    yield go(WAIT, p, b=_put(rank.b, p, p))
                else:
                    yield go(END, left=rank.left + 1, b=_put(rank.b, p, LEAVER))
            case "borrow":
                if p >= self.firm or share >= self.programs:
                    yield go(END)
                elif rank.b[share] == share:
                    yield go(BORROW, share + self.firm)
                else:
                    yield go(WAIT, share, b=_put(rank.b, share, LEAVER))
            case "ask":
                stays = p < self.firm or all(other.started for other in state)
                if not stays and rank.started - rank.left > self.firm:
                    if self.kind is Kind.LEFT and rank.b[p] == p:
                        yield go(THROUGH, left=rank.left + 1, b=_put(rank.b, p, LEAVER))
                    else:
                        yield go(self._last, left=rank.left + 1)
                elif self.kind is Kind.TICKETS:
                    yield go(DRAW)
                elif rank.b[p] == p:
                    yield go(WAIT, p)
                elif rank.b[p] == -1:
                    yield go(WAIT, p, b=_put(rank.b, p, p))
                else:
                    yield go(LOOK_B)
            case "wait":
                if self._is_here(state, share):
                    assert share not in rank.added, f"rank {r} adds piece {share} twice"
                    added = (*rank.added, share)
                    if self.kind is Kind.LENT:
                        yield go(BORROW, share + self.firm, added=added)
                    else:
                        yield go(LOOK_B, added=added)
            case "look b":
                yield go(OWN if -1 not in rank.b else SCAN_B, p)
            case "scan b":
                found = _free(rank.b)
                yield go(OWN, p) if found < 0 else go(WAIT, found, b=_put(rank.b, found, p))
            case "own":
                if self.kind is not Kind.SUM or all(share in other.added for other in state):
                    yield go(self._last)
            case "through":
                rest = REST if rank.through == self.programs - 1 and LEAVER in rank.b else END
                yield go(rest, through=rank.through + 1)
            case "rest":
                found = rank.b.index(LEAVER)
                if all(found in other.sent for other in state):
                    b = _put(rank.b, found, p)
                    yield go(REST if LEAVER in b else END, b=b, added=(*rank.added, found))
            case "draw":
                yield go(*self._ticket(rank.tickets), tickets=rank.tickets + 1)
            case "reduce":
                if all(share in other.sent for other in state):
                    yield go(DRAW, added=(*rank.added, share))
            case "copy":
                if all(share in other.added for other in state):
                    yield go(DRAW)

    @property
    def _claims(self) -> bool:
        """Whether a program before the margin claims its share of B when it starts."""
        return self.kind not in (Kind.TICKETS, Kind.LENT)

    def _is_here(self, state: State, share: int) -> bool:
        """Whether what part B of a share waits for has come."""
        if self.kind is Kind.LENT:
            return all(len(other.sent) == self.programs for other in state)
        return all(share in other.sent for other in state)

    @property
    def _last(self) -> str:
        """What comes when a program has done all of its own."""
        return THROUGH if self.kind is Kind.LEFT else END

    def _ticket(self, number: int) -> Where:
        """Sums of this rank and, `lag` later, those of the peers, by turns."""
        if number >= 2 * (self.programs + self.lag):
            return END, 0
        share = number // 2 - (self.lag if number % 2 else 0)
        if not 0 <= share < self.programs:
            return DRAW, 0
        return (COPY if number % 2 else REDUCE), share

    def check(self) -> int:
        """AssertionError if a program waits forever, or a piece is not sent and added exactly once, or too
        many programs wait for an absent rank. The number of states."""
        everyone = frozenset((r, p) for r in range(self.ranks) for p in range(self.programs))
        late = frozenset((r, p) for r in range(self.ranks) for p in self.late[r])
        away = frozenset((r, p) for r, p in everyone if r in self.absent)
        begins, visited = {self.first()}, 0
        for stage in (everyone - late - away, everyone - late, everyone):
            ends = set[State]()
            seen, todo = set(begins), list(begins)
            while todo:
                state = todo.pop()
                moved = self._after(state, stage)
                if not moved:
                    ends.add(state)
                for after in moved:
                    if after not in seen:
                        seen.add(after)
                        todo.append(after)
            visited += len(seen)
            for state in ends:
                self._check_end(state, stage)
            begins = ends
        for state in begins:
            for r, rank in enumerate(state):
                whole = sorted(rank.sent) == sorted(rank.added) == list(range(self.programs))
                assert whole, f"{self}: rank {r} sent {rank.sent} and added {rank.added}"
        return visited

    def _after(self, state: State, stage: Iterable[tuple[int, int]]) -> list[State]:
        """The states after one step. A step that no other one can change or prevent is the only one."""
        for r, p in stage:
            if self._is_certain(state[r], p) and (after := list(self.steps(state, r, p))):
                return after
        return [after for r, p in stage for after in self.steps(state, r, p)]

    def _is_certain(self, rank: Rank, p: int) -> bool:
        """Whether no step of another program changes what this one does next."""
        match rank.programs[p][0]:
            case "look":
                return rank.started == self.programs
            case "scan":
                return -1 not in rank.a
            case "look b" | "scan b":
                return -1 not in rank.b
            case "ask":
                return p < self.firm and (not self._claims or rank.b[p] >= 0)
            case "borrow":
                share = rank.programs[p][1]
                return p >= self.firm or share >= self.programs or rank.b[share] != -1
            case where:
                return where in (SEND, WAIT, OWN, REDUCE, COPY, REST)

    def _check_end(self, state: State, stage: frozenset[tuple[int, int]]) -> None:
        waiting = {(r, p) for r, p in stage if state[r].programs[p][0] != END}
        if any(not rank.started for rank in state):
            for r in range(self.ranks):
                held = sum(q == r for q, _ in waiting)
                assert held <= self.firm, f"{self}: {held} programs of rank {r} wait for an absent rank"
        else:
            assert not waiting, f"{self}: {sorted(waiting)} wait forever in {state}"


def worlds(ranks: int, programs: int) -> Iterator[World]:
    """Every kind, margin and choice of late programs, of which rank 0 has the most, up to symmetry."""
    subsets = [frozenset(s) for n in range(programs) for s in combinations(range(programs), n)]
    for kind, firm in product(Kind, range(1, programs + 1)):
        for late in product(subsets, repeat=ranks):
            if sorted(map(sorted, late)) == list(map(sorted, late)):
                yield World(kind, ranks, programs, firm, late)
        yield World(kind, ranks, programs, firm, (frozenset[int](),) * ranks, frozenset([0]))


def _free(claims: tuple[int, ...]) -> int:
    return claims.index(-1) if -1 in claims else -1


def _put(claims: tuple[int, ...], share: int, program: int) -> tuple[int, ...]:
    return (*claims[:share], program, *claims[share + 1 :])
