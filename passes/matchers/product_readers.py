"""Readers of a product, or of values within it, besides the collective."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from autofuse.lowering.reference.bags import CONTRACTION as BAGS
from autofuse.lowering.reference.grouped import CONTRACTION as GROUPED
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import aten, is_view
from autofuse.passes.graph.layout import Layout, Size
from autofuse.passes.graph.paths import between

from .contractions import Product

_OF_ROWS = (aten.add.Tensor, aten.where.self)
"""Stages of a `grouped` product that others may read."""


def readable(found: Product) -> frozenset[fx.Node]:
    """The values within a product that others may read, too.

    The fused op returns the contraction, and torch computes the other values from it. Of a `grouped` product
    these are its rows with a bias or a mask.
    """
    bags, grouped = (found.stages[0].startswith(name) for name in (BAGS, GROUPED))
    if found.contraction is None or bags or (grouped and len(found.x) > 1):
        return frozenset()
    values = {found.contraction.node}
    work = [found.contraction.node]
    while work:
        new = [u for u in work.pop().users if u in found.inner and u not in values]
        new = [u for u in new if not grouped or is_view(u) or u.target in _OF_ROWS]
        values.update(new)
        work += new
    return frozenset(values)


def readers_inside(found: Product) -> tuple[fx.Node, ...]:
    """Users of the values that are `readable`, outside of the product."""
    return tuple(u for u in _users(readable(found)) if u not in found.inner and u is not found.last)


def extra_users(end: fx.Node, source: fx.Node, found: Product) -> tuple[fx.Node, ...]:
    """Users, other than `end`, of the finished product or of views of it between the product and `end`."""
    path = {found.last} | between(source, found.last)
    for head, _ in found.heads:
        path |= {head} | between(source, head)
    return tuple(u for u in _users(path) if u not in path and u is not end)


def _users(nodes: Iterable[fx.Node]) -> Iterable[fx.Node]:
    """Each user once, in the order of the graph's nodes that it reads."""
    return dict.fromkeys(u for n in sorted(nodes) for u in n.users)


def hand_out_product(emitter: Emitter, whole: fx.Node, found: Product) -> None:
    """Let the readers of the finished product read `whole`, which has the product's shape."""
    _hand_out(emitter, whole, found.last, found.last_layout, found.shape)


def hand_out_contraction(emitter: Emitter, whole: fx.Node, found: Product) -> None:
    """Let the readers of the contraction read `whole`. Stages that others read are computed from it."""
    assert found.contraction is not None
    _hand_out(emitter, whole, *found.contraction)


def _hand_out(
    emitter: Emitter, whole: fx.Node, node: fx.Node, layout: Layout, shape: tuple[Size, ...]
) -> None:
    emitter.replace(node, emitter.rebuild(whole, Layout.of(shape), layout, emitter.shapes.of(node)))
