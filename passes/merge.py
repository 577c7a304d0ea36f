"""Merges fused ops: reductions whose results are added, and gathers of one input.

AR(a @ v) + AR(b @ w) = AR(a @ v + b @ w)     likewise for reduce_scatter; other summands may lie between
AG(x) @ v, AG(x) @ w                          one op with both weights

In bfloat16 the sum of two reductions is rounded three times, and the merged one once. Reductions in float16
are not merged: the sum of two products of one rank may exceed the range of float16, although the sums over
the ranks do not.

In two cases the merged op computes one product and adds the others, which torch multiplies. Under autocast
products in bfloat16 are rounded one by one, and their reductions are in float32. A layer of experts adds the
rows of the experts that a router chose, and the product of those that see every token.

Ranks must merge the same ops. That depends on who reads what was reduced, and on the form of products, which
are those of the program that all ranks run. The site of a merged op names all that it was merged from, also
where these are calls of one line: ranks compare it, and find out if one of them has not merged.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autofuse.lowering.reference.product import keeps_contraction, without_keep

from .graph.anchors import is_fused
from .graph.emit import Emitter, erase_unused, order_nodes
from .graph.follow import Shapes, argument, aten, dtype_of, follow, is_cast, is_view
from .graph.layout import Layout
from .graph.paths import between, fixed_above
from .matchers.match import fill_biases

_REDUCTIONS = (
    torch.ops.autofuse.matmul_all_reduce.default,
    torch.ops.autofuse.matmul_reduce_scatter.default,
)
_GATHER = torch.ops.autofuse.all_gather_matmul.default
_WIDE = (torch.float32, torch.bfloat16)
_PLAIN = re.compile(r"(mm|addmm %0)(; add %\d+)*")
"""Products of matmuls to which tensors are added. One rank may add a bias that the others do not have."""
_WIDENED = re.compile(rf"{_PLAIN.pattern}; to float32(; add %\d+)*")
_ADDED = re.compile(r"; add %(\d+)$")
_ROWS = re.compile(r"grouped\b(?!.*; (add|sub) ).*; (sum|fold) ")
"""Products that add up the rows of experts, and nothing else yet."""


def merge_fused(graph: fx.Graph) -> None:
    """Merge the fused ops of `graph` in place. Reductions have no tails yet: those come after it."""
    for summands in sums(graph):
        _merge_sum(summands)
    gathers = list(graph.find_nodes(op="call_function", target=_GATHER))
    while gathers:
        first, *rest = gathers
        twins = [n for n in rest if _is_twin(n, first)]
        if twins:
            _merge_gathers([first, *twins])
        gathers = [n for n in rest if n not in twins]


# --- reductions that are added ------------------------------------------------------------------------


@dataclass(frozen=True)
class Summand:
    """`node` is a view, with layout `layout`, of the reduced value `item`, or of `item` in float32. Nothing
    else reads `item`."""

    node: fx.Node
    item: fx.Node
    layout: Layout

    @property
    def key(self) -> tuple[Any, ...]:
        """Values that must be equal for summands that are merged."""
        return self.layout, dtype_of(self.item), Shapes().of(self.item)


def sums(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The summands of every outermost sum. The graph may change between two of them."""
    for node in list(graph.nodes):
        if not node._erased and _is_plain_sum(node) and not _is_inner(node):
            yield _summands(node)


def summand_of(node: fx.Node, is_reduced: Callable[[fx.Node], bool]) -> Summand | None:
    """None if `node` is no view of a reduced value, or if others read that, too."""
    followed = follow(node, is_reduced, Shapes(), through=torch.float32)
    if followed is None or len(followed.leaves) != 1:
        return None
    item = followed.leaves[0]
    if dtype_of(item) not in _WIDE or any(len(n.users) != 1 for n in between(node, item) | {item}):
        return None
    return Summand(node, item, followed.layout)


def _is_plain_sum(node: fx.Node) -> bool:
    """Whether the node is `a + b` of tensors of one dtype, which has the range of float32. One of them at
    least has the shape of the sum; a bias is broadcast to it."""
    if node.target is not aten.add.Tensor or argument(node, 2, "alpha", 1) != 1:
        return False
    a, b = node.args[:2]
    return (
        dtype_of(node) in _WIDE
        and isinstance(a, fx.Node)
        and isinstance(b, fx.Node)
        and a is not b
        and dtype_of(a) == dtype_of(b) == dtype_of(node)
        and (_is_whole(a, node) or _is_whole(b, node))
    )


def _is_whole(side: fx.Node, total: fx.Node) -> bool:
    """Whether a side of a sum is not broadcast."""
    return Shapes().alike(side, total)


def _is_inner(node: fx.Node) -> bool:
    """Whether the only user of a sum is another sum, of the same shape."""
    return len(node.users) == 1 and all(_is_plain_sum(user) and _is_whole(node, user) for user in node.users)


def _merge_sum(summands: Sequence[fx.Node]) -> None:
    groups: dict[tuple[Any, ...], list[Summand]] = {}
    for node in summands:
        summand = summand_of(node, is_fused)
        op = None if summand is None else _mergeable(summand)
        if summand is not None and op is not None:
            # Ranks must form the same groups. What is added, and what reads a product, may differ by rank.
            place = op.args[4:-7]  # reduce op, dim, outer
            kind = op.target, _WIDENED.fullmatch(_text(op)) is not None
            groups.setdefault((*kind, *place, op.args[-3], *summand.key), []).append(summand)
    for group in groups.values():
        rows = [term for term in group if _adds_rows(_op(term))]
        terms = [term for term in group if term not in rows]
        if rows:
            terms.append(rows[0])  # an op adds up the rows of one layer
        if len(terms) > 1:
            _rewrite_sum(sorted(terms, key=_op))


def _site(ops: Sequence[fx.Node]) -> str:
    return "+".join(str(op.args[-1]) for op in ops)


def _summands(total: fx.Node) -> list[fx.Node]:
    """The summands of a tree of sums, of which only the root may have several users."""
    found: list[fx.Node] = []
    for side in total.all_input_nodes:
        found += _summands(side) if _is_plain_sum(side) and _is_inner(side) else [side]
    return found


def _op(summand: Summand) -> fx.Node:
    op = summand.item.args[0]
    assert isinstance(op, fx.Node)
    return op


def _mergeable(summand: Summand) -> fx.Node | None:
    """The op that reduces a summand, if its product can be merged."""
    op = _op(summand)
    if op.target not in _REDUCTIONS or summand.item.args[1] != 0:
        return None
    if any(user is not summand.item for user in op.users) and (_adds_rows(op) or not op.args[-7]):
        return None
    product = _text(op)
    is_one = _WIDENED.fullmatch(product) is not None and len(op.args[0]) == 1
    return op if _PLAIN.fullmatch(product) or is_one or _adds_rows(op) else None


def _text(op: fx.Node) -> str:
    """The product without `keep`: ranks that read the matmul elsewhere and ranks that do not merge alike."""
    return without_keep(str(op.args[3]))


def _adds_rows(op: fx.Node) -> bool:
    return _ROWS.match(_ADDED.sub("", str(op.args[3]))) is not None


def _rewrite_sum(terms: Sequence[Summand]) -> None:
    """Replace the last term by one op that reduces all terms, and remove the other terms from the sum."""
    *others, last = terms
    last_op = _op(last)
    emitter = Emitter(last_op, Shapes())
    ops = list(map(_op, terms))
    apart = {op: _hand_out(op) for op in ops if len(op.users) > 1}
    main = next((op for op in ops if _adds_rows(op)), next((op for op in ops if op not in apart), last_op))
    if _PLAIN.fullmatch(_text(main)):
        inside = [op for op in ops if op is main or op not in apart]
        inside.sort(key=lambda op: not str(op.args[3]).startswith("addmm"))  # an addmm comes first
        x, w, operands = ([entry for op in inside for entry in op.args[i]] for i in range(3))
        operands += [product for op, product in apart.items() if op is not main]
        first = str(inside[0].args[3]).partition(";")[0]
        product = "; ".join([first, *(f"add %{i}" for i in range(first != "mm", len(operands)))])
    else:
        x, w, given = main.args[:3]
        added = [apart.get(op) or _multiplied(emitter, op) for op in ops if op is not main]
        operands, product = _added(emitter, list(given), _text(main), _total(emitter, added))
    site = _site(ops)
    place, rest = last_op.args[4:-7], last_op.args[-6:-1]
    fused = emitter.call(last_op.target, x, w, operands, product, *place, False, *rest, site)
    last.item.replace_all_uses_with(emitter.item(fused, 0))
    for term in others:
        _remove(term.node)
    erase_unused([last.item])


def _remove(summand: fx.Node) -> None:
    """Take a summand out of its sum. What was broadcast to it is added further up."""
    node, rest = summand, None
    while True:
        (total,) = node.users
        a, b = total.args[:2]
        other = b if a is node else a
        assert isinstance(other, fx.Node)
        if _is_whole(other, total):
            break
        rest = other if rest is None else Emitter(total, Shapes()).call(aten.add.Tensor, rest, other)
        node = total
    if rest is None:
        total.replace_all_uses_with(other)
        erase_unused([total])
    else:
        total.replace_input_with(node, rest)
        erase_unused([node])


def _hand_out(op: fx.Node) -> fx.Node:
    """The product of an op, computed by torch. Readers of the op's kept output read the value of torch."""
    emitter = Emitter(op, Shapes())
    total = _contraction(emitter, op)
    product = _staged(emitter, op, total)
    for item in [user for user in op.users if user.args[1] == 1]:
        item.replace_all_uses_with(total if keeps_contraction(str(op.args[3])) else product)
        erase_unused([item])
    return product


def _added(
    emitter: Emitter, operands: list[fx.Node], product: str, value: fx.Node
) -> tuple[list[fx.Node], str]:
    """Operands and text of a product to which a value is added, too."""
    last = _ADDED.search(product)
    if last is None or not _ROWS.match(_ADDED.sub("", product)):
        return [*operands, value], f"{product}; add %{len(operands)}"
    index = int(last[1])
    return [*operands, _total(emitter, [operands[index], value])], _ADDED.sub(
        f"; add %{len(operands)}", product
    )


def _multiplied(emitter: Emitter, op: fx.Node) -> fx.Node:
    """The product of an op, computed by torch: its matmuls and the tensors that are added."""
    return _staged(emitter, op, _contraction(emitter, op))


def _contraction(emitter: Emitter, op: fx.Node) -> fx.Node:
    """The sum of the matmuls of an op, computed by torch."""
    operands, text = op.args[2:4]
    products = [emitter.call(aten.mm.default, x, w) for x, w in zip(*op.args[:2], strict=True)]
    if not str(text).startswith("mm"):
        x, w = op.args[0][0], op.args[1][0]
        products[0] = emitter.call(aten.addmm.default, operands[0], x, w)
    return _total(emitter, products)


def _staged(emitter: Emitter, op: fx.Node, product: fx.Node) -> fx.Node:
    """The product of an op, given the sum of its matmuls."""
    operands = op.args[2]
    for stage in _text(op).split("; ")[1:]:
        if stage == "to float32":
            product = emitter.cast(product, torch.float32)
        else:
            product = _total(emitter, [product, operands[int(stage.removeprefix("add %"))]])
    return product


def _total(emitter: Emitter, values: Sequence[fx.Node]) -> fx.Node:
    return functools.reduce(lambda a, b: emitter.call(aten.add.Tensor, a, b), values)


# --- gathers of one input -----------------------------------------------------------------------------


def _is_twin(node: fx.Node, first: fx.Node) -> bool:
    """Whether `node` gathers the input of `first`, with weights that no later collective computes."""
    place = slice(3, 5), slice(6, 8)
    if any(node.args[p] != first.args[p] for p in place) or not same_value(node.args[0], first.args[0]):
        return False
    inputs = [n for n in node.all_input_nodes if n is not node.args[0]]
    return all(fixed_above(n, first.prev) is None for n in inputs)


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
    site = _site(ops)
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
