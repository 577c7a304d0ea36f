"""Rows that indices put into a send buffer, in all spellings: between matmul and exchange, a permutation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import torch
from torch import fx

from autofuse.passes.graph.blank import EMPTY, is_blank
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import Shapes, argument, aten, tensor
from autofuse.passes.graph.layout import Size, same_shape, same_size
from autofuse.passes.graph.permutation import inverse_of, is_permutation
from autofuse.passes.graph.row_numbers import FROM_EITHER_END, from_start
from autofuse.passes.reasons import Reason, Reject

_PUTS = (aten.index_put.default, aten.scatter.src, aten.scatter_add.default, aten.index_add.default)


@dataclass(frozen=True)
class Placement:
    """Row `i` of `rows` is row `positions[i]` of `node`. `permutes`: the positions are known to be a
    permutation."""

    node: fx.Node
    rows: fx.Node
    inputs: tuple[fx.Node, ...]
    positions: Callable[[Emitter], fx.Node]
    permutes: bool


def find_placement(node: fx.Node, shapes: Shapes) -> Placement | Reject | None:
    """The placement that `node` is the result of, or None. A placement moves the rows of a matrix. A vector
    has no rows, such as the numbers of rows of the experts; for a vector the result is None."""
    shape = shapes.of(node)
    if shape is None or len(shape) < 2:
        return None
    if node.target in _PUTS:
        found = _put(node, shapes)
        if found is None:
            return Reject(Reason.LAYOUT, f"{node.name} puts rows into something that is not empty or zero")
    elif node.target in (aten.index.Tensor, aten.index_select.default, aten.gather.default):
        found = _choice(node, shapes)
        if found is None:
            return None
    else:
        return None
    if len(node.users) > 1:
        return Reject(Reason.EXTRA_USERS, f"{node.name} is read besides the exchange")
    return found


def _put(put: fx.Node, shapes: Shapes) -> Placement | None:
    """The placement by `index_put`, `scatter` or their adding forms, into an empty or zero tensor."""
    if put.target is aten.index_put.default:
        base, chosen, rows = put.args[:3]
        adds = argument(put, 3, "accumulate", False)
        index = row_index(chosen)
    else:
        base, dim, index, rows = put.args[:4]
        adds = put.target in (aten.scatter_add.default, aten.index_add.default)
        if dim != 0 or put.kwargs.get("alpha", 1) != 1:
            return None
        if put.target is not aten.index_add.default:
            index = repeated_index(index, rows)  # of every row and column
    if not is_blank(base) or (adds and base.target in EMPTY):
        return None
    if not isinstance(rows, fx.Node) or not is_index(index):
        return None
    permutes = permutes_all(index, put, shapes)
    count = shapes.known(put)[0]

    def numbers(emitter: Emitter) -> fx.Node:
        return from_start(emitter, index, count) if put.target in FROM_EITHER_END else index

    return Placement(put, rows, (index,), numbers, permutes)


def _choice(node: fx.Node, shapes: Shapes) -> Placement | None:
    """The placement by a choice of rows: row `i` is row `index[i]`, so the positions are the inverse of
    `index`."""
    rows = node.args[0]
    if node.target is aten.index.Tensor:
        index = row_index(node.args[1])
    else:
        dim, index = node.args[1:3]
        if dim != 0:
            return None
        if node.target is aten.gather.default:
            whole = same_shape(shapes.known(node)[1:], (shapes.of(rows) or ())[1:])
            index = repeated_index(index, node) if whole else None
    if not isinstance(rows, fx.Node) or not is_index(index):
        return None
    if not permutes_all(index, rows, shapes):
        return None
    return Placement(node, rows, (index,), partial(_inverse, index), True)


@dataclass(frozen=True)
class Choice:
    """Row `i` of `node` is row `index[i]` of its source. With `puts`, row `index[i]` of `node` is row `i` of
    the source, and the index is known to be a permutation."""

    node: fx.Node
    index: fx.Node
    puts: bool = False

    def positions(self, emitter: Emitter, rows: Size) -> fx.Node:
        """For each row of `node`, the number of the row among `rows`."""
        return _inverse(self.index, emitter) if self.puts else from_start(emitter, self.index, rows)


def find_choice(node: fx.Node, source: fx.Node, shapes: Shapes) -> Choice | Reject | None:
    """The rows of `source` that `node` chooses, or has in another order; None if it is another op."""
    if node.target is aten.index.Tensor:
        index = row_index(node.args[1])
        if is_index(index):
            return Choice(node, index)
        return Reject(Reason.LAYOUT, f"{node.name} does not choose rows by a vector of int64")
    found = _put(node, shapes) if node.target in _PUTS else None
    if found is None or found.rows is not source or not found.permutes:
        return None
    (index,) = found.inputs
    return Choice(node, index, puts=True)


def _inverse(index: fx.Node, emitter: Emitter) -> fx.Node:
    """The inverse of a permutation."""
    known = inverse_of(index)
    if known is not None:
        return known
    size = emitter.size(emitter.shapes.known(index)[0])
    base = emitter.full([size], 0, index)
    return emitter.call(aten.index_put.default, base, [index], emitter.numbers(size, index))


def row_index(indices: object) -> object:
    """The index of dim 0 in the indices of `index` or `index_put`; None if other dims are indexed, too."""
    return indices[0] if isinstance(indices, (list, tuple)) and len(indices) == 1 else None


def repeated_index(index: object, moved: object) -> fx.Node | None:
    """The vector that an index repeats along its columns. None unless the index has the shape of `moved`: a
    smaller one would leave elements where they are."""
    if not isinstance(index, fx.Node) or index.target is not aten.expand.default:
        return None
    if not Shapes().alike(index, moved):
        return None
    column = index.args[0]
    val = tensor(column)
    if not isinstance(column, fx.Node) or val is None or val.dim() != 2 or val.shape[1] != 1:
        return None
    if column.target in (aten.unsqueeze.default, aten.view.default, aten.reshape.default):
        vector = column.args[0]
        if is_index(vector):
            return vector
    return None


def is_index(index: object) -> TypeGuard[fx.Node]:
    """Whether the argument of a node is a vector of int64."""
    val = tensor(index)
    return isinstance(index, fx.Node) and val is not None and val.dim() == 1 and val.dtype == torch.int64


def permutes_all(index: fx.Node, rows: fx.Node, shapes: Shapes) -> bool:
    """Whether `index` is known to hold the number of every row of `rows` once."""
    have, count = shapes.of(rows), shapes.of(index)
    known = have is not None and count is not None and same_size(have[0], count[0])
    return known and is_permutation(index)
