"""Which all_reduces of gradients one kernel for GPUs can take together, by what costs little to find out."""

from __future__ import annotations

from typing import TypeAlias
from weakref import WeakKeyDictionary

from torch import fx

from autofuse.lowering.buckets import BUCKET
from autofuse.lowering.ops.all_reduce_update import MOST_BUCKETS
from autofuse.passes.graph.anchors import Anchor, find_anchors
from autofuse.passes.graph.follow import dtype_of, tensor
from autofuse.passes.graph.paths import all_below, fixed_above

from .sum_parts import elements, parts_of
from .update_rule import changed

Names: TypeAlias = tuple[str, ...]


def run_of(anchor: Anchor) -> list[Anchor]:
    """The all_reduces like that of the anchor, in their order, that have up to MOST_BUCKETS buckets with it.
    No gradient of them is computed from what a collective behind the first one returns."""
    graph = anchor.node.graph
    every = {a.node.name: a for a in find_anchors(graph)}
    known = _known.get(graph)
    if known is None or known[0] != tuple(every):
        known = _known[graph] = tuple(every), _runs([*every.values()])
    run = next((run for run in known[1] if anchor.node.name in run), (anchor.node.name,))
    return [every[name] for name in run]


def _runs(anchors: list[Anchor]) -> list[Names]:
    alike: dict[object, list[tuple[Anchor, int]]] = {}
    for anchor in anchors:
        parts = parts_of(anchor) if anchor.kind == "all_reduce" else []
        size = sum(-(-elements(part) // BUCKET) for part in parts) if _is_static(anchor) else 0
        if 0 < size <= MOST_BUCKETS:
            # Of the gradients, and of all that changes by one of them.
            dtypes = {tuple(sorted(str(dtype_of(node)) for node in changed(part))) for part in parts}
            kind = anchor.group, anchor.reduce_op, dtype_of(anchor.input), *sorted(dtypes)
            alike.setdefault(kind, []).append((anchor, size))
    return [run for members in alike.values() for run in _cut(members)]


def _cut(members: list[tuple[Anchor, int]]) -> list[Names]:
    below = all_below(anchor.node for anchor, _ in members)
    runs: list[list[Anchor]] = []
    left = 0
    for anchor, size in members:
        if anchor.input in below:
            continue
        left -= size
        if left < 0 or fixed_above(anchor.input, runs[-1][0].node) is not None:
            runs.append([])
            left = MOST_BUCKETS - size
        runs[-1].append(anchor)
    return [tuple(anchor.node.name for anchor in run) for run in runs]


def _is_static(anchor: Anchor) -> bool:
    val = tensor(anchor.node)
    return val is not None and all(isinstance(size, int) for size in val.shape)


_known: WeakKeyDictionary[fx.Graph, tuple[Names, list[Names]]] = WeakKeyDictionary()
"""Runs of a graph with these collectives. Names, since a node would keep its graph."""
