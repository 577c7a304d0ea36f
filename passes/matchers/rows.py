"""The parts of an all_to_all in the tensor before or behind it: equal parts along a dim, or whole rows.

The tensor is `[E, R, C]`: a product before a combine, activations behind a dispatch.

All ranks must decide alike, but splits that are equal on one rank may differ on another rank. The program is
the same on all ranks. If it cuts a tensor into one part for each rank and moves the parts to the front, the
parts are equal on all ranks. Parts of columns are equal, too, since a weight has the columns. In all other
cases whole rows are exchanged in parts of any size: the fused op takes the splits, and the ranks agree on
them in every call.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    leading_digit,
    prod,
    regroup,
    same_size,
)
from autofuse.passes.reasons import Reason, Reject

from .placement import Placement


@dataclass(frozen=True)
class Rows:
    """An exchange of whole rows, in the order `order` (None: their own) or at the positions of
    `placement`."""

    output_splits: list[Size]
    input_splits: list[Size]
    order: Layout | None = None
    placement: Placement | None = None


def whole_rows(layout: Layout, shape: tuple[Size, ...]) -> Layout | None:
    """The layout of the rows, as one dim, on `[E, R]`; None if `layout` does not move whole rows of `[E, R,
    C]`."""
    columns = prod(d.size for d in layout.digits if d.dim == 2)
    if not same_size(columns, shape[2]):
        return None
    groups = regroup(layout.digits, (prod(shape[:2]), shape[2]))
    if groups is None or any(d.dim == 2 for d in groups[0]) or len(groups[1]) > 1:
        return None
    return Layout((groups[0],))


def cut_into_parts(layout: Layout, shape: tuple[Size, ...], world: int) -> Cut | None:
    """The digit of `world` equal parts that the program cuts out of a dim and moves to the front; else
    None."""
    leading = leading_digit(layout.dims[0], world)
    if leading is None:
        return None
    digit, _ = leading
    own = digit.dim == 2 or (layout.dims[0][0] == digit and not same_size(shape[digit.dim], world))
    return cut_out(Layout.of(shape), digit) if own else None


def split_rows(
    anchor: Anchor,
    columns: Size,
    shapes: Shapes,
    order: Layout | None = None,
    placement: Placement | None = None,
) -> Rows | Reject:
    """An exchange of whole rows of `columns` elements, whose splits count entries of dim 0."""
    entry = prod((shapes.of(anchor.node) or (1,))[1:])
    splits: list[list[Size]] = []
    for sizes in (anchor.output_splits, anchor.input_splits):
        splits.append([])
        for size in sizes:
            rows = exact_quotient(shapes.size(size) * entry, columns)
            if rows is None:
                uneven = f"{size} entries of {entry} elements are no whole rows of {columns}"
                return Reject(Reason.UNEVEN, uneven)
            splits[-1].append(rows)
    outputs, inputs = splits
    return Rows(outputs, inputs, order, placement)


def positions(emitter: Emitter, rows: Layout, shape: tuple[Size, ...], like: fx.Node) -> fx.Node:
    """Vector `[E * R]` of int64: the place of row `i` of `[E, R]` in the order `rows`."""
    count = prod(shape[:2])
    numbers = emitter.numbers(emitter.size(count), like)
    return emitter.rebuild(numbers, rows, Layout.of(shape[:2]), (count,))
