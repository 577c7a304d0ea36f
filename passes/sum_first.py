"""Moves a sum from behind an all_reduce to before it: fewer elements travel.

    sum(view(AR(y)), dims) = AR(sum(view(y), dims))

An all_reduce adds element by element, so views of the whole result may lie in between. A view of a part may
not: ranks may take different parts. Llama-4 of Hugging Face reduces what every expert has for every token,
and adds up the experts then. In float16 nothing moves: what one rank adds may exceed its range, although the
sums over the ranks do not.
"""

from __future__ import annotations

import torch
from torch import fx

from .graph.anchors import Anchor, find_anchors
from .graph.emit import Emitter, erase_unused
from .graph.follow import SPLITS, WAIT, Shapes, aten, dtype_of, is_view
from .graph.layout import exact_quotient, prod

_SUM = aten.sum.dim_IntList
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_TAKES_A_PART = {aten.select.int, aten.slice.Tensor, *SPLITS}


def sum_first(graph: fx.Graph) -> None:
    """Move all such sums of `graph` in place. The order of collectives stays."""
    for anchor in find_anchors(graph):
        if anchor.kind == "all_reduce" and anchor.reduce_op in ("sum", "avg"):
            steps = _steps(anchor)
            if steps:
                _move(anchor, steps)


def _steps(anchor: Anchor) -> list[fx.Node]:
    """The views of the result and the sum behind them, if each has one user and can be computed before the
    collective; else none."""
    steps: list[fx.Node] = []
    node = anchor.node
    while len(node.users) == 1:
        (user,) = node.users
        if any(n is not node and not n < anchor.node for n in user.all_input_nodes):
            return []
        if user.target is _SUM and user.args[0] is node:
            kept = dtype_of(user) == dtype_of(node) and dtype_of(node) in _DTYPES
            return [*steps, user] if kept and _is_smaller(user, anchor.input) else []
        is_whole = is_view(user) and user.args[0] is node and user.target not in _TAKES_A_PART
        if not (user.target is WAIT or is_whole):
            return []
        steps += [] if user.target is WAIT else [user]
        node = user
    return []


def _is_smaller(total: fx.Node, before: fx.Node) -> bool:
    """Whether the all_reduce sends no more elements behind the sum than in front of it. A sum that reads an
    `expand` may have more."""
    shapes = Shapes()
    after, reduced = shapes.of(total), shapes.of(before)
    return (
        after is not None and reduced is not None and exact_quotient(prod(reduced), prod(after)) is not None
    )


def _move(anchor: Anchor, steps: list[fx.Node]) -> None:
    before, behind = Emitter(anchor.node, Shapes()), Emitter(steps[-1], Shapes())
    value = anchor.input
    for step in steps:
        value = before.redo(step, value)
    reduced = before.redo(anchor.node, value)
    steps[-1].replace_all_uses_with(behind.call(WAIT, reduced))
    erase_unused(steps[-1:])
