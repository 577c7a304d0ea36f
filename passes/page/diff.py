"""Two listings of a graph as one text: common lines once, different lines side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby

from autofuse.passes.report import Line, Listing

CONTEXT = 2
"""Number of unchanged nodes that stay visible beside a change or a kept collective."""

SHORTEST_FOLD = 4
"""Number of nodes from which a run of unchanged nodes is folded."""


@dataclass(frozen=True)
class Block:
    """Consecutive nodes. Unchanged nodes are in `before` alone; long runs of them are `folded`."""

    before: tuple[Line, ...]
    after: tuple[Line, ...]
    changed: bool
    folded: bool
    moved: frozenset[str] = frozenset()
    """Names of nodes that are equal in the other graph, at another place."""


def blocks(before: Listing, after: Listing) -> list[Block]:
    """The graph from top to bottom."""
    old, new = before.lines, after.lines
    matcher = SequenceMatcher(None, _keys(old), _keys(new), autojunk=False)
    moved = frozenset(name for name, _ in {*_keys(old)} & {*_keys(new)})
    found: list[Block] = []
    for tag, i, stop, j, end in matcher.get_opcodes():
        if tag != "equal":
            found.append(Block(old[i:stop], new[j:end], True, False, moved))
        else:
            found += _fold(new[j:end], first=i == 0, last=stop == len(old))
    return found


def _keys(lines: Sequence[Line]) -> list[tuple[str, str]]:
    return [(line.name, line.text) for line in lines]


def _fold(lines: Sequence[Line], first: bool, last: bool) -> Iterator[Block]:
    """Unchanged lines, in runs; `first` and `last`: no change stands before or behind them."""
    near = [i for i, line in enumerate(lines) if line.site is not None]
    near += [] if first else [-1]
    near += [] if last else [len(lines)]
    visible = {i + d for i in near for d in range(-CONTEXT, CONTEXT + 1)}
    shown: tuple[Line, ...] = ()
    for is_near, group in groupby(range(len(lines)), key=visible.__contains__):
        run = tuple(lines[i] for i in group)
        if is_near or len(run) < SHORTEST_FOLD:
            shown += run
            continue
        if shown:
            yield Block(shown, (), False, False)
        yield Block(run, (), False, True)
        shown = ()
    if shown:
        yield Block(shown, (), False, False)
