"""By what the calls of a fused site are known when they run: `SiteKey`, read off the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from autofuse.lowering.runs import SiteKey

from .graph.anchors import fused_op, is_fused_op
from .graph.follow import value
from .graph.functional import arguments


def fused_ops(sites: Mapping[int, Iterable[fx.Node]]) -> dict[int, tuple[fx.Node, frozenset[str]]]:
    """By site, the fused op among its new nodes, and the names of its inputs."""
    return {
        i: (node, frozenset(n.name for n in node.all_input_nodes))
        for i, nodes in sites.items()
        for node in nodes
        if is_fused_op(node)
    }


def ops_now(graph: fx.Graph, ops: Mapping[int, tuple[fx.Node, frozenset[str]]]) -> dict[int, fx.Node]:
    """By site, its op. One that has been merged, or has got a tail, is found by its inputs."""
    ours = [node for node in graph.nodes if is_fused_op(node)]
    found: dict[int, fx.Node] = {}
    for i, (op, inputs) in ops.items():
        node = op if not op._erased else max(ours, key=lambda n: len(inputs & _names(n)), default=None)
        if node is not None:
            found[i] = node
    return found


def site_keys(ops: Mapping[int, fx.Node]) -> dict[int, SiteKey]:
    """By site, what the calls of its op are known by."""
    found = {i: _key(node) for i, node in ops.items()}
    return {i: key for i, key in found.items() if key is not None}


def _names(node: fx.Node) -> set[str]:
    return {n.name for n in node.all_input_nodes}


def _key(node: fx.Node) -> SiteKey | None:
    op, given = fused_op(node), arguments(node)
    if op is None or given is None:
        return None
    return op.key(op.parse(tuple(fx.node.map_arg(list(given.values()), value))))
