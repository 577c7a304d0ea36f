"""Merges fused ops: reductions whose results are added, and gathers of one input.

AR(a @ v) + AR(b @ w) = AR(a @ v + b @ w)     likewise for reduce_scatter; in float32 only, since a narrow
                                              dtype rounds each of the two sums
AG(x) @ v, AG(x) @ w                          one op with both weights
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .graph.anchors import is_fused
from .graph.emit import Emitter, erase_unused, order_nodes
from .graph.follow import Shapes, argument, aten, dtype_of, follow, is_cast, is_view
from .graph.layout import Layout
from .graph.paths import between, collective_above
from .matchers.match import fill_biases

_REDUCTIONS = (
    torch.ops.autofuse.matmul_all_reduce.default,
    torch.ops.autofuse.matmul_reduce_scatter.default,
)
_GATHER = torch.ops.autofuse.all_gather_matmul.default


def merge_fused(graph: fx.Graph) -> None:
    """Merge the fused ops of `graph` in place. Reductions have no tails yet: those come after it."""
    for node in list(graph.nodes):
        if not node._erased and _is_plain_sum(node) and not _is_inner(node):
            _merge_sum(node)
    gathers = list(graph.find_nodes(op="call_function", target=_GATHER))
    while gathers:
        first, *rest = gathers
        twins = [n for n in rest if _is_twin(n, first)]
        if twins:
            _merge_gathers([first, *twins])
        gathers = [n for n in rest if n not in twins]


# --- reductions that are added ------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """A term of a sum: `node` is a view, with layout `layout`, of `item`, the reduced output of the op
    `op`."""

    node: fx.Node
    op: fx.Node
    item: fx.Node
    layout: Layout

    @property
    def key(self) -> tuple[Any, ...]:
        """Values that must be equal for terms that are merged."""
        place = self.op.args[4:-6]  # reduce op, dim, outer, keep
        return (self.op.target, *place, self.op.args[-3], self.layout, Shapes().of(self.item))


def _is_plain_sum(node: fx.Node) -> bool:
    """Whether the node is `a + b` of float32 tensors of one shape."""
    if node.target is not aten.add.Tensor or argument(node, 2, "alpha", 1) != 1:
        return False
    a, b = node.args[:2]
    shapes = Shapes()
    return (
        dtype_of(node) == torch.float32
        and isinstance(a, fx.Node)
        and isinstance(b, fx.Node)
        and a is not b
        and dtype_of(a) == dtype_of(b) == torch.float32
        and shapes.of(a) == shapes.of(b) == shapes.of(node)
    )


def _is_inner(node: fx.Node) -> bool:
    """Whether the only user of a sum is another sum."""
    return len(node.users) == 1 and all(map(_is_plain_sum, node.users))


def _merge_sum(total: fx.Node) -> None:
    groups: dict[tuple[Any, ...], list[Term]] = {}
    for node in _summands(total):
        term = _term(node)
        if term is not None:
            groups.setdefault(term.key, []).append(term)
    for terms in groups.values():
        if len(terms) > 1:
            _rewrite_sum(sorted(terms, key=lambda t: t.op))


def _summands(total: fx.Node) -> list[fx.Node]:
    """The summands of a tree of sums, of which only the root may have several users."""
    found: list[fx.Node] = []
    for side in total.all_input_nodes:
        found += _summands(side) if _is_plain_sum(side) and _is_inner(side) else [side]
    return found


def _term(node: fx.Node) -> Term | None:
    """The term that `node` is; None if it is no view of a reduction, or if the reduction has other users."""
    followed = follow(node, is_fused, Shapes())
    if followed is None or len(followed.leaves) != 1:
        return None
    item = followed.leaves[0]
    op = item.args[0]
    assert isinstance(op, fx.Node)
    if op.target not in _REDUCTIONS or list(op.users) != [item] or item.args[1] != 0:
        return None  # the product has users, too
    contraction, *stages = str(op.args[3]).split("; ")
    path = between(node, item) | {item}
    if stages or contraction not in ("mm", "addmm %0") or any(len(n.users) != 1 for n in path):
        return None
    return Term(node, op, item, followed.layout)


def _rewrite_sum(terms: Sequence[Term]) -> None:
    """Replace the last term by one op that reduces all terms, and remove the other terms from the sum."""
    *others, last = terms
    ops = sorted((t.op for t in terms), key=lambda op: op.args[3] == "mm")  # an addmm comes first
    x, w, operands = ([entry for op in ops for entry in op.args[i]] for i in range(3))
    product = "; ".join([str(ops[0].args[3]), *(f"add %{i}" for i in range(1, len(operands)))])
    emitter = Emitter(last.op, Shapes())
    site = "+".join(dict.fromkeys(str(t.op.args[-1]) for t in terms))
    fused = emitter.call(last.op.target, x, w, operands, product, *last.op.args[4:-1], site)
    last.item.replace_all_uses_with(emitter.item(fused, 0))
    for term in others:
        (reader,) = term.node.users
        a, b = reader.args[:2]
        reader.replace_all_uses_with(b if a is term.node else a)
        erase_unused([reader])
    erase_unused([last.item])


# --- gathers of one input -----------------------------------------------------------------------------


def _is_twin(node: fx.Node, first: fx.Node) -> bool:
    """Whether `node` gathers the input of `first`, with weights that no later collective computes."""
    place = slice(3, 5), slice(6, 8)
    if any(node.args[p] != first.args[p] for p in place) or not same_value(node.args[0], first.args[0]):
        return False
    inputs = [n for n in node.all_input_nodes if n is not node.args[0]]
    return all(collective_above(n, first.prev) is None for n in inputs)


def same_value(a: object, b: object) -> bool:
    """Whether two arguments are the same node, or the same view or cast of one node."""
    if a is b or not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return a is b or a == b
    if (
        not (is_view(a) or is_cast(a))
        or a.target != b.target
        or a.kwargs != b.kwargs
        or len(a.args) != len(b.args)
    ):
        return False
    return all(map(same_value, a.args, b.args))


def _merge_gathers(ops: Sequence[fx.Node]) -> None:
    """Replace the first gather by one op with the weights of all gathers, and erase the others."""
    first = ops[0]
    weights: list[list[fx.Node]] = [list(op.args[1]) for op in ops]
    biases: list[fx.Node | None] = []
    for op, w in zip(ops, weights, strict=True):
        biases += list(op.args[2]) or [None] * len(w)
    every = [n for w in weights for n in w]
    keep = any(op.args[5] for op in ops)
    emitter = Emitter(first, Shapes())
    x = first.args[0]
    assert isinstance(x, fx.Node)
    site = "+".join(dict.fromkeys(str(op.args[-1]) for op in ops))
    bias = fill_biases(emitter, x, biases)
    fused = emitter.call(_GATHER, x, every, bias, *first.args[3:5], keep, *first.args[6:8], site)
    position = 0
    items = []
    for op, w in zip(ops, weights, strict=True):
        for item in op.users:
            index = item.args[1]
            assert isinstance(index, int)
            place = len(every) if index == len(w) else position + index
            items.append((item, emitter.item(fused, place)))
        position += len(w)
    for old, new in items:
        old.replace_all_uses_with(new)
        erase_unused([old])
    order_nodes(first.graph)
