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

from autofuse.lowering.ops.matmul_all_gather import MatmulAllGather
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import SPLITS, Shapes, argument, aten, is_view, value
from autofuse.passes.graph.layout import Digit, Layout, Size, compose, exact_quotient, merge, prod, same_size
from autofuse.passes.reasons import Reason, Reject

from .contractions import ROWS, Product
from .match import Context, Found, Match, Work, check_dtype, replace_result, values
from .operands import materialise, two_dimensional
from .product import match_product
from .product_readers import extra_users, hand_out_product
from .readers import Reader, find_cast_readers, reread
from .token_sums import GROUPED

PATTERN = "matmul_all_gather"

_RANK, _ROWS, _COLUMNS = range(3)  # dims of the stacked products

# Ops that take a part of one dim, and the position of the argument that says which.
_SPLITS = SPLITS - {aten.unbind.int}
_CUTS = {aten.slice.Tensor: 1, aten.select.int: 1, aten.unbind.int: 1} | dict.fromkeys(_SPLITS, 2)


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
    if _is_padded(anchor.input, shapes):
        return Reject(Reason.UNEVEN, f"{anchor.input.name} is padded: ranks have unequal parts")
    found = match_product(anchor.input, shapes)
    if isinstance(found, Reject):
        return found
    if found.stages[0] == ROWS or found.bags:
        return Reject(Reason.NO_COMPUTE, "rows of a table are gathered, and no matmul")
    if found.stages[0].startswith(GROUPED):
        return Reject(Reason.UNSUPPORTED_VARIANT, "rows of experts are added up before a gather")
    total, whole = prod(found.layout.shape), prod(found.shape)
    if not same_size(total, whole):
        return Reject(Reason.LAYOUT, f"{total} of {whole} elements of the matmul are gathered")
    reject = check_dtype(found.dtype)
    if reject is not None:
        return reject
    stacked = _stacked(found.layout, context.world)
    readers, cast = find_cast_readers(anchor, shapes)
    views: list[Reader] = []
    for reader in readers:
        layout = compose(reader.layout, stacked)
        if layout is None:
            return Reject(Reason.LAYOUT, f"{reader.view.name} is no list of digits of the gathered products")
        views.append(replace(reader, layout=layout))
    everything = prod(found.shape) * context.world
    cut = None if _is_cut_up(readers, everything, shapes) else _leaves_out(views)
    if cut is not None:
        # A rank that has less than the others pads its part, and all cut the padding off the result.
        return Reject(Reason.UNEVEN, f"{cut.user.name} leaves some of the gathered dim out, maybe padding")
    early = extra_users(anchor.node, anchor.input, found) if context.hands_out else ()
    place = _wanted(views, found.shape)
    rows, columns = found.shape
    matmuls = tuple((rows, shapes.known(x)[-1], columns) for x in found.x)
    return Match(
        PATTERN,
        Work(matmuls, bytes_kept=prod(found.shape) * found.dtype.itemsize if early else 0),
        shapes,
        partial(_rewrite, anchor, context, found, place, views, cast, bool(early)),
        (*found.x, *found.w, *(o.node for o in found.operands)),
        early,
        _arguments(context, found, place, bool(early)),
    )


def _arguments(context: Context, found: Product, place: Place, keep: bool) -> MatmulAllGather:
    """The arguments of the fused op, as far as they are known before the rewrite."""
    operands = values(o.node for o in found.operands)
    terms = (values(found.x), values(found.w), operands, found.text)
    # The gradient is traced apart, in a backward graph: whether it is replicated does not matter here.
    return MatmulAllGather(*terms, place.dim, place.outer, keep, False, *context.common)


def _is_padded(node: fx.Node, shapes: Shapes) -> bool:
    """Whether `node` is a view of a padded product. A rank with fewer rows or columns than others pads
    them."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    source = node.args[0] if node.target is aten.constant_pad_nd.default else None
    return isinstance(source, fx.Node) and isinstance(match_product(source, shapes), Product)


def _stacked(part: Layout, world: int) -> Layout:
    """The layout of the collective's result on the stacked products; `part` is that of its input."""
    first, *others = (tuple(replace(d, dim=d.dim + _ROWS) for d in dim) for dim in part.dims)
    return Layout((merge((Digit(_RANK, 1, world), *first)), *others))


def _leaves_out(views: Sequence[Reader]) -> Reader | None:
    """A reader that takes only a part of the result; None if there is none. The layouts of `views` are those
    on the stacked products.

    Readers may take the pieces of single ranks, if each piece has a reader that takes all of it.
    """
    pieces: dict[Digit, set[int]] = {}
    for reader in views:
        for digit, index in _pieces(reader):
            pieces.setdefault(digit, set()).add(index)
    for reader in views:
        if any(len(pieces[digit]) != digit.size for digit, _ in _pieces(reader)):
            return reader
        axis = _CUTS.get(reader.user.target)
        if axis is not None:
            dim = argument(reader.user, axis, "dim", 0)
            ranked = not isinstance(dim, int) or any(d.dim == _RANK for d in reader.layout.dims[dim])
            if ranked or _pieces(reader):
                return reader
    return None


@dataclass(frozen=True)
class _Cut:
    """The range `[first, last)` of dim `dim` of the tensor `whole`."""

    whole: fx.Node
    dim: int
    first: int
    last: int


def _is_cut_up(readers: Sequence[Reader], size: Size, shapes: Shapes) -> bool:
    """Whether all readers read slices along one dim, or pieces of a split, which together are all `size`
    elements. The readers of a gathered projection of q, k and v do. A slice that is cut again must be read
    completely, too."""
    outermost, every = set[tuple[fx.Node, int]](), dict[tuple[fx.Node, int], list[_Cut]]()
    for reader in readers:
        cuts = _cuts(reader, shapes)
        if not cuts:
            return False
        for cut in cuts:
            every.setdefault((cut.whole, cut.dim), []).append(cut)
        outermost.add((cuts[-1].whole, cuts[-1].dim))
    return (
        len(outermost) == 1
        and all(same_size(prod(shapes.known(whole)), size) for whole, _ in outermost)
        and all(_covers(shapes.known(whole)[dim], cuts) for (whole, dim), cuts in every.items())
    )


def _covers(length: Size, cuts: Sequence[_Cut]) -> bool:
    end = 0
    for cut in sorted(cuts, key=lambda cut: cut.first):
        if cut.first > end:
            return False
        end = max(end, cut.last)
    return end == length


def _cuts(reader: Reader, shapes: Shapes) -> list[_Cut] | None:
    """The cuts between the collective and the reader, the last one first; None if one is not known."""
    path = [reader.user, reader.view]
    while is_view(path[-1]) and isinstance(path[-1].args[0], fx.Node):
        path.append(path[-1].args[0])
    steps = zip([None, *path], path, path[1:], strict=False)
    found = [_cut(piece, node, whole, shapes) for piece, node, whole in steps if node.target in _CUTS]
    known = [cut for cut in found if cut is not None]
    return known if len(known) == len(found) else None


def _cut(piece: fx.Node | None, node: fx.Node, whole: fx.Node, shapes: Shapes) -> _Cut | None:
    """The range of `whole` that `node` takes. piece: the piece of a split that is read; None for all
    pieces."""
    shape = shapes.known(whole)
    dim = argument(node, _CUTS[node.target], "dim", 0) % len(shape)
    if node.target in _SPLITS:
        lengths = [t.shape[dim] for t in value(node)]  # type: ignore[attr-defined]
        if not all(isinstance(length, int) for length in lengths):
            return None
        if piece is not None:
            index = piece.args[1]
            return _Cut(whole, dim, sum(lengths[:index]), sum(lengths[: index + 1]))
        is_read = {user.args[1] for user in node.users} == set(range(len(lengths)))
        return _Cut(whole, dim, 0, sum(lengths)) if is_read else None
    first, last = argument(node, 2, "start"), argument(node, 3, "end")
    known = isinstance(shape[dim], int) and all(end is None or isinstance(end, int) for end in (first, last))
    if node.target is not aten.slice.Tensor or argument(node, 4, "step", 1) != 1 or not known:
        return None
    return _Cut(whole, dim, *slice(first, last).indices(shape[dim])[:2])


def _pieces(reader: Reader) -> list[tuple[Digit, int]]:
    return [(digit, index) for digit, index in reader.layout.fixed if digit.dim == _RANK]


def _wanted(views: Sequence[Reader], shape: Sequence[Size]) -> Place:
    """The most frequent place of the rank in the views; in front of all rows if the op knows the place of
    none."""
    places = Counter(place for view in views if (place := _place(view.layout, shape)) is not None)
    return max(places, key=lambda place: places[place], default=Place(0, 1))


def _place(layout: Layout, shape: Sequence[Size]) -> Place | None:
    """The place of the rank's digit in a tensor. None unless one of these follows it: all columns, a minor
    part of the columns, or a minor part of the rows and all columns."""
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
    views: Sequence[Reader],
    cast: torch.dtype | None,
    keep: bool,
    emitter: Emitter,
) -> None:
    operands = [materialise(emitter, o) for o in found.operands]
    x = [two_dimensional(emitter, n) for n in found.x]
    w = [two_dimensional(emitter, n) for n in found.w]
    args = [x, w, operands, found.text, place.dim, emitter.size(place.outer), keep, False]
    op = torch.ops.autofuse.matmul_all_gather.default
    fused = emitter.call(op, *args, context.group, context.order, context.site)
    whole, layout = emitter.item(fused, 0), place.layout(found.shape, context.world)
    if keep:
        hand_out_product(emitter, emitter.item(fused, 1), found)
    whole = emitter.cast(whole, cast)
    reread(emitter, whole, layout, views)
    if not views:
        # This rank does not read the result, but its peers may: what holds the collective holds the fused op.
        replace_result(emitter, anchor, whole)
