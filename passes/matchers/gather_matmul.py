"""all_gather -> matmul: for every matmul that reads the gathered tensor, follow views up to the collective.

The gather adds one digit, the rank, to the index of a part. The layout of a matmul's operand tells where in
its rows or columns this digit lies; the rest of the layout is applied to the part before the fused op. A cast
of the gathered tensor commutes with the gather: `cast(AG(x)) = AG(cast(x))`, element by element.

Where a reduction has taken the only matmul that reads the gathered tensor, the op gathers without a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from autofuse.lowering.ops.all_gather_matmul import AllGatherMatmul
from autofuse.lowering.plan import Family
from autofuse.passes.graph.anchors import Anchor, fused_op
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import aten, dtype_of, is_cast, is_view
from autofuse.passes.graph.layout import Cut, Digit, Layout, Size, cut_out, exact_quotient, prod, same_size
from autofuse.passes.graph.paths import depends_on, fixed_above
from autofuse.passes.reasons import Reason, Reject

from .match import Context, Found, Match, Work, check_dtype, fill_biases, values
from .matmuls import MATMULS, is_scaled, linear_operands, one_weight
from .operands import two_dimensional
from .readers import Reader, find_cast_readers, reread

PATTERN = "all_gather_matmul"


@dataclass(frozen=True)
class Consumer:
    """`reader.user = X @ w (+ bias)`, where `layout` is the layout of `X: [M, K]` on the gathered tensor.

    If `swapped`, `reader.user = w @ X^T (+ bias)`, the transpose of `X @ w^T (+ bias^T)`.
    """

    reader: Reader
    w: fx.Node
    bias: fx.Node | None
    layout: Layout
    swapped: bool

    @property
    def inputs(self) -> list[fx.Node]:
        return [n for n in (self.w, self.bias) if n is not None]


def match_all_gather(anchor: Anchor, context: Context) -> Found:
    shapes = context.shapes
    readers, cast = find_cast_readers(anchor, shapes)
    free = [r for r in readers if r.user not in context.taken]
    consumers = [c for r in free if (c := _consumer(r)) is not None]
    if not consumers and not any(_is_reduced(r, context) for r in readers):
        return _no_consumer(readers)
    gathered = shapes.known(anchor.node)
    length = exact_quotient(gathered[0], context.world)
    if length is None:
        return Reject(Reason.UNEVEN, f"dim 0 of size {gathered[0]} has no {context.world} equal parts")
    rank = Digit(0, length, context.world)
    if consumers:
        chosen = _choose(anchor, consumers, prod(gathered), rank)
        if isinstance(chosen, Reject):
            return chosen
        consumers, cut = chosen
        layout = consumers[0].layout
    else:
        layout = _as_matrix(gathered)
        cut = _cut(layout, rank)
    dtype = cast or dtype_of(anchor.node)
    reject = check_dtype(dtype)
    if dtype is None or reject is not None:
        return reject or Reject(Reason.DTYPE, "the dtype is not known")
    fused = {c.reader for c in consumers}
    others = [r for r in readers if r not in fused]
    rows, inner = layout.shape
    sizes = tuple((rows, inner, shapes.known(c.w)[-2 if c.swapped else -1]) for c in consumers)
    read = consumers[0].reader.view if consumers else anchor.node
    return Match(
        PATTERN,
        Work(sizes, bytes_kept=prod((rows, inner, dtype.itemsize)) if others else 0),
        context.shapes,
        partial(_rewrite, anchor, context, consumers, others, layout, cut, cast),
        (anchor.input, *(n for c in consumers for n in c.inputs)),
        arguments=_arguments(context, read, consumers, cut, bool(others)),
    )


def _is_reduced(reader: Reader, context: Context) -> bool:
    """Whether the reader is a matmul that a reduction takes or has taken."""
    op = fused_op(reader.user)
    return reader.user in context.taken or (op is not None and op.family is Family.REDUCE)


def _as_matrix(shape: tuple[Size, ...]) -> Layout:
    """The layout of a tensor as a matrix with its first dim as rows."""
    layout = Layout.of(shape).reshape((shape[0], prod(shape[1:])))
    assert layout is not None
    return layout


def _cut(layout: Layout, rank: Digit) -> Cut:
    cut = cut_out(layout, rank)
    assert cut is not None
    return cut


def _arguments(
    context: Context, read: fx.Node, consumers: list[Consumer], cut: Cut, keep: bool
) -> AllGatherMatmul:
    """The arguments of the fused op, as far as they are known before the rewrite. In place of x they have the
    gathered tensor."""
    (x,), w = values([read]), values(c.w for c in consumers)
    # The bias of a transposed product is a column.
    biases = zip(values(c.bias for c in consumers), consumers, strict=True)
    bias = [b.unsqueeze(-1) if c.swapped and c.bias is not None else b for b, c in biases]
    return AllGatherMatmul(x, w, bias, cut.dim, cut.outer, keep, *context.common)


def _consumer(reader: Reader) -> Consumer | None:
    """The matmul that reads the view; None if all_gather_matmul cannot compute it."""
    found = linear_operands(reader.user, vector_bias=False)
    if found is None or reader.user.target is aten.baddbmm.default:
        return None
    x, w, bias = found
    swapped = w is reader.view
    if (x is reader.view) == swapped or bias is reader.view:
        return None
    layout = reader.layout
    if reader.user.target is aten.bmm.default:
        weight = one_weight(w) if not swapped or layout.shape[0] == 1 else None
        flat = layout.reshape((prod(layout.shape[:-1]), layout.shape[-1]))
        if weight is None or flat is None:
            return None
        w, layout = weight, flat
    if swapped:
        return Consumer(reader, x, bias, layout.permute([1, 0]), swapped)
    return Consumer(reader, w, bias, layout, swapped)


def _choose(
    anchor: Anchor, consumers: list[Consumer], total: Size, rank: Digit
) -> tuple[list[Consumer], Cut] | Reject:
    """The consumers that one op computes: all of one layout, preferably with the rank in the rows of X."""
    reject: Reject | None = None
    found: dict[Layout, tuple[list[Consumer], Cut]] = {}
    for c in consumers:
        cut = cut_out(c.layout, rank)
        late = depends_on(anchor, c.inputs)
        later = next((hit for n in c.inputs if (hit := fixed_above(n, anchor.node)) is not None), None)
        if cut is None or c.layout.fixed or not same_size(prod(c.layout.shape), total):
            why = Reject(Reason.LAYOUT, f"{c.reader.view.name} is no whole view of the gathered tensor")
        elif late is not None:
            why = Reject(Reason.EXTRA_USERS, f"the weight {late.name} depends on the gathered tensor")
        elif later is not None:
            why = Reject(Reason.EXTRA_USERS, f"a weight depends on {later.name}, which cannot move")
        else:
            found.setdefault(c.layout, ([], cut))[0].append(c)
            continue
        reject = reject or why
    if not found:
        assert reject is not None
        return reject
    return max(found.values(), key=lambda group: (group[1].dim == 0, len(group[0])))


def _no_consumer(readers: list[Reader]) -> Reject:
    """The most telling reason why no matmul that reads the gathered tensor can be fused."""
    for reader in readers:
        if reader.user.target in MATMULS:
            return _unfit(reader)
    for reader in readers:
        if is_view(reader.user) and (matmul := _matmul_behind(reader.user)) is not None:
            return Reject(
                Reason.LAYOUT, f"{matmul.name} reads a part or an inexpressible view, {reader.user.name}"
            )
    return Reject(Reason.NO_COMPUTE, "no matmul reads the gathered tensor")


def _unfit(reader: Reader) -> Reject:
    """Why a matmul that reads the gathered tensor is not fused."""
    matmul = reader.user
    x, w = matmul.args[-2:]
    if reader.view not in (x, w):
        return Reject(Reason.NO_COMPUTE, f"{matmul.name} reads the gathered tensor as its bias")
    if x is w:
        return Reject(Reason.EXTRA_USERS, f"both operands of {matmul.name} are gathered")
    if is_scaled(matmul):
        return Reject(Reason.UNSUPPORTED_VARIANT, f"{matmul.name} scales its terms (alpha, beta)")
    return Reject(Reason.NO_COMPUTE, f"{matmul.name} is a batch of matmuls")


def _matmul_behind(view: fx.Node) -> fx.Node | None:
    """A matmul that reads `view`, or views or casts of `view`; None if there is none."""
    work = [view]
    while work:
        for user in work.pop().users:
            if user.target in MATMULS:
                return user
            if is_view(user) or is_cast(user):
                work.append(user)
    return None


def _rewrite(
    anchor: Anchor,
    context: Context,
    consumers: list[Consumer],
    others: list[Reader],
    layout: Layout,
    cut: Cut,
    cast: torch.dtype | None,
    emitter: Emitter,
) -> None:
    shape = context.shapes.known(anchor.input)
    x = emitter.rebuild(emitter.cast(anchor.input, cast), Layout.of(shape), cut.rest)
    w = [_weight(emitter, c) for c in consumers]
    bias = fill_biases(emitter, x, [_bias(emitter, c) for c in consumers])
    fused = emitter.call(
        torch.ops.autofuse.all_gather_matmul.default,
        *(x, w, bias, cut.dim, emitter.size(cut.outer), bool(others)),
        *(context.group, context.order, context.site),
    )
    if others:
        reread(emitter, emitter.item(fused, len(consumers)), layout, others)
    for i, c in enumerate(consumers):
        out = emitter.item(fused, i)
        out = emitter.call(aten.permute.default, out, [1, 0]) if c.swapped else out
        whole = context.shapes.known(c.reader.user)
        emitter.replace(c.reader.user, emitter.reshape(out, whole))


def _weight(emitter: Emitter, c: Consumer) -> fx.Node:
    w = two_dimensional(emitter, c.w)
    return emitter.call(aten.permute.default, w, [1, 0]) if c.swapped else w


def _bias(emitter: Emitter, c: Consumer) -> fx.Node | None:
    if c.bias is None or not c.swapped:
        return c.bias
    *rows, columns = emitter.shapes.of(c.bias) or ()
    return emitter.call(aten.permute.default, emitter.reshape(c.bias, (prod(rows), columns)), [1, 0])
