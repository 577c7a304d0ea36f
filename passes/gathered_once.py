"""What several all_gathers bring is gathered once, for matmuls that read it in different layouts, too.

AG(x) @ v, AG(x)^T @ w        dgrad and wgrad, where a program gathers for each of them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .graph.anchors import Anchor
from .graph.emit import erase_unused
from .graph.paths import fixed_above
from .matchers.match import Match
from .merge import same_value

NEAR = 2
"""How many collectives of the group later the other one may be. Programs gather anew far behind, such as in a
backward, in order not to hold what was gathered."""


def gather_once(anchors: Sequence[Anchor], find: Callable[[int], tuple[Match, int] | None]) -> dict[int, int]:
    """Let the readers of a later gather read an equal, earlier one, and erase the later one.

    Only gathers that a fused op could replace; `find` returns its match and its number of ranks. Returns, by
    the index of the later one, that of the earlier.
    """
    first: list[int] = []
    again: dict[int, int] = {}
    seen = Counter[Any]()  # collectives, by group
    numbers: list[int] = []
    for i, anchor in enumerate(anchors):
        seen[anchor.group] += 1
        numbers.append(seen[anchor.group])
        if anchor.kind != "all_gather" or not anchor.waits:
            continue
        near = (j for j in first if anchors[j].group == anchor.group and numbers[i] - numbers[j] <= NEAR)
        earlier = next((j for j in near if _is_again(anchor, anchors[j])), None)
        if earlier is None:
            first.append(i)
            continue
        found, before = find(i), find(earlier)
        if found is None or before is None or not _may_stand_at(anchors[earlier], found[0]):
            continue
        _read(anchors[earlier], anchor)
        again[i] = earlier
    return again


def _is_again(anchor: Anchor, first: Anchor) -> bool:
    a, b = anchor.node, first.node
    return (
        a.target == b.target
        and a.args[1:] == b.args[1:]
        and a.kwargs == b.kwargs
        and same_value(anchor.input, first.input)
    )


def _may_stand_at(first: Anchor, found: Match) -> bool:
    """Whether the inputs of the later op, such as weights, need no collective behind the first gather."""
    inputs = [n for n in found.inputs if isinstance(n, fx.Node)]
    return all(fixed_above(n, first.node) is None for n in inputs)


def _read(first: Anchor, again: Anchor) -> None:
    wait = first.waits[0]
    if again.node < wait:
        again.node.prepend(wait)
    for node in again.results:
        node.replace_all_uses_with(wait)
    erase_unused([*again.results])
