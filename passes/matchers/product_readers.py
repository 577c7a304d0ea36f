"""Readers of a product, or of values within it, besides the collective."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from autofuse.lowering.reference.bags import CONTRACTION as BAGS
from autofuse.lowering.reference.grouped import CONTRACTION as GROUPED
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.layout import Layout
from autofuse.passes.graph.paths import all_below, between

from .contractions import Product


def stages_of(found: Product) -> frozenset[fx.Node]:
    """The inner nodes of a product of matmuls from its contraction on."""
    if found.contraction is None or found.stages[0].startswith((GROUPED, BAGS)):
        return frozenset()
    first, _ = found.contraction
    return found.inner & {first, *all_below([first])}


def readers_inside(found: Product) -> tuple[fx.Node, ...]:
    """Users of the values of `stages_of` that are no stages."""
    return tuple(u for u in _users(stages_of(found)) if u not in found.inner and u is not found.last)


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
    _hand_out(emitter, whole, found, found.last, found.last_layout)


def hand_out_contraction(emitter: Emitter, whole: fx.Node, found: Product) -> None:
    """Let the readers of the contraction read `whole`. Stages that others read are computed from it."""
    assert found.contraction is not None
    _hand_out(emitter, whole, found, *found.contraction)


def _hand_out(emitter: Emitter, whole: fx.Node, found: Product, node: fx.Node, layout: Layout) -> None:
    shape = emitter.shapes.of(node)
    emitter.replace(node, emitter.rebuild(whole, Layout.of(found.shape), layout, shape))
