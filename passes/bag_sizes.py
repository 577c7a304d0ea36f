"""Sizes of pooled rows `[B, D]` are taken from the offsets, or the indices, and the table.

A fused op does not return the rows of a bag. So a reader of their number would keep the bag in the graph.
"""

from __future__ import annotations

import operator

from torch import fx

from .graph.emit import origin
from .graph.follow import aten, tensor
from .matchers.bags import read_pooled


def sizes_from_offsets(graph: fx.Graph) -> None:
    """In place."""
    for node in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        pooled, dim = node.args
        bag = read_pooled(pooled)
        if bag is None:
            continue
        source, at = (bag.weight, 1) if dim % 2 else (bag.offsets or bag.indices, 0)
        val = tensor(source)
        assert val is not None
        with graph.inserting_before(node):
            size = graph.call_function(aten.sym_size.int, (source, at))
            size.meta.update(origin(node.meta), val=val.shape[at])
            if bag.include_last_offset and source is bag.offsets:
                size = graph.call_function(operator.sub, (size, 1))
                size.meta.update(origin(node.meta), val=node.meta["val"])
        node.replace_all_uses_with(size)
        graph.erase_node(node)
