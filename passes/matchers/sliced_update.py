"""reduce_scatter -> update of this rank's slice -> all_gather of the parameter: ZeRO-1 in tensor ops.

The fused op updates the slices that the graph has, so that nothing need be known of what they are slices of.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from autofuse.lowering.update_rules import RULES
from autofuse.passes.graph.anchors import Anchor, find_anchors
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import aten, tensor
from autofuse.passes.graph.functional import call_on_copies
from autofuse.passes.graph.paths import depends_on
from autofuse.passes.pieces import SCATTER, piece_of, stored, unshaped
from autofuse.passes.reasons import Reason, Reject

from .match import Context, Found, Match, Work
from .update_algebra import before_rounding, rule_of
from .update_rule import Update, below, changed, check_update, find_update, is_read, numbers_of, scaled_late

PATTERN = "reduce_scatter_update_all_gather"


@dataclass(frozen=True)
class Whole:
    """A state of which the graph updates a piece: the input, where the piece begins, and what it becomes."""

    state: fx.Node
    start: int
    value: fx.Node


def match_sliced_update(anchor: Anchor, context: Context) -> Found:
    by_sum = below(anchor)
    wholes = _wholes(anchor, by_sum)
    states = {**changed(anchor), **{piece: unshaped(whole.value).args[1] for piece, whole in wholes.items()}}
    gathers = [a for a in find_anchors(anchor.node.graph) if a.kind == "all_gather" and _updated(a) in by_sum]
    if not gathers:
        if states:
            return Reject(Reason.UNSUPPORTED_VARIANT, "the updated slice is not gathered in this graph")
        return Reject(Reason.NO_COMPUTE, "no tensor is updated by what is reduced, and gathered")
    if len(gathers) > 1:
        names = ", ".join(gather.node.name for gather in gathers)
        return Reject(Reason.EXTRA_USERS, f"what is reduced is gathered {len(gathers)} times: {names}")
    (gather,) = gathers
    if gather.group != anchor.group:
        return Reject(Reason.UNSUPPORTED_VARIANT, f"{gather.node.name} is over another group")
    param = next((to for to, new in states.items() if before_rounding(new) is _updated(gather)), None)
    written = param is not None
    if param is None:
        param = _read(anchor, (gather.input, *states.values()), states)
    if isinstance(param, Reject):
        return param
    becomes = states if written else {**states, param: gather.input}
    reject = check_update(anchor, context, becomes) or _check(gather, becomes, param, written)
    reject = reject or _check_wholes(wholes, states, by_sum)
    if reject is not None:
        return reject
    found = find_update(anchor, becomes)
    if isinstance(found, Reject):
        return found
    if RULES[found.rule].by_norms:
        return Reject(Reason.UNSUPPORTED_VARIANT, "a slice is adapted by its own norm")
    if found.factor != 1.0:
        late = depends_on(anchor, found.scalars.values())
        assert late is not None
        return scaled_late(late, "clipping of slices has no fused op")
    if is_read(anchor, {*found.changed.values()}):
        return Reject(Reason.EXTRA_USERS, "something besides the update reads what is reduced")
    if next(iter(found.changed)) is not param or param in wholes:
        return Reject(
            Reason.UNSUPPORTED_VARIANT,
            f"{gather.node.name} gathers a state of the optimizer, or of a tensor that is whole",
        )
    given = [wholes[node].state if node in wholes else node for node in found.changed]
    inputs = (anchor.input, *given, *found.scalars.values())
    mine = tensor(anchor.node)
    assert mine is not None
    work = Work(bytes_read=len(found.changed) * mine.numel() * mine.element_size())
    apply = partial(_rewrite, anchor, gather, context, found, wholes, written)
    return Match(PATTERN, work, context.shapes, apply, inputs, takes=(gather.node,))


def _updated(gather: Anchor) -> fx.Node:
    """What is gathered, before it is rounded."""
    return before_rounding(gather.input)


def _wholes(anchor: Anchor, by_sum: set[fx.Node]) -> dict[fx.Node, Whole]:
    """By the piece that is read: inputs of the graph of which a piece becomes something by the sum."""
    graph, found = anchor.node.graph, {}
    pieces = {piece: node for node in graph.nodes if (piece := piece_of(node)) is not None}
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        state, value = copy.args
        scatter = unshaped(value)
        place = stored(scatter) if scatter.target is SCATTER and scatter.args[1] in by_sum else None
        if place is None or unshaped(scatter.args[0]) is not state or not _alone(value, scatter):
            continue
        piece = pieces.get(place._replace(source=state))
        if piece is not None:
            found[piece] = Whole(state, place.start, value)
    return found


def _alone(value: fx.Node, scatter: fx.Node) -> bool:
    """Whether nothing but the value reads the slice_scatter that it is a reshape of."""
    while value is not scatter:
        value = value.args[0]
        if len(value.users) > 1:
            return False
    return True


def _check_wholes(
    wholes: dict[fx.Node, Whole], states: dict[fx.Node, fx.Node], by_sum: set[fx.Node]
) -> Reject | None:
    if len({whole.start for whole in wholes.values()}) > 1:
        return Reject(Reason.LAYOUT, "slices of states begin at different places")
    for piece, whole in wholes.items():
        scatter = unshaped(whole.value)
        other = next((u for u in states[piece].users if u is not scatter and u not in by_sum), None)
        if other is not None:
            return Reject(Reason.EXTRA_USERS, f"{other.name} reads the new slice of {whole.state.name}, too")
    return None


def _read(anchor: Anchor, values: tuple[fx.Node, ...], states: dict[fx.Node, fx.Node]) -> fx.Node | Reject:
    """The one tensor besides the states of which the new values are computed: the slice of the parameter."""
    seen: set[fx.Node] = set()
    leaves: dict[fx.Node, None] = {}
    work = [before_rounding(value) for value in values]
    while work:
        node = work.pop()
        val = tensor(node)
        if node in seen or node in anchor.results or val is None or not val.dim():
            continue
        seen.add(node)
        if node.op == "call_function" and rule_of(node) is not None:
            work += node.all_input_nodes
        elif node not in states and node.target is not aten.full.default:
            leaves[node] = None
    if len(leaves) != 1:
        what = ", ".join(leaf.name for leaf in leaves) or "no tensor"
        return Reject(Reason.UNSUPPORTED_VARIANT, f"what is gathered is computed from {what}")
    (param,) = leaves
    if depends_on(anchor, [param]) is not None:
        return Reject(Reason.UNSUPPORTED_VARIANT, f"{param.name} is computed from what is reduced")
    return param


def _check(gather: Anchor, becomes: dict[fx.Node, fx.Node], param: fx.Node, written: bool) -> Reject | None:
    given, out = tensor(param), tensor(gather.input)
    assert given is not None
    assert out is not None
    if out.dtype != given.dtype and not (written and given.dtype == torch.float32):
        return Reject(Reason.DTYPE, f"a parameter of {given.dtype} is gathered in {out.dtype}")
    for node in becomes:
        val = tensor(node)
        if node is not param and val is not None and val.dtype != torch.float32:
            return Reject(Reason.DTYPE, f"{node.name}, a state, is {val.dtype}")
    value = gather.input
    other = next((u for u in value.users if u is not gather.node), None)
    if not written and other is not None:
        return Reject(Reason.EXTRA_USERS, f"{other.name} reads the new slice of the parameter, too")
    return None


def _rewrite(
    anchor: Anchor,
    gather: Anchor,
    context: Context,
    found: Update,
    wholes: dict[fx.Node, Whole],
    written: bool,
    emitter: Emitter,
) -> None:
    param, *slices = found.changed
    states = [wholes[node].state if node in wholes else node for node in slices]
    out = tensor(gather.input)
    assert out is not None
    (gathered,), becomes = call_on_copies(
        emitter,
        torch.ops.autofuse.reduce_scatter_update_all_gather.default,
        {
            "param": None if written else param,
            "states": [*states, param] if written else states,
            "grad": anchor.input,
            "numbers": numbers_of(emitter, found.numbers, found.scalars),
            "rule": found.rule,
            "reduce_op": anchor.reduce_op,
            "gathered": out.dtype,
            "start": next((whole.start for whole in wholes.values()), 0),
            "group_name": context.group,
            "order": context.order,
            "site": context.site,
        },
    )
    values = found.changed | {whole.state: whole.value for whole in wholes.values()}
    for base, new in becomes.items():
        emitter.replace(values[base], new)
    for node in gather.results:
        emitter.replace(node, gathered)
