"""Results share memory with other results, and with inputs, only where the program made them share it.

A caller may change a result in place. A rewrite may let two results read one tensor: a fused op returns the
gathered matrix once, where the program returns the matrix and its clone. Such a result is copied.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence

from torch import fx

from .graph.follow import SPLITS, WAIT, aten, tensor

_SHARES_MEMORY = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.t.default,
    aten.transpose.int, aten.select.int, aten.slice.Tensor, aten.expand.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, aten.detach.default,
    aten.as_strided.default, WAIT,
}  # fmt: skip
_VISIBLE = "user_visible_output_idxs"
"""Where Inductor keeps which outputs the caller gets. The others are kept for the backward."""


class Returned:
    """Which results of a graph share memory before it is rewritten."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._before = [_memory(node) for node in _results(graph)]

    def keep_apart(self) -> None:
        """Copy results of the rewritten graph that share memory with a result, or an input, as they did not
        before."""
        output, first = self._graph.output_node(), dict[Hashable, int]()
        visible = output.meta.get(_VISIBLE)
        results = _results(self._graph)
        for i, (node, before) in enumerate(zip(results, self._before, strict=True)):
            if not isinstance(node, fx.Node) or tensor(node) is None:
                continue
            memory = _memory(node)
            j = first.setdefault(memory, i)
            is_input = isinstance(memory, fx.Node) and memory.op == "placeholder" and memory is not before
            is_seen = visible is None or i in visible or (j in visible and not is_input)
            if is_seen and (is_input or self._before[j] != before):
                results[i] = self._copy(node)
        if results:
            output.args = (type(output.args[0])(results),)

    def _copy(self, node: fx.Node) -> fx.Node:
        """Made before the graph may store to its inputs, at its end."""
        behind = node if node.op != "placeholder" else self._graph.find_nodes(op="placeholder")[-1]
        with self._graph.inserting_after(behind):
            copy = self._graph.call_function(aten.clone.default, (node,))
        copy.meta.update(val=node.meta["val"])
        return copy


def _results(graph: fx.Graph) -> list[object]:
    (results,) = graph.output_node().args
    return list(results) if isinstance(results, Sequence) else []


def _memory(node: object) -> Hashable:
    """What has the memory of a result: a node, or one of the tensors that a node returns."""
    while isinstance(node, fx.Node):
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(source, fx.Node):
            if source.target not in SPLITS:
                return source, node.args[1]
            node = source.args[0]
        elif node.target in _SHARES_MEMORY and isinstance(source, fx.Node):
            node = source
        else:
            return node
    return id(node)
