"""Moves casts to the side of a collective where fewer bytes travel; the bits of the result stay the same.

An all_gather and an all_to_all move values as they are. With views between, and rows that an index chooses or
puts into an empty tensor:

    narrow(gather(x)) = gather(narrow(x))      where everyone who reads the gathered tensor casts it
    gather(widen(x)) = widen(gather(x))        the gradient of the former, and products in a wider dtype

A broadcast stays: the source may make what it sends in another way than the others make their buffers, and
need not read the result. An all_to_all of embedding bags stays: each rank has tables of its own, in dtypes
that its peers do not know.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from .graph.anchors import Anchor, find_anchors, is_collective
from .graph.blank import is_blank, makes_blank
from .graph.emit import Emitter, erase_unused, origin, relax_views
from .graph.follow import (
    SPLITS,
    WAIT,
    Shapes,
    argument,
    aten,
    dtype_of,
    is_cast,
    is_view,
    prims,
    tensor,
    value,
)
from .graph.functional import called
from .graph.permutation import is_permutation
from .matchers.placement import row_index

_MOVING = ("all_gather", "all_to_all")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_BAGS = {
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    aten._embedding_bag_backward.default,
}
_CAST = prims.convert_element_type.default
_JOINS = {aten.cat.default, aten.stack.default}
_PARTS = {*SPLITS, operator.getitem}


@dataclass(frozen=True)
class Widened:
    """A tensor that `steps`, the last first, make of a cast to a wider dtype."""

    cast: fx.Node
    steps: tuple[fx.Node, ...]

    @classmethod
    def above(cls, node: fx.Node) -> Widened | None:
        steps: list[fx.Node] = []
        while (place := _place(node)) is not None:
            steps.append(node)
            node = node.args[place]
        widens = _is_from(node, lambda source, result: source < result)
        return cls(node, tuple(steps)) if widens else None

    def without(self, emitter: Emitter) -> fx.Node:
        """The same of what was cast."""
        made = self.cast.all_input_nodes[0]
        for step in reversed(self.steps):
            made = _moved(emitter, step, made)
        return made


def narrow_collectives(graph: fx.Graph) -> None:
    """Move the casts of `graph` in place."""
    moved = False
    for anchor in find_anchors(graph):
        if anchor.kind in _MOVING and tensor(anchor.node) is not None and not _is_of_bags(anchor):
            moved = _narrow_before(anchor) or _widen_behind(anchor) or moved
    if moved:
        relax_views(graph)  # what a cast had made contiguous may no longer be


def _is_of_bags(anchor: Anchor) -> bool:
    """Whether an all_to_all sends what bags make, or receives what bags are trained by."""
    if anchor.kind != "all_to_all":
        return False

    ops = {*_BAGS, torch.ops.autofuse.embedding_bag_update.default}

    def meets_bags(start: fx.Node, neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> bool:
        seen: set[fx.Node] = set()
        work = [start]
        while work:
            node = work.pop()
            if called(node) in ops:
                return True
            if node not in seen and (node is anchor.node or not is_collective(node)):
                seen.add(node)
                work += neighbours(node)
        return False

    above = meets_bags(anchor.input, lambda node: node.all_input_nodes)
    return above or meets_bags(anchor.node, lambda node: node.users)


def _widen_behind(anchor: Anchor) -> bool:
    """Send what is widened before the collective as it was; whether there is such a cast."""
    widened = Widened.above(anchor.input)
    if widened is None:
        return False
    before = {node: node.meta["val"] for node in anchor.results}
    emitter = Emitter(anchor.node, Shapes())
    sent = widened.without(emitter)
    _send(emitter, anchor, sent, dtype_of(sent))
    for node, val in before.items():
        users = [u for u in node.users if u not in before and u.target is not aten.sym_size.int]
        if users:
            with node.graph.inserting_after(node):
                cast = node.graph.call_function(_CAST, (node, val.dtype))
            cast.meta.update(origin(widened.cast.meta), val=val)
            for user in users:
                user.replace_input_with(node, cast)
    return True


def _narrow_before(anchor: Anchor) -> bool:
    """Send as it is read what every reader narrows behind the collective; whether they all do, alike."""
    moved = list(anchor.results)
    casts: list[fx.Node] = []
    for node in moved:  # grows
        for user in node.users:
            if user in moved or user.target is aten.sym_size.int:
                continue
            if _is_from(user, lambda source, result: source > result):
                casts.append(user)
            elif user.target is WAIT or _keeps_dtype(user) or (_chooses(user) and user.args[0] is node):
                moved.append(user)
            else:
                return False
    dtypes = {dtype_of(cast) for cast in casts}
    joined = [source for node in moved if node.target in _JOINS for source in node.all_input_nodes]
    if len(dtypes) != 1 or not set(joined) <= set(moved):
        return False
    (narrow,) = dtypes
    emitter = Emitter(anchor.node, Shapes())
    widened = Widened.above(anchor.input)
    if widened is not None and dtype_of(widened.cast.all_input_nodes[0]) == narrow:  # there and back again
        sent = widened.without(emitter)
    else:
        sent = emitter.call(_CAST, anchor.input, narrow)
    _send(emitter, anchor, sent, narrow)
    for node in moved:
        _retype(node, narrow)
    for cast in casts:
        cast.replace_all_uses_with(cast.args[0])
    erase_unused(casts)
    return True


def _is_from(node: fx.Node, changes: Callable[[int, int], bool]) -> bool:
    """Whether the node is a cast between dtypes whose sizes change so."""
    if not is_cast(node):
        return False
    source, result = dtype_of(node.args[0]), dtype_of(node)
    if source not in _DTYPES or result not in _DTYPES:
        return False
    assert source is not None
    assert result is not None
    return changes(source.itemsize, result.itemsize)


def _place(node: fx.Node) -> int | None:
    """Which argument a node moves and does nothing else with, if it moves one tensor."""
    if _keeps_dtype(node) or _chooses(node):
        return None if node.target in _JOINS | _PARTS else 0
    if node.target is not aten.index_put.default:
        return None
    # Where rows are added, none must be added to another in the narrow dtype.
    base, index = node.args[0], row_index(node.args[1])
    once = not argument(node, 3, "accumulate", False) or (
        isinstance(index, fx.Node) and is_permutation(index)
    )
    return 2 if is_blank(base) and once else None


def _moved(emitter: Emitter, step: fx.Node, source: fx.Node) -> fx.Node:
    """What a step makes of another source, of another dtype."""
    if step.target is aten.index_put.default:
        base, val = step.args[0], tensor(source)
        assert isinstance(base, fx.Node)
        assert val is not None
        if makes_blank(base):
            given = base.kwargs | {"dtype": val.dtype, "device": val.device}
            blank = emitter.call(base.target, *base.args, **given)
        else:
            blank = emitter.call(_CAST, base, val.dtype)
        return emitter.call(step.target, blank, step.args[1], source, *step.args[3:], **step.kwargs)
    return emitter.redo(step, source)


def _chooses(node: fx.Node) -> bool:
    return node.target in (aten.index.Tensor, aten.index_select.default)


def _keeps_dtype(node: fx.Node) -> bool:
    """Whether the node is a view, of whatever dtype."""
    named = node.target in (_CAST, aten._to_copy.default, aten.to.dtype) or "dtype" in node.kwargs
    return is_view(node) and not named


def _send(emitter: Emitter, anchor: Anchor, sent: fx.Node, dtype: torch.dtype | None) -> None:
    """Let the collective take `sent`, of another dtype."""
    val = tensor(sent)
    if val is not None and not val.is_contiguous():
        sent = emitter.call(aten.clone.default, sent, memory_format=torch.contiguous_format)
    before = anchor.input
    anchor.node.update_arg(0, sent)
    erase_unused([before])
    for node in anchor.results:
        _retype(node, dtype)


def _retype(node: fx.Node, dtype: torch.dtype | None) -> None:
    """Let the metadata of a node that moves data have a dtype."""
    node.meta.pop("eager_input_vals", None)
    node.meta["val"] = fx.node.map_aggregate(value(node), lambda val: _cast(val, dtype))


def _cast(val: object, dtype: torch.dtype | None) -> object:
    if not isinstance(val, torch.Tensor) or val.dtype == dtype:
        return val
    if not hasattr(val, "fake_mode"):
        return val.to(dtype)
    with val.fake_mode:
        return torch.empty_strided(val.shape, val.stride(), dtype=dtype, device=val.device)
