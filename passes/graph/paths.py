"""Paths in a graph: the nodes between two nodes, and which of them may move.

Collectives keep their sequence on every rank, also those of different groups: of three groups that share
ranks in pairs, each rank could otherwise wait for another one. So nothing moves a collective past another.
Random numbers keep their sequence, too, since each depends on how many were drawn before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

import torch
from torch import fx

from .anchors import Anchor, is_collective
from .follow import WAIT, tensor


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


def fixed_above(node: fx.Node, first: fx.Node) -> fx.Node | None:
    """A node behind `first` in the graph that `node` is, or is computed from, and that cannot move to before
    `first`; None if there is none."""
    above = (n for n in {node, *_above(node, first)} if first < n)
    fixed = (n for n in above if is_fixed(n) or (_draws(n) and any(map(_draws, nodes_between(first, n)))))
    return min(fixed, default=None)


def move_behind(users: Sequence[fx.Node], node: fx.Node) -> list[fx.Node] | None:
    """The nodes that come behind `node`, in this order, if `users` do; None if one of them cannot."""
    below = {*users, *all_below(users)}
    moved = sorted(n for n in below if n < node)
    if node in below or any(map(is_fixed, moved)):
        return None
    drawn = next(filter(_draws, moved), None)
    if drawn is not None and any(_draws(n) and n not in below for n in nodes_between(drawn, node)):
        return None
    return moved


def is_fixed(n: fx.Node) -> bool:
    """Whether nothing may change places with the node: a collective, or an op that changes memory or has
    other effects."""
    return is_collective(n) or (n.target is not WAIT and not _draws(n) and n.is_impure())


def _draws(n: fx.Node) -> bool:
    """Whether the node draws random numbers."""
    tags = getattr(n.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or "rng_state" in str(n.target)


def outside_reader(anchor: Anchor, leaves: Sequence[fx.Node]) -> fx.Node | None:
    """A user, other than the collective, of one of `leaves` or of a node between them and the collective."""
    inside: set[fx.Node] = set()
    work = [anchor.input]
    while work:
        node = work.pop()
        if node not in inside:
            inside.add(node)
            if node not in leaves:
                work.extend(n for n in node.all_input_nodes if tensor(n) is not None)  # no sizes of views
    return next((u for n in inside for u in n.users if u not in inside and u is not anchor.node), None)


def nodes_between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes that stand between two nodes of a graph."""
    node = first.next
    while node is not last:
        yield node
        node = node.next
