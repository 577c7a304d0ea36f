"""Computes what lies between two all_reduces on slices: sequence parallelism in a tensor-parallel graph.

    all_reduce(p) -> f -> readers          reduce_scatter(p) -> f on the slice -> all_gather -> readers

These are CoCoNet's transformations split (section 3.1) and reorder (3.2), along the whole residual stream:

    p0        p1                            p0         p1
    | AR      | AR                          | RS       | RS
    h0 -----> + --> norm --> mm             h0_r ----> + --> norm --> AG --> mm
    |                                       |
    norm --> mm                             norm --> AG --> mm

split      all_reduce = all_gather(reduce_scatter). Rows have W equal parts, known or guarded, or are padded.
reorder    all_gather moves down through pointwise ops, casts, views, and reductions along other dims. Legal
           if everything that they read is the same on all ranks: any rank would have computed the same for
           a row. An operand with rows is cut, one that broadcasts along them is read whole.
sums       A sum along the cut dim (the gradient of a norm's weight) becomes a partial sum and an all_reduce.
state      Values that the backward reads stay slices. So the pass runs on the joint graph of forward and
           backward, before it is cut into the two.

The order of the collectives of a group is that of the graph, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from autofuse.lowering.torch_internals import size_hint, tangent_of
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter, erase_unused
from autofuse.passes.graph.follow import WAIT, Shapes, aten, tensor
from autofuse.passes.graph.layout import Size, prod

from .padding import first_rows, masked, multiply_padded, padded_product, row_mask
from .slices import (
    Fit,
    cut_dim,
    in_one_piece,
    is_free,
    leading_dim,
    needs_part,
    on_slices,
    shape_of,
    sums_cut_dim,
)

c10d = torch.ops._c10d_functional

MOST_GATHERED = 1.25
"""A stream may gather so many times the bytes that it scatters: more than 1, since its first and its last
value may be gathered, too."""

USUAL = 64
"""Sizes that are symbols count as this in that comparison: ranks may have seen different ones first."""

IsReplicated = Callable[[fx.Node], bool]
"""Whether a value of the graph is proven to be the same on all ranks of the group."""


@dataclass
class Stream:
    """The values of one group that can be computed on slices.

    Attributes:
        group: of the collectives, as they name it.
        fit: how rows are cut.
        cuts: the values, each with the dim along which it is cut.
        reductions: by its result, each all_reduce that becomes a reduce_scatter.
        sums: sums along the cut dim.
    """

    group: str | fx.Node
    fit: Fit
    cuts: dict[fx.Node, int] = field(default_factory=dict)
    reductions: dict[fx.Node, Anchor] = field(default_factory=dict)
    sums: list[fx.Node] = field(default_factory=list)

    @property
    def world(self) -> int:
        return self.fit.world

    @property
    def gathered(self) -> list[fx.Node]:
        """The cut values with readers that need the whole."""
        inside = {*self.cuts, *self.sums}
        return [node for node in self.cuts if any(user not in inside for user in node.users)]

    @property
    def rests_on(self) -> list[fx.Node]:
        """The values that must be the same on all ranks."""
        return [node for node in self.cuts if node not in self.reductions] + self.sums

    @property
    def bytes_reduced(self) -> int:
        return sum(map(_bytes_seen, self.reductions))

    @property
    def bytes_gathered(self) -> int:
        return sum(map(_bytes_seen, self.gathered))


def find_stream(
    graph: fx.Graph, anchors: Sequence[Anchor], fit: Fit, replicated: IsReplicated
) -> Stream | None:
    """The values between the all_reduces `anchors` of one group that can be computed on slices, if what
    `fit` assumes holds."""
    # More waits are waits for the first.
    fitting = [a for a in anchors if a.reduce_op in ("sum", "avg") and len(a.node.users) == 1 and a.waits]
    while True:
        stream = _grow(graph, Stream(anchors[0].group, fit), fitting, fit, replicated)
        gathered = set(stream.gathered)
        whole = [anchor for anchor in fitting if not gathered.isdisjoint(anchor.waits)]
        if not whole:
            break
        # Slices of sums that are needed whole save nothing: they stay all_reduces.
        fitting = [anchor for anchor in fitting if anchor not in whole]
    _leave_out(stream)
    return stream if stream.reductions else None


def _grow(
    graph: fx.Graph, stream: Stream, anchors: Sequence[Anchor], fit: Fit, replicated: IsReplicated
) -> Stream:
    """Fills the stream with everything that can be computed on slices of the results of `anchors`."""
    results = {anchor.waits[0]: anchor for anchor in anchors}
    for node in graph.nodes:
        if node in results:
            dim = stream_dim(results[node], fit)
            if dim is not None:
                stream.cuts[node] = dim
                stream.reductions[node] = results[node]
        elif any(source in stream.cuts for source in node.all_input_nodes) and replicated(node):
            dim = None if fit.padded and _is_whole_number(node) else cut_dim(node, stream.cuts, fit)
            if dim is not None:
                stream.cuts[node] = dim
            elif sums_cut_dim(node, stream.cuts):
                stream.sums.append(node)
    _draw_back(stream)
    return stream


def _is_whole_number(node: fx.Node) -> bool:
    """Whether the value has whole numbers, by which ops may fail to divide where padding is zero."""
    val = tensor(node)
    return val is not None and not val.is_floating_point() and val.dtype != torch.bool


def stream_dim(anchor: Anchor, fit: Fit) -> int | None:
    """The dim along which the result of an all_reduce can be cut; None if it cannot."""
    shape, val = shape_of(anchor.node), tensor(anchor.node)
    floats = val is not None and val.is_floating_point()
    return leading_dim(shape, fit) if floats and shape is not None else None


def _draw_back(stream: Stream) -> None:
    """Takes out what is not worth a slice: views whose readers need the whole, and reductions whose result
    nothing on slices reads."""
    for node in reversed(list(stream.cuts)):
        inside = any(user in stream.cuts or user in stream.sums for user in node.users)
        if not inside and (is_free(node) or node in stream.reductions):
            del stream.cuts[node]
            stream.reductions.pop(node, None)


def _leave_out(stream: Stream) -> None:
    """Takes out parts of the stream that gather too much, as where the backward reads the whole of many
    values."""
    for part in _parts(stream):
        reduced = sum(_nbytes(node) for node in part if node in stream.reductions)
        gathered = sum(_nbytes(node) for node in stream.gathered if node in part)
        if gathered > MOST_GATHERED * reduced:
            for node in part:
                del stream.cuts[node]
                stream.reductions.pop(node, None)
            stream.sums = [node for node in stream.sums if node.args[0] not in part]


def _parts(stream: Stream) -> list[set[fx.Node]]:
    """The connected parts of the stream."""
    parts: list[set[fx.Node]] = []
    left = dict.fromkeys(stream.cuts)
    while left:
        part, work = set(), [next(iter(left))]
        while work:
            node = work.pop()
            if node in left:
                del left[node]
                part.add(node)
                work += [*node.all_input_nodes, *node.users]
        parts.append(part)
    return parts


def split(graph: fx.Graph, stream: Stream) -> None:
    """Rewrites the stream in place."""
    slices: dict[fx.Node, fx.Node] = {}
    parts: dict[tuple[fx.Node, int], fx.Node] = {}
    masks: dict[Size, fx.Node] = {}
    wholes = set(stream.gathered)
    summands = [anchor.input for anchor in stream.reductions.values()]
    ends: list[fx.Node] = []
    for node in list(graph.nodes):
        if node in stream.cuts:
            emitter = Emitter(node, Shapes())
            if node in stream.reductions:
                slices[node] = _scattered(emitter, stream, node)
            elif node.target is WAIT:
                slices[node] = slices[node.args[0]]
            else:
                slices[node] = _on_slices(emitter, stream, node, slices, parts)
            _mark(emitter, node)
            if node in wholes:
                emitter = Emitter(node.next, Shapes())
                whole, padded = _gathered(emitter, stream, node, slices[node])
                outside = [u for u in node.users if u not in stream.cuts and u not in stream.sums]
                _mark(emitter, _latest(node, outside))
                for user in outside:
                    user.replace_input_with(node, whole)
                for new, matmul in multiply_padded(whole, padded) if padded is not whole else ():
                    _mark(new, matmul)
        elif node in stream.sums:
            emitter = Emitter(node, Shapes())
            source = node.args[0]
            assert isinstance(source, fx.Node)
            part = _without_padding(emitter, stream, source, slices[source], masks)
            partial = emitter.call(node.target, part, *node.args[1:], **node.kwargs)
            total = emitter.call(c10d.all_reduce.default, partial, "sum", stream.group)
            _mark(emitter, node)
            node.replace_all_uses_with(emitter.call(c10d.wait_tensor.default, total))
            _mark(emitter, node)
        else:
            continue
        ends.append(node)
    for node in reversed(ends):
        graph.erase_node(node)
        if node in stream.reductions:
            graph.erase_node(stream.reductions[node].node)
    erase_unused(summands)
    graph.lint()


def _scattered(emitter: Emitter, stream: Stream, node: fx.Node) -> fx.Node:
    """This rank's part of the sum, in place of the whole."""
    anchor, dim, shape = stream.reductions[node], stream.cuts[node], shape_of(node)
    assert shape is not None
    fit = stream.fit
    part = [fit.part(s) if d == dim else s for d, s in enumerate(shape)]
    op, world = anchor.reduce_op, stream.world
    if in_one_piece(shape, dim):
        if fit.pads(shape[dim]):
            rows = padded_product(emitter, anchor.input, shape[dim:], part[dim] * world)
        else:
            rows = emitter.reshape(anchor.input, shape[dim:])
        sums = emitter.call(c10d.reduce_scatter_tensor.default, rows, op, world, stream.group)
        return emitter.reshape(emitter.call(c10d.wait_tensor.default, sums), part)
    pieces = emitter.call(aten.split.Tensor, anchor.input, part[dim], dim)
    rows = emitter.call(aten.cat.default, [emitter.item(pieces, r) for r in range(world)])
    sums = emitter.call(c10d.reduce_scatter_tensor.default, rows, op, world, stream.group)
    return emitter.call(c10d.wait_tensor.default, sums)


def _gathered(emitter: Emitter, stream: Stream, node: fx.Node, part: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The whole value, of all parts, and the rows that it has where its padding was cut off."""
    dim, shape, whole = stream.cuts[node], shape_of(part), shape_of(node)
    assert shape is not None
    assert whole is not None
    rows = emitter.reshape(part, shape[dim:]) if in_one_piece(shape, dim) else part
    gathered = emitter.call(c10d.all_gather_into_tensor.default, rows, stream.world, stream.group)
    gathered = emitter.call(c10d.wait_tensor.default, gathered)
    if stream.fit.pads(whole[dim]):
        return emitter.reshape(first_rows(emitter, gathered, whole[dim]), whole), gathered
    if rows is not part or dim == 0:
        found = emitter.reshape(gathered, whole)
    else:
        pieces = emitter.call(aten.split.Tensor, gathered, shape[0])
        of_ranks = [emitter.item(pieces, r) for r in range(stream.world)]
        found = emitter.call(aten.cat.default, of_ranks, dim)
    return found, found


def _without_padding(
    emitter: Emitter, stream: Stream, node: fx.Node, part: fx.Node, masks: dict[Size, fx.Node]
) -> fx.Node:
    """This rank's part of a value, with zeros where it has no rows. `masks`: by the number of all rows."""
    dim, shape = stream.cuts[node], shape_of(node)
    assert shape is not None
    rows = shape[dim]
    if not stream.fit.pads(rows):
        return part
    if rows not in masks:
        masks[rows] = row_mask(emitter, part, rows, stream.group)
    return masked(emitter, part, dim, masks[rows])


def _on_slices(
    emitter: Emitter,
    stream: Stream,
    node: fx.Node,
    slices: dict[fx.Node, fx.Node],
    parts: dict[tuple[fx.Node, int], fx.Node],
) -> fx.Node:
    """The node on slices. `parts`: of values that are not cut, each with the dim."""
    dim = stream.cuts[node]

    def own(read: fx.Node) -> fx.Node:
        if read in slices:
            return slices[read]
        place = needs_part(node, read, dim)
        if place is None:
            return read
        if (read, place) not in parts:
            # Behind the value, so that every later reader has it. Where torch partitions, the backward begins
            # with the first reader of a tangent: what lies behind it there runs in the backward, read or not.
            behind = Emitter(read.next if tangent_of(read) is None else node, Shapes())
            while behind.anchor.op == "placeholder":
                behind = Emitter(behind.anchor.next, Shapes())
            given = shape_of(read)
            assert given is not None
            pads = stream.fit.pads(given[place])
            op = torch.ops.autofuse.own_part.default
            parts[read, place] = behind.call(op, read, place, stream.group, *((True,) if pads else ()))
            _mark(behind, read)
        return parts[read, place]

    args = fx.node.map_arg(on_slices(node, dim, stream.fit, emitter.size), own)
    kwargs = fx.node.map_arg(node.kwargs, own)
    return emitter.call(node.target, *args, **kwargs)


def _mark(emitter: Emitter, node: fx.Node) -> None:
    """New nodes belong to the same half of the joint graph as `node`."""
    for new in emitter.new:
        for key, value in node.meta.items():
            if key not in ("val", "tensor_meta", "desc"):
                new.meta.setdefault(key, value)


def _latest(node: fx.Node, users: list[fx.Node]) -> fx.Node:
    """`node`, or one of its users if none belongs to the forward half."""
    backward = [user for user in users if user.meta.get("partitioner_tag") == "is_backward"]
    return backward[0] if len(backward) == len(users) else node


def _nbytes(node: fx.Node) -> int:
    val, shape = tensor(node), shape_of(node)
    if val is None or shape is None:
        return 0
    size = sympy.sympify(prod(shape))
    return int(size.xreplace(dict.fromkeys(size.free_symbols, sympy.Integer(USUAL)))) * val.itemsize


def _bytes_seen(node: fx.Node) -> int:
    """At the sizes that the graph was traced with."""
    val = tensor(node)
    return 0 if val is None else size_hint(val.numel(), USUAL) * val.itemsize
