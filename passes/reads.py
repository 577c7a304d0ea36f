"""Reads the splits of a fused op from a GPU in one copy, as late as possible.

In a graph, `splits.tolist()` is one copy for each rank, and the host waits for every copy. The GPU has
nothing to do from the first wait to the launch of the fused op. So all numbers are copied at once. The host
waits behind all kernels that the fused op needs and that do not depend on the numbers:

    before    v -> copy, wait, copy, wait, ...  w -> copy, wait, ...  kernels of x  more kernels  fused op
    after     v, w -> copy                                      kernels of x  wait  more kernels  fused op
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from autofuse.lowering import host_reads as _host_reads  # noqa: F401  (registers the ops)

from .graph.anchors import is_collective, is_fused_op
from .graph.emit import Emitter, erase_unused, order_nodes
from .graph.follow import Shapes, aten, tensor
from .graph.paths import all_below

MOST_STORED = 4096
"""Most elements of a tensor that is computed before the copy although the fused op does not take it. Inductor
stores such a tensor. Otherwise it might compute the tensor where it is read."""

_READ = aten._local_scalar_dense.default


@dataclass(frozen=True)
class _Number:
    """Element `at` of `vector`, which the host reads in `item`."""

    item: fx.Node
    vector: fx.Node
    at: int


def read_at_once(graph: fx.Graph) -> None:
    """Replace such reads of a graph in place."""
    if not graph.find_nodes(op="call_function", target=_READ):
        return
    for op in [node for node in graph.nodes if is_fused_op(node)]:
        numbers = _numbers(op)
        vectors = list(dict.fromkeys(number.vector for number in numbers))
        if len(numbers) > 1 and _are_alike(vectors):
            late = _late(graph, [number.item for number in numbers])
            if late.isdisjoint(vectors):
                _read_before(op, numbers, vectors, late)


def _numbers(op: fx.Node) -> list[_Number]:
    """The numbers from which the sizes and splits of the op are computed."""
    found: dict[fx.Node, _Number] = {}
    seen, stack = {op}, [op]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in seen or tensor(source) is not None:
                continue
            seen.add(source)
            number = _number(source)
            if number is None:
                stack.append(source)
            else:
                found[source] = number
    return [*found.values()]


def _number(item: fx.Node) -> _Number | None:
    """None for what is no element of a vector on a GPU."""
    if item.target is not _READ:
        return None
    select = item.args[0]
    if not isinstance(select, fx.Node) or select.target is not aten.select.int:
        return None
    vector, _, at = select.args
    if not isinstance(vector, fx.Node) or not isinstance(at, int):
        return None
    val = tensor(vector)
    if val is None or val.dim() != 1 or val.device.type == "cpu" or not isinstance(val.shape[0], int):
        return None
    return _Number(item, vector, at % val.shape[0])


def _are_alike(vectors: list[fx.Node]) -> bool:
    """Whether `cat` joins them as they are."""
    kinds = {(val.dtype, val.device) for val in map(tensor, vectors) if val is not None}
    return len(kinds) == 1


def _late(graph: fx.Graph, items: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that cannot stand before the reads `items`: the reads, the nodes that depend on them, and the
    nodes that depend on a collective behind the first dependent one. Collectives do not change places."""
    dependent = {*items, *all_below(items)}
    late = set(dependent)
    behind = False
    for node in graph.nodes:
        behind = behind or (node in dependent and is_collective(node))
        if (behind and is_collective(node)) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def _read_before(op: fx.Node, numbers: list[_Number], vectors: list[fx.Node], late: set[fx.Node]) -> None:
    begins = Emitter(_behind(vectors), Shapes())
    values = vectors[0] if len(vectors) == 1 else begins.call(aten.cat.default, vectors)
    begun = begins.call(torch.ops.autofuse.begin_read.default, values)
    emitter = Emitter(op, Shapes())
    starts, end = {}, 0
    for vector in vectors:
        starts[vector] = end
        end += tensor(vector).shape[0]  # type: ignore[union-attr]
    launched = _launched(op, late, {number.item for number in numbers})
    read = emitter.call(torch.ops.autofuse.read.default, begun, launched)
    selects = []
    for number in numbers:
        selects += number.item.all_input_nodes
        at = starts[number.vector] + number.at
        number.item.args = (emitter.call(aten.select.int, read, 0, at),)
    erase_unused(selects)
    order_nodes(op.graph)


def _behind(vectors: list[fx.Node]) -> fx.Node:
    """The first node behind the vectors that is no input of the graph."""
    places = {node: i for i, node in enumerate(vectors[0].graph.nodes)}
    node = max(vectors, key=places.__getitem__).next
    while node.op == "placeholder":
        node = node.next
    return node


def _launched(op: fx.Node, late: set[fx.Node], items: set[fx.Node]) -> list[fx.Node]:
    """The tensors that are computed before the host waits. None of them is late. They are inputs of the op,
    and small tensors from which late inputs of the op are computed."""
    found: dict[fx.Node, None] = {}
    seen, stack = {op, *items}, [op]
    while stack:
        node = stack.pop()
        for source in node.all_input_nodes:
            if source in late:
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
            elif source.op == "call_function" and (node is op or _is_small(source)):
                found[source] = None
    return [node for node in found if isinstance(tensor(node), torch.Tensor)]


def _is_small(node: fx.Node) -> bool:
    val = tensor(node)
    if val is None or val.device.type == "cpu":
        return False
    numel = val.numel()
    return isinstance(numel, int) and numel <= MOST_STORED
