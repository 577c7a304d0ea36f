"""Rows that have no `W` equal parts: what is scattered is padded, and what is gathered loses the padding.

    reduce_scatter(x @ w)    ->    reduce_scatter(pad(x) @ w)
    all_gather(h) @ w        ->    (all_gather(h) @ w)[:rows]

So both collectives keep the matmul beside them. Rows of padding have the values that the ops between make of
zeros. Only sums over rows mix rows; `masked` keeps the padding out of them.
"""

from __future__ import annotations

import torch
from torch import fx

from autofuse.lowering import own_part as _own_part  # noqa: F401  (registers torch.ops.autofuse.own_part)
from autofuse.passes.graph.emit import Emitter, erase_unused
from autofuse.passes.graph.follow import Shapes, aten, is_reshape
from autofuse.passes.graph.layout import Size, prod, same_shape, same_size

from .slices import shape_of


def padded_product(emitter: Emitter, summand: fx.Node, shape: tuple[Size, ...], length: Size) -> fx.Node:
    """What a rank adds, as rows of `shape`, padded to `length` rows: before the matmul that it comes from."""
    product = summand
    while is_reshape(product) and len(product.users) == 1:
        product = product.all_input_nodes[0]
    matrix = (prod(shape[:-1]), shape[-1])
    if (
        product.target is not aten.mm.default
        or len(product.users) > 1
        or not same_shape(shape_of(product), matrix)
    ):
        return _padded(emitter, emitter.reshape(summand, shape), length)
    x, w = product.all_input_nodes
    x = _padded(emitter, x, length * prod(shape[1:-1]))
    return emitter.reshape(emitter.call(aten.mm.default, x, w), (length, *shape[1:]))


def _padded(emitter: Emitter, rows: fx.Node, length: Size) -> fx.Node:
    """Zeros behind the rows, up to `length` of them."""
    shape = shape_of(rows)
    assert shape is not None
    behind = emitter.size(length - shape[0])
    return emitter.call(aten.constant_pad_nd.default, rows, [0, 0] * (len(shape) - 1) + [0, behind])


def first_rows(emitter: Emitter, rows: fx.Node, count: Size) -> fx.Node:
    return emitter.call(aten.slice.Tensor, rows, 0, 0, emitter.size(count))


def multiply_padded(whole: fx.Node, gathered: fx.Node) -> list[tuple[Emitter, fx.Node]]:
    """Lets the matmuls that read the rows `whole` read the rows `gathered`, which have padding, and cuts
    their results. The emitters of new nodes, each with the matmul in whose place they are."""
    emitters = []
    views, work = {whole: None}, [whole]
    shape, known = shape_of(whole), shape_of(gathered)
    assert shape is not None
    assert known is not None
    while work:
        node = work.pop()
        for user in list(node.users):
            view = shape_of(user)
            if is_reshape(user) and view is not None and len(view) == 2 and same_size(view[1], shape[-1]):
                views[user] = None
                work.append(user)
            elif user.target is aten.mm.default and user.args[0] is node and user.args[1] not in views:
                assert view is not None
                emitter = Emitter(user, Shapes())
                rows = emitter.reshape(gathered, (prod(known[:-1]), known[-1]))
                product = emitter.call(aten.mm.default, rows, user.args[1])
                user.replace_all_uses_with(first_rows(emitter, product, view[0]))
                emitters.append((emitter, user))
    for _, matmul in emitters:
        matmul.graph.erase_node(matmul)
    erase_unused(list(views))
    return emitters


def row_mask(emitter: Emitter, part: fx.Node, count: Size, group: str | fx.Node) -> fx.Node:
    """Which of the rows of this rank's part are among the `count` that there are: a mask of one dim."""
    rows = emitter.full([emitter.size(count)], True, part, torch.bool)
    return emitter.call(torch.ops.autofuse.own_part.default, rows, 0, group, True)


def masked(emitter: Emitter, part: fx.Node, dim: int, mask: fx.Node) -> fx.Node:
    """Zeros in place of the padding."""
    shape = shape_of(part)
    assert shape is not None
    zero = emitter.full([], 0.0, part)
    mask = emitter.reshape(mask, (shape[dim], *(1 for _ in shape[dim + 1 :])))
    return emitter.call(aten.where.self, mask, part, zero)
