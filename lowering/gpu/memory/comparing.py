"""Compares calls between ranks: sizes before a way is chosen, and whole calls before the first of a kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

Meet: TypeAlias = Callable[[str], list[str]]
"""As `GpuWorkspace.meet`."""

MOST_KINDS = 4096
"""Answers that a group remembers in one table."""


class Answers:
    """Answers that the ranks of a group have found together. Every question adds one entry on every rank, so
    the tables of all ranks are full, and cleared, at the same question."""

    def __init__(self) -> None:
        self._known: dict[Hashable, bool] = {}

    def get(self, question: Hashable) -> bool | None:
        """The answer; None if the ranks have not met for it."""
        return self._known.get(question)

    def find(self, question: Hashable, meet: Callable[[], bool], forgotten: Callable[[], object]) -> bool:
        """The answer. All ranks meet for it if they do not know it.

        forgotten: called when the table is full and all answers are dropped. Sizes may change without end, so
        tables are bounded."""
        found = self._known.get(question)
        if found is None:
            found = meet()
            if len(self._known) == MOST_KINDS:
                self._known.clear()
                forgotten()
            self._known[question] = found
        return found

    def clear(self) -> None:
        self._known.clear()


class Kinds(Answers):
    """Which kinds of calls all ranks of a group make alike."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self._group_name = group_name

    def are_alike(
        self, op: str, at: str, way: str, problem: Any, meet: Meet, forgotten: Callable[[], object]
    ) -> bool:
        """The answer of the function `are_alike`. All ranks meet before the first call of a kind.
        forgotten: as of `find`."""

        def compare() -> bool:
            return are_alike(meet(told_of(op, at, way, problem)), self._group_name)

        return self.find(kind_of(op, at, way, problem), compare, forgotten)


def kind_of(op: str, at: str, way: str, problem: Any) -> str:
    """What must be the same on all ranks that run a call fused: all but the sizes that the problem names in
    `free`."""
    free = getattr(problem, "free", ())
    return f"{op} at {at} ({way}; {_listed(problem, lambda name: name not in free)})"


def told_of(op: str, at: str, way: str, problem: Any) -> str:
    """Four texts: the whole call; its kind; all that must be the same on all ranks; and the sizes that may
    differ, which are those that the problem names in `own` or in `free`."""
    names = {*getattr(problem, "own", ()), *getattr(problem, "free", ())}
    text = f"{op} at {at} ({way}; {_listed(problem, lambda name: True)})"
    alike = f"{op} {at} {_listed(problem, lambda name: name not in names)}"
    kind = kind_of(op, at, way, problem)
    return json.dumps([text, kind, alike, _listed(problem, lambda name: name in names)])


def _listed(problem: Any, is_told: Callable[[str], bool]) -> str:
    sizes = {name: value for name, value in vars(problem).items() if name != "op" and is_told(name)}
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


def are_alike(told: Sequence[str], group_name: str) -> bool:
    """Whether all ranks make calls of one kind; False where they differ in sizes of their own alone.

    RuntimeError, with the texts of two ranks, for every other difference.
    """
    texts, kinds, alike, own = zip(*map(json.loads, told), strict=True)
    if len(set(kinds)) == 1:
        return True
    if len(set(alike)) == 1 and len(set(own)) > 1:
        return False
    raise _disagreement(kinds, texts, group_name)


def _disagreement(kinds: Sequence[str], texts: Sequence[str], group_name: str) -> RuntimeError:
    r = next(r for r, kind in enumerate(kinds) if kind != kinds[0])
    differ = f"rank 0 runs {texts[0]}, rank {r} runs {texts[r]}"
    return RuntimeError(f"group {group_name}: the ranks disagree: {differ}")


class Parts(Answers):
    """The calls for which all ranks of a group have parts of equal sizes. A rank chooses a way by its own
    sizes, so the ranks compare these sizes first.

    A question consists of the site, all that must be the same on all ranks, and this rank's own sizes. Two
    layers of a program may have equal sizes on one rank alone, so the site is part of the question.
    """

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self._group_name = group_name

    def are_equal(
        self, op: str, at: str, problem: Any, meet: Meet | None, forgotten: Callable[[], object]
    ) -> bool:
        """Whether kernels see the same sizes on all ranks. The ranks meet if this rank's sizes are new at the
        site. RuntimeError if anything differs except sizes that each rank may have of its own.

        meet: None if ranks cannot meet now; then sizes that were not compared count as equal. forgotten: as
        of `find`.
        """
        own, free = getattr(problem, "own", ()), getattr(problem, "free", ())
        if not own:
            return True
        # Without the rows, so that a new number of them costs no meeting here.
        apart = {"m", *own, *free}
        alike = f"{op} ({_listed(problem, lambda name: name not in apart)})"
        mine = _listed(problem, lambda name: name in own and name not in free)
        question = at, alike, mine
        if meet is None:
            return self.get(question) is not False
        told = json.dumps([alike, mine])
        return self.find(question, lambda: _are_equal(meet(told), self._group_name), forgotten)


def _are_equal(told: Sequence[str], group_name: str) -> bool:
    alike, own = zip(*map(json.loads, told), strict=True)
    if len(set(alike)) > 1:
        texts = [f"{call} of parts with {sizes}" for call, sizes in zip(alike, own, strict=True)]
        raise _disagreement(alike, texts, group_name)
    return len(set(own)) == 1
