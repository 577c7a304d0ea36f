"""A matmul by weights that stand side by side becomes one matmul for each piece that collectives exchange.

    split(x @ [a, b, c], -1) = x @ a, x @ b, x @ c

Such weights are those of q, k and v. Ulysses exchanges the three one by one, context parallelism gathers k
and v, and norms over the heads of all ranks gather q and k. The weight of a piece is a slice of the weight,
and nothing is copied. If no site takes one of the matmuls, they become one matmul again.

Other readers of the whole product keep a matmul of their own. They keep no piece from being fused, since
other ranks may not have them.

Only on CPU ranks: what the further launches cost on GPUs was not measured.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from .graph.anchors import find_anchors
from .graph.emit import CannotEmit, Emitter, erase_unused
from .graph.follow import SPLITS, Shapes, argument, aten, is_reshape, is_view, slice_bounds, tensor, value
from .graph.layout import Size, prod

_JOINS = (aten.cat.default, aten.stack.default)
_CUTS = (aten.slice.Tensor, aten.select.int)


@dataclass(frozen=True)
class Piece:
    """`node` has the columns `[first, last)` of the result of `matmul`. It is a view of that result, or a
    matmul of its own that reads `inputs`."""

    node: fx.Node
    matmul: fx.Node
    first: int
    last: int
    inputs: tuple[fx.Node, ...] = ()


def split_packed(graph: fx.Graph) -> list[Piece]:
    """Splits such matmuls of `graph` in place. Returns the new matmuls."""
    exchanged: dict[fx.Node, list[Piece]] = {}
    for anchor in find_anchors(graph):
        val = tensor(anchor.node)
        piece = _piece_above(anchor.input) if val is not None and val.device.type == "cpu" else None
        if piece is not None:
            exchanged.setdefault(piece.matmul, []).append(piece)
    parts: list[Piece] = []
    for matmul, pieces in exchanged.items():
        every = _all_pieces(matmul)
        for piece in {p.node: p for p in every or pieces}.values():
            part = _multiplied(piece)
            parts += [] if part is None else [part]
    return parts


def join_kept(parts: Iterable[Piece]) -> None:
    """Join the parts of each matmul of which no part was fused. Parts stay apart if they no longer read
    slices of the weight, since a fused gather of the weight may have given them other tensors."""
    of_matmuls: dict[fx.Node, list[Piece]] = {}
    for part in parts:
        of_matmuls.setdefault(part.matmul, []).append(part)
    for matmul, those in of_matmuls.items():
        if not any(part.node._erased or part.node.args != part.inputs for part in those):
            _join(matmul, those)


def _piece_above(node: fx.Node) -> Piece | None:
    """The piece of a matmul that `node` is a view of."""
    while node.op == "call_function" and is_view(node):
        piece = _piece(node)
        if piece is not None:
            return piece
        if node.target in _JOINS:
            sources = {_cut_from(part) for part in node.args[0]}
            source = sources.pop() if len(sources) == 1 else None
        else:
            source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        node = source
    return None


def _cut_from(node: object) -> fx.Node | None:
    """The tensor that `node` is a part of, or a view of a part."""
    while isinstance(node, fx.Node) and is_view(node) and node.args:
        source = node.args[0]
        if node.target is operator.getitem and isinstance(source, fx.Node):
            return source.args[0] if isinstance(source.args[0], fx.Node) else None
        if node.target in _CUTS:
            return source if isinstance(source, fx.Node) else None
        node = source
    return None


def _piece(node: fx.Node) -> Piece | None:
    """`node` as a piece, if it is a part of a matmul's result that has whole columns."""
    of_split = node.target is operator.getitem
    split = node.args[0] if of_split else node
    if not isinstance(split, fx.Node) or split.target not in (SPLITS if of_split else _CUTS):
        return None
    whole = split.args[0]
    matmul = _matmul_above(whole)
    cut = _place(node, split)
    if matmul is None or cut is None:
        return None
    dim, start, length = cut
    shape, columns = Shapes().known(whole), Shapes().known(matmul)[1]
    inner = prod(shape[dim + 1 :])
    static = isinstance(columns, int) and isinstance(inner, int)
    if not static or not isinstance(start, int) or not isinstance(length, int):
        return None
    if inner * shape[dim] != columns or length * inner == columns:
        return None
    return Piece(node, matmul, start * inner, (start + length) * inner)


def _place(node: fx.Node, split: fx.Node) -> tuple[int, Size, Size] | None:
    """Dim, start and length of `node` in the tensor that `split` cuts."""
    shape = Shapes().known(split.args[0])
    if split.target is aten.slice.Tensor:
        dim = argument(split, 1, "dim", 0)
        return slice_bounds(split, shape[dim]) if isinstance(dim, int) else None
    of_one = split.target in (aten.select.int, aten.unbind.int)
    dim = argument(split, 1 if of_one else 2, "dim", 0)
    index = argument(split, 2, "index") if split.target is aten.select.int else node.args[1]
    if not isinstance(dim, int) or not isinstance(index, int):
        return None
    dim %= len(shape)
    if of_one:
        return (dim, index, 1) if index >= 0 else None
    lengths = [Shapes().known(piece)[dim] for piece in value(split)]  # type: ignore[attr-defined]
    return dim, sum(lengths[:index]), lengths[index]


def _matmul_above(node: object) -> fx.Node | None:
    """The matmul whose result `node` is, with its rows or columns in several dims."""
    while isinstance(node, fx.Node) and is_reshape(node):
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.addmm.default:
        bias = tensor(node.args[0])
        plain = not node.kwargs and bias is not None and bias.dim() == 1
        return node if plain and bias.shape[0] == tensor(node).shape[1] else None  # type: ignore[union-attr]
    return node if node.target is aten.mm.default else None


def _all_pieces(matmul: fx.Node) -> list[Piece]:
    """The pieces of a matmul, if all readers of its result are pieces that share no column; else none."""
    found: list[Piece] = []
    work = [matmul]
    while work:
        for user in work.pop().users:
            if is_reshape(user) or user.target in SPLITS:
                work.append(user)
                continue
            piece = _piece(user)
            if piece is None or piece.matmul is not matmul:
                return []
            found.append(piece)
    found.sort(key=lambda piece: piece.first)
    apart = all(a.last <= b.first for a, b in pairwise(found))
    return found if apart else []


def _multiplied(piece: Piece) -> Piece | None:
    """The matmul of the piece, which its readers read now."""
    *bias, x, w = piece.matmul.args
    emitter = Emitter(piece.node, Shapes())
    columns = (piece.first, piece.last)
    try:
        vectors = [emitter.call(aten.slice.Tensor, b, 0, *columns) for b in bias]
        weight = emitter.call(aten.slice.Tensor, w, 1, *columns)
        part = emitter.call(piece.matmul.target, *vectors, x, weight)
        result = emitter.reshape(part, Shapes().known(piece.node))
    except CannotEmit:
        emitter.undo()
        return None
    piece.node.replace_all_uses_with(result)
    erase_unused([piece.node])
    return Piece(part, piece.matmul, *columns, tuple(part.args))


def _join(matmul: fx.Node, parts: list[Piece]) -> None:
    if matmul._erased:
        first = min(part.node for part in parts)
        *vectors, x, weight = first.args
        inputs = [*(v.args[0] for v in vectors), x, weight.args[0]]
        matmul = Emitter(first, Shapes()).call(first.target, *inputs)
    for part in parts:
        columns = Emitter(part.node, Shapes()).call(aten.slice.Tensor, matmul, 1, part.first, part.last)
        part.node.replace_all_uses_with(columns)
        erase_unused([part.node])
