"""What the ranks of a group tell each other before the first call of a kind, and what follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any


def kind_of(op: str, at: str, way: str, problem: Any) -> str:
    """What must be the same on all ranks that run a call fused: all but the sizes that the problem names in
    `free`."""
    free = getattr(problem, "free", ())
    return f"{op} at {at} ({way}; {_listed(problem, lambda name: name not in free)})"


def told_of(op: str, at: str, way: str, problem: Any) -> str:
    """A call in words; its kind; what must be the same on all ranks in any case; and the sizes that need not
    be, those that the problem names in `own` or in `free`."""
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
    r = next(r for r, kind in enumerate(kinds) if kind != kinds[0])
    differ = f"rank 0 runs {texts[0]}, rank {r} runs {texts[r]}"
    raise RuntimeError(f"group {group_name}: the ranks disagree: {differ}")
