"""expert matmul -> all_to_all (combine), with fixed capacity or dropless.

Fixed capacity: `P: [E, R, N]`, and the leading digit of the collective's input, the destination, must be a
digit of `R`, wherever views and permutes took it. Dropless: `P: [rows, N]` of a grouped matmul, whose rows a
permutation may put into a send buffer with data-dependent splits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from .anchors import Anchor
from .emit import Emitter
from .layout import Cut, Digit, Layout, product
from .match import Context, Found, Match, Work, check_dtype, materialise, outside_reader, replace_result
from .matmul_reduce import extra_users, hand_out_product, leading_cut
from .product import Product, Reject, linear_operands, match_product
from .report import Reason
from .trace import argument, aten, dtype_of, tensor, trace

PATTERN = "expert_matmul_all_to_all"


def match_combine(anchor: Anchor, context: Context) -> Found:
    """Batched, grouped or looped experts."""
    # What feeds it decides, before the splits: those of one rank may be equal by chance.
    dropless = _match_dropless(anchor, context)
    if isinstance(dropless, Match) or not anchor.even:
        return dropless
    looped = _match_loop(anchor, context)
    if looped is not None:
        return looped
    found = _find_even(anchor, context)
    if isinstance(found, Product) and found.shape[0] == 1:
        return Reject(Reason.NO_COMPUTE, "a single matmul feeds it, no batch of experts")
    return found if isinstance(found, Reject) else _even(anchor, context, found)


def match_single_combine(anchor: Anchor, context: Context) -> Found:
    """One matmul, as one expert."""
    if not anchor.even:
        return Reject(Reason.NO_COMPUTE, "no grouped matmul feeds it")
    found = _find_even(anchor, context)
    return found if isinstance(found, Reject) else _even(anchor, context, found)


def _find_even(anchor: Anchor, context: Context) -> Product | Reject:
    assert anchor.input is not None
    found = match_product(anchor.input, context.shapes, batched=True)
    if isinstance(found, Reject):
        return found
    if found.offsets is not None:
        return Reject(Reason.LAYOUT, "a grouped matmul is exchanged in equal parts")
    if product(found.layout.shape) != product(found.shape):
        return Reject(Reason.LAYOUT, "only part of the matmul is exchanged")
    return check_dtype(found.dtype) or found


def _even(anchor: Anchor, context: Context, found: Product) -> Found:
    cut = leading_cut(found, context.world)
    if isinstance(cut, Reject):
        return cut
    if cut.dim != 1:
        return Reject(Reason.LAYOUT, "the destination is no digit of the rows of the experts")
    early = extra_users(anchor, found)
    experts, rows, columns = found.shape
    inner = context.shapes.of(found.x[0])[-1]  # type: ignore[index]
    return Match(
        PATTERN,
        Work(((experts * rows, inner, columns),) * len(found.x), experts),
        context.shapes,
        partial(_rewrite_even, anchor, context, found, cut, bool(early)),
        (*found.x, *found.w, *(o.node for o in found.operands)),
        early,
    )


def _rewrite_even(
    anchor: Anchor, context: Context, found: Product, cut: Cut, keep: bool, emitter: Emitter
) -> None:
    operands = [materialise(emitter, o) for o in found.operands]
    x = [batched(emitter, n) for n in found.x]
    w = [batched(emitter, n) for n in found.w]
    outer = emitter.size(cut.outer)
    fused = _call(emitter, context, x, w, [], operands, found.text, 0, None, None, [], [], 1, outer, keep)
    _deliver(emitter, anchor, context, fused, found.layout, cut)
    if keep:
        hand_out_product(emitter, fused, found)


def _call(emitter: Emitter, context: Context, *args: object) -> fx.Node:
    """The fused op with `args` up to `keep_product`, as its schema has them."""
    op = torch.ops.autofuse.expert_matmul_all_to_all.default
    return emitter.call(op, *args, context.group, context.order, context.site)


def _deliver(
    emitter: Emitter, anchor: Anchor, context: Context, fused: fx.Node, layout: Layout, cut: Cut
) -> None:
    """What arrives is `[source, E, R / W, N]`; the source has taken the place of the destination's digit."""
    have = Layout(((cut.digit,), *cut.rest.dims))
    shape = context.shapes.of(anchor.node)
    replace_result(emitter, anchor, emitter.rebuild(emitter.item(fused, 0), have, layout, shape))


def batched(emitter: Emitter, node: fx.Node) -> fx.Node:
    """Give a single matmul's operand the batch of one expert."""
    val = tensor(node)
    assert val is not None
    return node if val.dim() == 3 else emitter.call(aten.unsqueeze.default, node, 0)


# --- a loop over experts ------------------------------------------------------------------------------


def _match_loop(anchor: Anchor, context: Context) -> Found | None:
    """`cat` of one linear an expert; None if that is not what feeds the collective."""
    assert anchor.input is not None
    matmuls = (aten.mm.default, aten.addmm.default)
    traced = trace(anchor.input, lambda n: n.target in matmuls, context.shapes)
    if traced is None or len(traced.leaves) < 2:
        return None
    leaves = traced.leaves
    shapes = {context.shapes.of(n) for n in leaves}
    if len(shapes) != 1 or len({n.target for n in leaves}) != 1 or len({dtype_of(n) for n in leaves}) != 1:
        return Reject(Reason.UNEVEN, "the experts' matmuls differ in shape, dtype or form")
    rows, columns = shapes.pop() or (0, 0)
    layout = Layout(
        tuple(tuple(Digit(d.dim + 1, d.div, d.size) for d in dim) for dim in traced.layout.dims),
        traced.layout.fixed,
    )
    first = leaves[0]
    dtype = dtype_of(first)
    assert dtype is not None
    fields = [linear_operands(n) for n in leaves]
    if any(f is None for f in fields):
        return Reject(
            Reason.UNSUPPORTED_VARIANT, "an expert's matmul scales its terms or has a bias that is no vector"
        )
    x, w, bias = zip(*[f for f in fields if f is not None], strict=True)
    found = Product(x, w, ("mm",), (), (len(leaves), rows, columns), dtype, layout, first, layout)
    reject = check_dtype(found.dtype)
    if reject is not None:
        return reject
    cut = leading_cut(found, context.world)
    if isinstance(cut, Reject):
        return cut
    if cut.dim != 1 or layout.fixed:
        return Reject(Reason.LAYOUT, "the destination is no digit of the rows of the experts")
    outside = outside_reader(anchor, leaves)
    if outside is not None:
        return Reject(Reason.EXTRA_USERS, f"{outside.name} reads an expert's result before the exchange")
    inner = context.shapes.of(x[0])[-1]  # type: ignore[index]
    return Match(
        PATTERN,
        Work(((rows * len(leaves), inner, columns),), len(leaves)),
        context.shapes,
        partial(_rewrite_loop, anchor, context, found, [b for b in bias if b is not None], cut),
        (*x, *w, *(b for b in bias if b is not None)),
    )


def _rewrite_loop(
    anchor: Anchor, context: Context, found: Product, bias: list[fx.Node], cut: Cut, emitter: Emitter
) -> None:
    x, w, outer = list(found.x), list(found.w), emitter.size(cut.outer)
    fused = _call(emitter, context, x, w, bias, [], found.text, len(x), None, None, [], [], 1, outer, False)
    _deliver(emitter, anchor, context, fused, found.layout, cut)


# --- dropless -----------------------------------------------------------------------------------------


def _match_dropless(anchor: Anchor, context: Context) -> Found:
    source = anchor.input
    assert source is not None
    positions: fx.Node | None = None
    if source.target is aten.index_put.default:
        if len(source.users) > 1:
            return Reject(Reason.EXTRA_USERS, f"{source.name} is read besides the exchange")
        placed = _placement(source)
        if placed is None:
            return Reject(Reason.LAYOUT, f"{source.name} puts rows into something that is not empty or zero")
        source, positions = placed
    found = match_product(source, context.shapes, batched=True)
    if isinstance(found, Reject):
        return found
    if found.offsets is None:
        return Reject(Reason.UNEVEN, "the parts are uneven, but no grouped matmul feeds them")
    if len(found.layout.dims) != 2 or found.layout != Layout.of(found.shape):
        return Reject(Reason.LAYOUT, "the rows of the grouped matmul are rearranged by views")
    reject = check_dtype(found.dtype)
    if reject is not None:
        return reject
    carrier = Anchor(anchor.input, "index_put") if positions is not None else anchor
    early = tuple(u for u in found.last.users if u is not carrier.node)
    rows, columns = found.shape
    inner = context.shapes.of(found.x[0])[-1]  # type: ignore[index]
    experts = context.shapes.of(found.w[0])[0]  # type: ignore[index]
    optional = [n for n in (positions, found.offsets) if n is not None]
    return Match(
        PATTERN,
        Work(((rows, inner, columns),) * len(found.x), experts),
        context.shapes,
        partial(_rewrite_dropless, anchor, context, found, positions, bool(early)),
        (*found.x, *found.w, *(o.node for o in found.operands), *optional),
        early,
    )


def _placement(put: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(rows, positions) of `empty.index_put([positions], rows)`, or of zeros with or without accumulation."""
    base, indices, rows = put.args[:3]
    blank = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)
    zeros = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
    filled = isinstance(base, fx.Node) and base.target in (
        aten.full.default,
        aten.full_like.default,
        aten.new_full.default,
    )
    zero = isinstance(base, fx.Node) and (base.target in zeros or (filled and base.args[-1] == 0))
    empty = isinstance(base, fx.Node) and base.target in blank and not argument(put, 3, "accumulate", False)
    if not (zero or empty) or not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return None
    positions = indices[0]
    if (
        not isinstance(positions, fx.Node)
        or not isinstance(rows, fx.Node)
        or dtype_of(positions) != torch.int64
    ):
        return None
    return (rows, positions) if tensor(positions).dim() == 1 else None  # type: ignore[union-attr]


def _rewrite_dropless(
    anchor: Anchor, context: Context, found: Product, positions: fx.Node | None, keep: bool, emitter: Emitter
) -> None:
    operands = [materialise(emitter, o) for o in found.operands]
    experts = (found.offsets, positions, anchor.output_splits, anchor.input_splits)
    fused = _call(
        emitter, context, list(found.x), list(found.w), [], operands, found.text, 0, *experts, 1, 1, keep
    )
    if keep:
        emitter.replace(found.last, emitter.item(fused, 1))
    result = emitter.item(fused, 0)
    result.meta["val"] = anchor.node.meta["val"]
    replace_result(emitter, anchor, result)
