"""matmul -> all_reduce and matmul -> reduce_scatter: follow views from the collective up to the product.

An all_reduce treats every element alike, so that it commutes with a layout `L` between product and
collective: `AR(L(P)) = L(AR(P))`. A reduce_scatter cuts its input along the leading digit of dim 0; the
layout tells which digit of the rows or columns of `P` that is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import fx

from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce
from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter
from autofuse.lowering.reference.product import keeps_contraction
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.layout import (
    Cut,
    Layout,
    Size,
    cut_out,
    exact_quotient,
    leading_digit,
    prod,
    same_size,
)
from autofuse.passes.graph.paths import all_below
from autofuse.passes.graph.row_numbers import from_start
from autofuse.passes.reasons import Reason, Reject

from .bags import replace_extras
from .contractions import ROWS, Product
from .match import Context, Found, Match, Work, check_dtype, replace_result
from .operands import materialise, two_dimensional, values_of
from .product import match_product
from .product_readers import extra_users, hand_out_contraction, hand_out_product, readers_inside
from .token_sums import GROUPED, grouped_terms, values_of_terms


def match_all_reduce(anchor: Anchor, context: Context) -> Found:
    size = prod(context.shapes.known(anchor.input))
    found = _find(anchor, context, (size,))
    if isinstance(found, Reject):
        return found
    return _match(anchor, context, found, "matmul_all_reduce", None)


def match_reduce_scatter(anchor: Anchor, context: Context) -> Found:
    length, *others = context.shapes.known(anchor.input)
    part = exact_quotient(length, context.world)
    found = _find(anchor, context, None if part is None else (context.world, prod((part, *others))))
    if isinstance(found, Reject):
        return found
    cut = leading_cut(found, context.world)
    if isinstance(cut, Reject):
        return cut
    return _match(anchor, context, found, "matmul_reduce_scatter", cut)


def _find(anchor: Anchor, context: Context, shape: tuple[Size, ...] | None) -> Product | Reject:
    """The product that the collective reduces, with the collective's input viewed as `shape`."""
    found = match_product(anchor.input, context.shapes, shape=shape, read_inside=True)
    if isinstance(found, Reject):
        return found
    if anchor.reduce_op not in ("sum", "avg"):
        return Reject(Reason.REDUCE_OP, f"the reduction is {anchor.reduce_op!r}")
    total, whole = prod(found.layout.shape), prod(found.shape)
    if not same_size(total, whole):
        return Reject(Reason.LAYOUT, f"{total} of {whole} elements of the matmul are reduced")
    return check_dtype(found.dtype) or found


def leading_cut(found: Product, world: int) -> Cut | Reject:
    """The place in the product of the leading digit of dim 0 of the collective's input."""
    if exact_quotient(found.layout.shape[0], world) is None:
        return Reject(Reason.UNEVEN, f"dim 0 of size {found.layout.shape[0]} has no {world} equal parts")
    leading = leading_digit(found.layout.dims[0], world)
    if leading is None:
        return Reject(Reason.LAYOUT, "the scattered parts are no digit of the rows or columns of the matmul")
    cut = cut_out(Layout.of(found.shape), leading[0])
    assert cut is not None
    return cut


def _match(anchor: Anchor, context: Context, found: Product, pattern: str, cut: Cut | None) -> Found:
    grouped = found.stages[0].startswith(GROUPED)
    early = extra_users(anchor.node, anchor.input, found)
    if early and grouped:  # the op returns its contraction
        return Reject(Reason.EXTRA_USERS, f"the tokens are also read by {early[0].name}")
    inside = readers_inside(found)
    for reader in inside:
        below = {reader, *all_below([reader])}
        late = next((o.node for o in found.operands if o.node in below), None)
        if late is not None:
            why = f"{reader.name} reads the product, and the operand {late.name} depends on the matmul"
            return Reject(Reason.EXTRA_USERS, why)
    early = (*inside, *early) if context.hands_out else ()
    if inside and early and not grouped:
        found = replace(found, stages=(found.stages[0], "keep", *found.stages[1:]))
    nbytes = prod(found.shape) * found.dtype.itemsize
    reads = found.stages[0] == ROWS or bool(found.bags)
    experts = context.shapes.known(found.w[0])[0] if grouped else max(1, len(found.bags))
    sizes = [context.shapes.known(x) for x in found.x if not reads]
    if found.of_vectors:  # [R, K, 1]
        sizes = [x[:-1] for x in sizes]
    matmuls = tuple((prod(x[:-1]), x[-1], found.shape[1]) for x in sizes)
    kept = nbytes if early else 0
    return Match(
        pattern,
        Work(matmuls, experts, bytes_read=nbytes if reads else 0, bytes_kept=kept),
        context.shapes,
        partial(_rewrite, anchor, context, found, pattern, cut, bool(early)),
        (*found.x, *found.w, *(o.node for o in found.operands)),
        early,
        _arguments(anchor, context, found, cut, bool(early)),
    )


def _arguments(
    anchor: Anchor, context: Context, found: Product, cut: Cut | None, keep: bool
) -> MatmulAllReduce | MatmulReduceScatter:
    """The arguments of the fused op, as far as they are known before the rewrite."""
    assert anchor.reduce_op is not None
    operands = values_of(found.operands)
    terms = (*values_of_terms(found), operands, found.text, anchor.reduce_op)
    if cut is None:
        return MatmulAllReduce(*terms, keep, [], "", "", *context.common)
    return MatmulReduceScatter(*terms, cut.dim, cut.outer, keep, [], "", "", *context.common)


def _terms(emitter: Emitter, found: Product) -> tuple[list[fx.Node], list[fx.Node]]:
    """x and w as the fused op takes them."""
    if found.stages[0].startswith(GROUPED):
        return grouped_terms(emitter, found)
    w = [two_dimensional(emitter, n) for n in found.w]
    if found.stages[0] == ROWS:
        x = list(found.x)
        if found.from_either_end:
            x = [from_start(emitter, n, emitter.shapes.known(w[0])[0]) for n in x]
        return [emitter.reshape(n, (found.shape[0], 1)) for n in x], w
    return list(found.x) if found.bags else [two_dimensional(emitter, n) for n in found.x], w


def _rewrite(
    anchor: Anchor,
    context: Context,
    found: Product,
    pattern: str,
    cut: Cut | None,
    keep: bool,
    emitter: Emitter,
) -> None:
    operands = [materialise(emitter, o) for o in found.operands]
    x, w = _terms(emitter, found)
    place = [] if cut is None else [cut.dim, emitter.size(cut.outer)]
    args = [x, w, operands, found.text, anchor.reduce_op, *place, keep, [], "", ""]
    op = getattr(torch.ops.autofuse, pattern).default
    fused = emitter.call(op, *args, context.group, context.order, context.site)
    part = Layout.of(found.shape) if cut is None else cut.rest
    target = found.layout if cut is None else without(found.layout, cut)
    result = emitter.rebuild(emitter.item(fused, 0), part, target, context.shapes.of(anchor.node))
    if keep:
        hand_out = hand_out_contraction if keeps_contraction(found.text) else hand_out_product
        hand_out(emitter, emitter.item(fused, 1), found)
    replace_result(emitter, anchor, result)
    for bag in found.bags:
        replace_extras(emitter, bag)


def without(layout: Layout, cut: Cut) -> Layout:
    """The layout of the collective's input without the scattered digit."""
    rest = cut_out(layout, cut.digit)
    assert rest is not None
    return rest.rest
