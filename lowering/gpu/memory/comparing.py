"""What the ranks of a group tell each other before the first call of a kind, and what follows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def told_of(op: str, at: str, way: str, problem: Any) -> str:
    """A call in words; what must be the same on all ranks; and what need not be, the fields of a problem that
    it names in `own`."""
    names = getattr(problem, "own", ())
    sizes = {name: value for name, value in vars(problem).items() if name != "op"}
    alike = {name: value for name, value in sizes.items() if name not in names}
    own = {name: value for name, value in sizes.items() if name in names}
    text = f"{op} at {at} ({way}; {_listed(sizes)})"
    return json.dumps([text, f"{op} {at} {_listed(alike)}", _listed(own)])


def _listed(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


def are_alike(told: Sequence[str], group_name: str) -> bool:
    """Whether all ranks make the same call; False where they differ in fields of their own alone.

    RuntimeError, with the texts of two ranks, for every other difference.
    """
    texts, alike, own = zip(*map(json.loads, told), strict=True)
    if len(set(texts)) == 1:
        return True
    if len(set(alike)) == 1 and len(set(own)) > 1:
        return False
    r = next(r for r, text in enumerate(texts) if text != texts[0])
    differ = f"rank 0 runs {texts[0]}, rank {r} runs {texts[r]}"
    raise RuntimeError(f"group {group_name}: the ranks disagree: {differ}")
