"""Paths in a graph: the nodes between two nodes, and collectives on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from torch import fx

from .anchors import Anchor, is_collective


def between(n: fx.Node, below: fx.Node) -> frozenset[fx.Node]:
    """The nodes on all paths from `below` (excluded) to `n` (included)."""
    above = {n, *_above(n, below)}
    return frozenset(above & all_below([below]))


def depends_on(anchor: Anchor, nodes: Iterable[fx.Node]) -> fx.Node | None:
    """The first of `nodes` that is the collective or computed from its result; None if there is none."""
    first = anchor.node
    return next((n for n in nodes if n is first or first in _above(n, first)), None)


def _above(n: fx.Node, first: fx.Node) -> set[fx.Node]:
    """The nodes that `n` is computed from, from `first` on in the order of the graph."""
    found: set[fx.Node] = set()
    work = [n]
    while work:
        new = [i for i in work.pop().all_input_nodes if i not in found and not i < first]
        found.update(new)
        work += new
    return found


def all_below(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All nodes that are computed from given ones."""
    found: set[fx.Node] = set()
    work = list(nodes)
    while work:
        new = [user for user in work.pop().users if user not in found]
        found.update(new)
        work += new
    return found


def stops_above(node: fx.Node, stops: Set[fx.Node]) -> list[fx.Node]:
    """The first of `stops` on all ways up from a node, in the order of the graph."""
    seen: set[fx.Node] = set()
    work = [node]
    while work:
        above = work.pop()
        if above not in seen:
            seen.add(above)
            work += [] if above in stops else above.all_input_nodes
    return sorted(seen & stops)


def collective_above(node: fx.Node, first: fx.Node) -> fx.Node | None:
    """A collective behind `first` in the graph that `node` is, or is computed from; None if there is none."""
    seen: set[fx.Node] = set()
    work = [node]
    while work:
        n = work.pop()
        if n in seen or not first < n:
            continue
        if is_collective(n):
            return n
        seen.add(n)
        work.extend(n.all_input_nodes)
    return None


def outside_reader(anchor: Anchor, leaves: Sequence[fx.Node]) -> fx.Node | None:
    """A user, other than the collective, of one of `leaves` or of a node between them and the collective."""
    inside: set[fx.Node] = set()
    work = [anchor.input]
    while work:
        node = work.pop()
        if node not in inside:
            inside.add(node)
            if node not in leaves:
                work.extend(node.all_input_nodes)
    return next((u for n in inside for u in n.users if u not in inside and u is not anchor.node), None)


def collective_between(first: fx.Node, last: fx.Node) -> fx.Node | None:
    """A collective, fused or not, that stands between two nodes of a graph; None if there is none."""
    node = first.next
    while node is not last:
        if is_collective(node):
            return node
        node = node.next
    return None
