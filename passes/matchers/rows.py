"""How the parts of an all_to_all lie in the product before it or the activations behind it, `[E, R, C]`.

Splits that are equal on one rank need not be so on others, and all ranks must decide alike. What all ranks
have in common is the program: where it cuts a tensor into as many parts as there are ranks and moves that
digit to the front, its parts are equal everywhere. So are parts of columns, which are those of a weight.
Whole rows that are exchanged in their order, or in another that no such cut explains, may go in parts of any
size: the fused op then takes the splits, on which ranks agree in every call.
"""

from __future__ import annotations

from torch import fx

from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import Shapes
from autofuse.passes.graph.layout import (
    Cut,
    Layout,
    Size,
    cut_out,
    exact_quotient,
    merge,
    prod,
    regroup,
    same_size,
)
from autofuse.passes.report import Reason, Reject


def is_natural(layout: Layout, shape: tuple[Size, ...]) -> bool:
    """Are the elements in their order?"""
    return merge(layout.digits) == merge(Layout.of(shape).digits)


def whole_rows(layout: Layout, shape: tuple[Size, ...]) -> Layout | None:
    """The layout of rows, as one dim, on `[E, R]`, if `layout` moves whole rows of `[E, R, C]`."""
    columns = prod(d.size for d in layout.digits if d.dim == 2)
    if not same_size(columns, shape[2]):
        return None
    groups = regroup(layout.digits, (prod(shape[:2]), shape[2]))
    if groups is None or any(d.dim == 2 for d in groups[0]) or len(groups[1]) > 1:
        return None
    return Layout((groups[0],))


def cut_into_parts(layout: Layout, shape: tuple[Size, ...], world: int) -> Cut | None:
    """The digit of `world` parts that the program itself has cut out of a dim and moved to the front."""
    length = exact_quotient(prod(d.size for d in layout.dims[0]), world)
    leading = None if length is None else regroup(layout.dims[0], (world, length))
    if leading is None or len(leading[0]) != 1 or not layout.dims[0]:
        return None
    (digit,) = leading[0]
    own = digit.dim == 2 or (layout.dims[0][0] == digit and not same_size(shape[digit.dim], world))
    return cut_out(Layout.of(shape), digit) if own else None


def row_splits(sizes: list[object], anchor: Anchor, columns: Size, shapes: Shapes) -> list[Size] | Reject:
    """Splits in rows of `columns` elements, from those in entries of dim 0."""
    entry = prod((shapes.of(anchor.node) or (1,))[1:])
    found: list[Size] = []
    for size in sizes:
        rows = exact_quotient(shapes.size(size) * entry, columns)
        if rows is None:
            return Reject(Reason.UNEVEN, f"{size} entries of {entry} elements are no whole rows of {columns}")
        found.append(rows)
    return found


def positions(emitter: Emitter, rows: Layout, shape: tuple[Size, ...], like: fx.Node) -> fx.Node:
    """`[E * R]` int64: where row `i` of `[E, R]` lies among rows in the order of `rows`."""
    count = prod(shape[:2])
    numbers = emitter.numbers(emitter.size(count), like)
    return emitter.rebuild(numbers, rows, Layout.of(shape[:2]), (count,))
