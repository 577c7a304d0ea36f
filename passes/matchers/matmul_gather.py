"""matmul -> all_gather: walk up from the collective to the product, and down to the readers of the result.

Gathering adds one digit, the rank, to the index of the product `P: [M, N]`. The fused op can put this digit
anywhere into its rows or columns: `(outer, W, inner)`. The views behind the collective (`split` + `cat` of a
gather along another dim than the first) tell where it is wanted, so that nothing is left to be moved. Both
sides are described relative to the stacked products `[W, M, N]`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import SPLITS, Shapes, argument, aten, is_view, tensor
from autofuse.passes.graph.layout import Digit, Layout, Size, compose, exact_quotient, merge, product
from autofuse.passes.report import Reason

from .match import (
    Context,
    Found,
    Match,
    Reader,
    Work,
    check_dtype,
    extra_users,
    find_readers,
    only_cast,
    replace_result,
    reread,
)
from .matmul_reduce import hand_out_product
from .operands import materialise, two_dimensional
from .product import Product, Reject, match_product

PATTERN = "matmul_all_gather"

_RANK, _ROWS, _COLUMNS = range(3)  # dims of the stacked products


@dataclass(frozen=True)
class Place:
    """Where the rank stands in the result: dim `dim` is `(outer, W, inner)`."""

    dim: int
    outer: Size

    def layout(self, shape: Sequence[Size], world: int) -> Layout:
        """Of the result, on the stacked products."""
        rows, columns = Digit(_ROWS, 1, shape[0]), Digit(_COLUMNS, 1, shape[1])
        inner = exact_quotient(shape[self.dim], self.outer)
        assert inner is not None
        dim = _ROWS + self.dim
        cut = merge((Digit(dim, inner, self.outer), Digit(_RANK, 1, world), Digit(dim, 1, inner)))
        return Layout((cut, merge((columns,))) if self.dim == 0 else (merge((rows,)), cut))


def match_matmul_gather(anchor: Anchor, context: Context) -> Found:
    shapes = context.shapes
    assert anchor.input is not None
    if _is_padded(anchor.input, shapes):
        return Reject(Reason.UNEVEN, f"{anchor.input.name} is padded: ranks have unequal parts")
    found = match_product(anchor.input, shapes)
    if isinstance(found, Reject):
        return found
    if (total := product(found.layout.shape)) != product(found.shape):
        return Reject(Reason.LAYOUT, f"{total} of {product(found.shape)} elements of the matmul are gathered")
    reject = check_dtype(found.dtype)
    if reject is not None:
        return reject
    stacked = _stacked(found.layout, context.world)
    readers = find_readers(anchor, shapes)
    cast = only_cast(readers)
    if cast is not None:
        readers = find_readers(anchor, shapes, through=cast)
    views = [replace(r, layout=layout) for r in readers if (layout := compose(r.layout, stacked)) is not None]
    partial_reader = next(filter(_reads_some_ranks, views), None)
    if partial_reader is not None:
        # A rank that has less than the others pads its part, and all cut the padding off the result.
        name = partial_reader.user.name
        return Reject(Reason.UNEVEN, f"{name} reads what some of the ranks gave: parts may be padded")
    early = extra_users(anchor.node, anchor.input, found)
    place = _wanted(views, found.shape)
    rows, columns = found.shape
    matmuls = tuple((rows, shapes.of(x)[-1], columns) for x in found.x)  # type: ignore[index]
    whole = views if len(views) == len(readers) else None
    return Match(
        PATTERN,
        Work(matmuls, bytes_kept=product(found.shape) * found.dtype.itemsize if early else 0),
        shapes,
        partial(_rewrite, anchor, context, found, place, stacked, whole, cast, bool(early)),
        (*found.x, *found.w, *(o.node for o in found.operands)),
        early,
        _not_on_gpus(found, place, bool(early)),
    )


def _not_on_gpus(found: Product, place: Place, keep: bool) -> str:
    if found.text not in ("mm", "addmm %0") or len(found.x) != 1:
        return f"GPU kernels gather one matmul with or without a bias, not {found.text!r} of {len(found.x)}"
    if any((val := tensor(o.node)) is None or val.dim() != 1 for o in found.operands):
        return "GPU kernels add a bias with an entry a column"
    if place.dim == 1 and place.outer != 1:
        return "GPU kernels gather rows or whole columns, not stretches of columns"
    return "the matmul is read elsewhere, too" if keep else ""


def _is_padded(node: fx.Node, shapes: Shapes) -> bool:
    """Is `node` a view of a padded product? A rank with fewer rows or columns than others pads them."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    source = node.args[0] if node.target is aten.constant_pad_nd.default else None
    return isinstance(source, fx.Node) and isinstance(match_product(source, shapes), Product)


def _stacked(part: Layout, world: int) -> Layout:
    """The layout of the collective's result on the stacked products; `part` is that of its input."""
    first, *others = (tuple(replace(d, dim=d.dim + _ROWS) for d in dim) for dim in part.dims)
    return Layout((merge((Digit(_RANK, 1, world), *first)), *others))


def _reads_some_ranks(reader: Reader) -> bool:
    """Does `reader`, whose layout is on the stacked products, take what some of the ranks gave?"""
    if any(d.dim == _RANK for d, _ in reader.layout.fixed):
        return True
    axis = {aten.slice.Tensor: 1, aten.select.int: 1, aten.unbind.int: 1}.get(reader.user.target)
    if axis is None and reader.user.target in SPLITS:
        axis = 2
    if axis is None:
        return False
    dim = argument(reader.user, axis, "dim", 0)
    return not isinstance(dim, int) or any(d.dim == _RANK for d in reader.layout.dims[dim])


def _wanted(views: Sequence[Reader], shape: Sequence[Size]) -> Place:
    """The place of the rank that most views have; in front of all rows if none has one that the op knows."""
    places = Counter(place for view in views if (place := _place(view.layout, shape)) is not None)
    return max(places, key=lambda place: places[place], default=Place(0, 1))


def _place(layout: Layout, shape: Sequence[Size]) -> Place | None:
    """Where the rank stands in a tensor: what follows it are the columns, or the last of them, or the last of
    the rows and all columns."""
    digits = layout.digits
    at = next((i for i, d in enumerate(digits) if d.dim == _RANK), None)
    if at is None:
        return None
    after = merge(digits[at + 1 :])
    columns = merge([Digit(_COLUMNS, 1, shape[1])])
    if after[-1:] == columns and len(after) == 1 + len(columns):
        dim, last = 0, after[0]
    elif after == columns:
        return Place(1, 1)
    elif len(after) == 1:
        dim, last = 1, after[0]
    else:
        return None
    outer = exact_quotient(shape[dim], last.size)
    return Place(dim, outer) if outer is not None and last == Digit(_ROWS + dim, 1, last.size) else None


def _rewrite(
    anchor: Anchor,
    context: Context,
    found: Product,
    place: Place,
    stacked: Layout,
    views: Sequence[Reader] | None,
    cast: torch.dtype | None,
    keep: bool,
    emitter: Emitter,
) -> None:
    """`views`: all that read the result, None where a view of it cannot be made of the stacked products."""
    operands = [materialise(emitter, o) for o in found.operands]
    x = [two_dimensional(emitter, n) for n in found.x]
    w = [two_dimensional(emitter, n) for n in found.w]
    # Gradients of graphs are traced apart: whether they are replicated does not matter here.
    args = [x, w, operands, found.text, place.dim, emitter.size(place.outer), keep, False]
    op = torch.ops.autofuse.matmul_all_gather.default
    fused = emitter.call(op, *args, context.group, context.order, context.site)
    whole, layout = emitter.item(fused, 0), place.layout(found.shape, context.world)
    if keep:
        hand_out_product(emitter, fused, found)
    if views is None:
        result = emitter.rebuild(whole, layout, stacked, context.shapes.of(anchor.node))
        replace_result(emitter, anchor, result)
        return
    if cast is not None:
        whole = emitter.call(torch.ops.prims.convert_element_type.default, whole, cast)
    reread(emitter, whole, layout, views)
