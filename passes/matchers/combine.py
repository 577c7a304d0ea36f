"""expert matmul -> all_to_all (combine), with fixed capacity or dropless.

The product `P: [E, R, N]` comes from batched, listed or grouped matmuls and a pointwise epilogue. With fixed
capacity, the program cuts a dim of P into one part for each rank; the leading digit of the collective's input
numbers the parts. Dropless, whole rows of P are sent in parts of any size, in their order or in the order
that indices give in a send buffer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import fx

from autofuse.lowering.ops.expert_matmul_all_to_all import ExpertMatmulAllToAll
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import aten, tensor
from autofuse.passes.graph.layout import Cut, Layout, Size, is_natural, prod, same_size
from autofuse.passes.graph.paths import all_below
from autofuse.passes.reasons import Reason, Reject

from .contractions import Product
from .match import Context, Found, Match, Work, check_dtype, fill_biases, replace_result, values
from .operands import Operand, materialise, two_dimensional
from .placement import Placement, find_placement
from .product import match_product
from .product_readers import extra_users, hand_out_product
from .rows import Rows, cut_into_parts, positions, split_rows, whole_rows

PATTERN = "expert_matmul_all_to_all"
NOT_PERMUTED = "GPU kernels move rows where an argsort says"
ANY_ROWS = "the experts of a loop have rows behind each other, on other ranks maybe unequal numbers of them"
"""Nothing in the graph says that experts have equally many rows on all ranks if they have on this one."""


def match_combine(anchor: Anchor, context: Context) -> Found:
    """Batched, listed or grouped experts."""
    return _match(anchor, context, single=False)


def match_single_combine(anchor: Anchor, context: Context) -> Found:
    """One matmul, which is taken as one expert."""
    return _match(anchor, context, single=True)


def _match(anchor: Anchor, context: Context, single: bool) -> Found:
    source = anchor.input
    placement = find_placement(source, context.shapes)
    if isinstance(placement, Reject):
        return placement
    found = match_product(source if placement is None else placement.rows, context.shapes, batched=True)
    if isinstance(found, Reject):
        return found
    if (found.offsets is None and found.shape[0] == 1) is not single:
        return Reject(Reason.NO_COMPUTE, "a single matmul feeds it, no batch of experts")
    if not same_size(prod(found.layout.shape), prod(found.shape)):
        return Reject(Reason.LAYOUT, "only part of the matmul is exchanged")
    reject = check_dtype(found.dtype)
    if reject is not None:
        return reject
    place = _place(anchor, context, found, placement)
    if isinstance(place, Reject):
        return place
    early: tuple[fx.Node, ...] = ()
    if context.hands_out:
        end, rows_sent = (anchor.node, source) if placement is None else (placement.node, placement.rows)
        early = extra_users(end, rows_sent, found)
    *batch, rows, columns = found.shape
    count = prod(batch)
    weights = count if found.offsets is None else context.shapes.known(found.w[0])[0]
    inner = context.shapes.known(found.x[0])[-1]
    inputs = (*found.x, *found.w, *found.bias, *(n for o in found.operands for n in o.nodes), found.offsets)
    more = placement.inputs if placement else ()
    below = all_below(head for head, _ in found.heads) if early else ()
    if any(n in below for n in inputs):
        # Readers of a product will read the fused op, which would then be computed from itself.
        return Reject(Reason.EXTRA_USERS, f"{early[0].name} reads the product, and so does another expert")
    terms = len(found.x) // max(1, found.listed)
    return Match(
        PATTERN,
        Work(((count * rows, inner, columns),) * terms, weights),
        context.shapes,
        partial(_rewrite, anchor, context, found, place, bool(early)),
        tuple(n for n in (*inputs, *more) if n is not None),
        early,
        _arguments(context, found, place, bool(early)),
        "" if placement is None or placement.permutes else NOT_PERMUTED,
    )


def _arguments(context: Context, found: Product, place: Cut | Rows, keep: bool) -> ExpertMatmulAllToAll:
    """The arguments of the fused op, as far as they are known before the rewrite: positions are not."""
    terms = (values(found.x), values(found.w), values(found.bias), values(o.node for o in found.operands))
    experts = (found.text, found.listed, tensor(found.offsets), None)
    return ExpertMatmulAllToAll(*terms, *experts, *parts_of(place), keep, *context.common)


def parts_of(place: Cut | Rows) -> tuple[list[Size], list[Size], int, Size]:
    """Splits, dim and outer, as the expert ops take them."""
    if isinstance(place, Cut):
        return [], [], place.dim, place.outer
    return place.output_splits, place.input_splits, 1, 1


def _place(
    anchor: Anchor, context: Context, found: Product, placement: Placement | None
) -> Cut | Rows | Reject:
    shape = found.shape if len(found.shape) == 3 else (1, *found.shape)
    layout = found.layout
    natural = is_natural(layout, found.shape)
    if (found.offsets is not None or placement is not None) and not natural:
        return Reject(Reason.LAYOUT, "the rows of the matmul are rearranged by views")
    if found.listed and natural:
        return Reject(Reason.UNEVEN, ANY_ROWS)
    order: Layout | None = None
    if not natural:
        cut = cut_into_parts(layout, shape, context.world)
        if cut is not None:
            even = Reject(Reason.UNEVEN, "the parts are uneven, though the matmul is cut into equal ones")
            return cut if anchor.even else even
        order = whole_rows(layout, shape)
        if order is None:
            return Reject(
                Reason.LAYOUT, "the destination is no digit of rows or columns, nor are rows sent whole"
            )
    return split_rows(anchor, shape[2], context.shapes, order, placement)


def _rewrite(
    anchor: Anchor, context: Context, found: Product, place: Cut | Rows, keep: bool, emitter: Emitter
) -> None:
    flat = isinstance(place, Rows)
    operands = [_operand(emitter, o, found, flat) for o in found.operands]
    x = _activations(emitter, found, flat)
    shaped = two_dimensional if found.listed else batched
    w = [shaped(emitter, n) for n in found.w]
    bias = fill_biases(emitter, x[0], [_bias(emitter, b, found) for b in found.bias])
    experts = (found.text, found.listed, found.offsets)
    if isinstance(place, Cut):
        how: tuple[object, ...] = (None, [], [], place.dim, emitter.size(place.outer))
    else:
        splits = ([emitter.size(s) for s in sizes] for sizes in (place.output_splits, place.input_splits))
        how = (_positions(emitter, found, place), *splits, 1, 1)
    fused = emitter.call(
        torch.ops.autofuse.expert_matmul_all_to_all.default,
        *(x, w, bias, operands, *experts, *how, keep, context.group, context.order, context.site),
    )
    result = emitter.item(fused, 0)
    if isinstance(place, Cut):
        # In the result, the digit of the destination numbers the sources.
        have = Layout(((place.digit,), *place.rest.dims))
        result = emitter.rebuild(result, have, found.layout, context.shapes.of(anchor.node))
    else:
        result = like(emitter, result, anchor.node)
    replace_result(emitter, anchor, result)
    if keep:
        _hand_out(emitter, fused, found)


def _activations(emitter: Emitter, found: Product, flat: bool) -> list[fx.Node]:
    x = list(found.x)
    if not flat:
        shaped = two_dimensional if found.listed else batched
        return [shaped(emitter, n) for n in x]
    x = [emitter.reshape(n, (prod(s[:-1]), s[-1])) for n in x if (s := emitter.shapes.of(n)) is not None]
    if not found.listed:
        return x
    terms = [x[i : i + found.listed] for i in range(0, len(x), found.listed)]
    return [emitter.call(aten.cat.default, term) for term in terms]


def _operand(emitter: Emitter, operand: Operand, found: Product, flat: bool) -> fx.Node:
    """The operand as the fused op takes it, along `[E, R, N]`, or along `[rows, N]` if `flat`."""
    if operand.others:
        each = []
        for one in (replace(operand, others=()), *operand.others):
            node = materialise(emitter, one)
            have = emitter.shapes.known(node)
            each.append(emitter.reshape(node, (*(1,) * (3 - len(have)), *have)))
        node = emitter.call(aten.cat.default, each)
    else:
        node = materialise(emitter, operand)
    have = emitter.shapes.known(node)
    if not flat or len(have) < 3:
        return node
    experts, rows, _ = found.shape
    if not same_size(have[1], rows):
        node = emitter.call(aten.expand.default, node, [-1, emitter.size(rows), -1])
    return emitter.reshape(node, (experts * rows, have[2]))


def _bias(emitter: Emitter, bias: fx.Node | None, found: Product) -> fx.Node | None:
    """`[E, N]`, or `[N]` of a listed expert."""
    return bias if bias is None or found.listed else emitter.reshape(bias, (found.shape[0], found.shape[-1]))


def _positions(emitter: Emitter, found: Product, place: Rows) -> fx.Node | None:
    if place.order is not None:
        return positions(emitter, place.order, found.shape, found.x[0])
    return None if place.placement is None else place.placement.positions(emitter)


def _hand_out(emitter: Emitter, fused: fx.Node, found: Product) -> None:
    """Let users of the finished products read the second output of the fused op."""
    whole = emitter.item(fused, 1)
    if found.offsets is not None:
        emitter.replace(found.last, like(emitter, whole, found.last))
        return
    whole = emitter.reshape(whole, found.shape)
    if not found.heads:
        hand_out_product(emitter, whole, found)
    for i, (head, layout) in enumerate(found.heads):
        one = emitter.call(aten.select.int, whole, 0, i)
        have = Layout(Layout.of((1, *found.shape[1:])).dims[1:])
        emitter.replace(head, emitter.rebuild(one, have, layout, emitter.shapes.of(head)))


def like(emitter: Emitter, result: fx.Node, node: fx.Node) -> fx.Node:
    """`result` in the shape of `node`. A shape that depends on data is kept."""
    val, have = tensor(node), tensor(result)
    assert val is not None
    assert have is not None
    if val.dim() == have.dim() and same_size(
        emitter.shapes.size(val.shape[-1]), emitter.shapes.size(have.shape[-1])
    ):
        result.meta["val"] = node.meta["val"]
        return result
    shape = emitter.shapes.known(node)
    return emitter.reshape(result, shape)


def batched(emitter: Emitter, node: fx.Node) -> fx.Node:
    """The operand of a matmul with a leading dim of experts; one expert if it had none."""
    val = tensor(node)
    assert val is not None
    return node if val.dim() == 3 else emitter.call(aten.unsqueeze.default, node, 0)
