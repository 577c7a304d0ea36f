"""Parts of what is reduced, where gradients of several tensors are in one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import SPLITS, argument, aten, dtype_of, is_reshape, tensor
from autofuse.passes.pieces import piece_of, unshaped

from .update_rule import changed


@dataclass(frozen=True)
class Part(Anchor):
    """Elements `[start, start + length)` of a sum, which `views` hold."""

    start: int
    length: int
    views: tuple[fx.Node, ...]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return self.views


def parts_of(anchor: Anchor) -> list[Anchor]:
    """What updates tensors by itself: the whole sum, or parts in their order. Empty if nothing does."""
    if changed(anchor):
        return [anchor]
    parts = [
        Part(anchor.node, anchor.kind, start, length, tuple(views))
        for (start, length), views in sorted(_pieces(anchor).items())
    ]
    updating: list[Anchor] = [part for part in parts if changed(part)]
    return updating


def overlap(parts: Sequence[Anchor]) -> bool:
    """Whether elements are in several parts."""
    found = [part for part in parts if isinstance(part, Part)]
    return any(a.node is b.node and a.start + a.length > b.start for a, b in pairwise(found))


def elements(anchor: Anchor) -> int:
    """Of a sum, or a part of one."""
    if isinstance(anchor, Part):
        return anchor.length
    val = tensor(anchor.node)
    assert val is not None
    return val.numel()


def _pieces(anchor: Anchor) -> dict[tuple[int, int], list[fx.Node]]:
    """Runs of elements that views hold, by start and length."""
    val = tensor(anchor.node)
    if val is None or not all(isinstance(size, int) for size in val.shape):
        return {}
    found: dict[tuple[int, int], list[fx.Node]] = {}
    work = [(node, 0, val.numel()) for node in anchor.results]
    while work:
        node, start, length = work.pop()
        found.setdefault((start, length), []).append(node)
        for user in node.users:
            if is_reshape(user):
                work.append((user, start, length))
            for view in user.users if user.target in SPLITS else (user,):
                piece = piece_of(view)
                if piece is not None:
                    work.append((view, start + piece.start, piece.length))
    return found


def given_to(emitter: Emitter, gradient: Anchor) -> fx.Node:
    """What a rank gives of a sum or a part of one; a part as a vector."""
    if not isinstance(gradient, Part):
        return gradient.input
    start, end = gradient.start, gradient.start + gradient.length
    joined = unshaped(gradient.input)
    if joined.target is aten.cat.default and argument(joined, 1, "dim", 0) == 0:
        at = 0
        for piece in joined.args[0]:
            val = tensor(piece)
            assert val is not None
            length = math.prod(val.shape)
            if (at, at + length) == (start, end) and dtype_of(piece) == dtype_of(gradient.input):
                return piece
            at += length
    flat = emitter.reshape(gradient.input, [elements(Anchor(gradient.node, gradient.kind))])
    return emitter.call(aten.slice.Tensor, flat, 0, start, end)
