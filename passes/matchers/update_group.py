"""What one op reduces and updates: gradients of one buffer, all that are scaled by their norm, or, on GPUs,
those of several tensors that are updated alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autofuse.lowering.update_rules import SIGN
from autofuse.passes.graph.anchors import Anchor, find_anchors
from autofuse.passes.graph.follow import dtype_of, tensor
from autofuse.passes.graph.paths import all_below, depends_on, stops_above
from autofuse.passes.reasons import Reason, Reject

from .match import Context
from .sum_parts import elements, overlap, parts_of
from .update_algebra import Coefficient
from .update_clip import Limits, Norms
from .update_norms import NotARule
from .update_rule import Update, is_read, scaled_late, symbols_in
from .update_runs import run_of
from .update_search import update_of


@dataclass(frozen=True)
class Group:
    """Gradients, which are sums of `anchors` or parts of them, and their updates, by one rule.

    limits: of the factor by the norm of all; None without one. squares: sums of squares that the graph has,
    as multiples of those of the gradients. kept: sums that something else reads, too.
    """

    anchors: Sequence[Anchor]
    gradients: Sequence[Anchor]
    updates: Sequence[Update]
    scalars: dict[str, fx.Node]
    limits: Limits | None = None
    squares: Mapping[fx.Node, Mapping[int, Coefficient]] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """Those of the op."""
        changed = (node for update in self.updates for node in update.changed)
        return (*(anchor.input for anchor in self.anchors), *changed, *self.scalars.values())

    def parts(self, anchor: Anchor) -> list[Anchor]:
        """The gradients that are the sum, or parts of it."""
        return [gradient for gradient in self.gradients if gradient.node is anchor.node]

    def is_kept(self, anchor: Anchor) -> bool:
        """Whether anything else reads the sum."""
        ends = {value for update in self.updates for value in update.changed.values()} | self.squares.keys()
        parts = self.parts(anchor)
        if parts == [anchor]:
            return is_read(anchor, ends)
        views = {view for part in parts for view in part.results}
        return is_read(anchor, views | ends) or any(is_read(part, ends) for part in parts)

    @property
    def kept(self) -> list[Anchor]:
        return [anchor for anchor in self.anchors if self.is_kept(anchor)]


def group_of_updates(anchor: Anchor, context: Context) -> Group | Reject:
    """What the op at the anchor has."""
    gradients = parts_of(anchor)
    if not gradients:
        return Reject(Reason.NO_COMPUTE, "no tensor is updated by what is reduced")
    updates = _updates(gradients, context)
    if isinstance(updates, Reject):
        return updates
    late = next((late for g, u in zip(gradients, updates, strict=True) if (late := _late(g, u))), None)
    if late is not None:
        return _clipped(anchor, context, late)
    rules = {update.rule: None for update in updates}
    if len(rules) > 1:
        return Reject(Reason.UNSUPPORTED_VARIANT, f"{' and '.join(rules)} are updates of one buffer")
    group = _group((anchor,), gradients, updates)
    found = _with_others(group, context) if _is_on_gpu(anchor) else group
    return found if isinstance(found, Reject) else _checked(found)


def _is_on_gpu(anchor: Anchor) -> bool:
    val = tensor(anchor.node)
    return val is not None and val.device.type == "cuda"


def _group(anchors: Sequence[Anchor], gradients: Sequence[Anchor], updates: Sequence[Update]) -> Group:
    scalars = {name: node for update in updates for name, node in update.scalars.items()}
    return Group(anchors, gradients, updates, scalars)


def _with_others(group: Group, context: Context) -> Group | Reject:
    """The group with later all_reduces, if it has the first of those that one kernel for GPUs can take: many
    exchanges that wait for nothing but each other's start take as long as one."""
    (anchor,), rule = group.anchors, group.updates[0].rule
    together = run_of(anchor)
    first, *others = together
    if first.node is not anchor.node:
        leads = _updates_like(first, rule, context)
        why = f"it is kept, as {first.node.name} is, the first of those that one op can update"
        return group if leads is None else Reject(Reason.UNSUPPORTED_VARIANT, why)
    anchors, gradients, updates = [anchor], [*group.gradients], [*group.updates]
    for other in others:
        found = _updates_like(other, rule, context)
        if found is not None:
            anchors.append(other)
            gradients += found[0]
            updates += found[1]
    larger = _group(anchors, gradients, updates)
    below = all_below(a.node for a in anchors)
    return group if any(node in below for node in larger.inputs) else larger


def _updates_like(anchor: Anchor, rule: str, context: Context) -> tuple[list[Anchor], list[Update]] | None:
    """The gradients of the anchor with their updates; None if these are not all by the rule, and by values
    that are known before the sum is."""
    gradients = parts_of(anchor)
    updates = _updates(gradients, context)
    if isinstance(updates, Reject) or any(update.rule != rule for update in updates):
        return None
    if any(_late(gradient, update) for gradient, update in zip(gradients, updates, strict=True)):
        return None
    return gradients, updates


def _late(gradient: Anchor, update: Update) -> fx.Node | None:
    """A value by which the update is scaled that is computed from the sum."""
    return None if update.factor == 1.0 else depends_on(gradient, update.scalars.values())


def _updates(gradients: Sequence[Anchor], context: Context) -> list[Update] | Reject:
    found = []
    for gradient in gradients:
        update = update_of(gradient, context)
        if isinstance(update, Reject):
            return update
        found.append(update)
    return Reject(Reason.LAYOUT, "tensors are updated by the same elements") if overlap(gradients) else found


def _checked(group: Group) -> Group | Reject:
    kept = group.kept
    for anchor in kept:
        if sum(map(elements, group.parts(anchor))) < elements(anchor):
            why = f"a part of {anchor.node.name} updates no tensor, and is read, or all of it is"
            return Reject(Reason.EXTRA_USERS, why)
    if len({dtype_of(anchor.node) for anchor in kept}) > 1:
        return Reject(Reason.DTYPE, "sums of several dtypes are read, too")
    return group


def _clipped(anchor: Anchor, context: Context, late: fx.Node) -> Group | Reject:
    """The gradients of whose norm `late` is computed, if the anchor is the first of them."""
    every = {a.node: a for a in find_anchors(anchor.node.graph)}
    anchors = [every[node] for node in stops_above(late, every.keys())]
    if anchors[0].node is not anchor.node:
        return scaled_late(late, f"it is kept, as {anchors[0].node.name} is, the first in its norm")
    gradients: list[Anchor] = []
    held: dict[fx.Node, tuple[int, ...]] = {}
    for other in anchors:
        alike = (other.kind, other.group, other.reduce_op) == (anchor.kind, anchor.group, anchor.reduce_op)
        if not alike:
            return scaled_late(late, f"{other.node.name} is another collective than {anchor.node.name}")
        parts = parts_of(other)
        if not parts:
            return scaled_late(late, f"no tensor is updated by {other.node.name}, which is in the norm")
        numbers = range(len(gradients), len(gradients) + len(parts))
        if sum(map(elements, parts)) == elements(other):
            held |= dict.fromkeys(other.results, tuple(numbers))
        held |= {node: (i,) for i, part in zip(numbers, parts, strict=True) for node in part.results}
        gradients += parts
    updates = _updates(gradients, context)
    if isinstance(updates, Reject):
        return scaled_late(late, f"of a tensor in the norm, {updates.detail}")
    below = all_below(a.node for a in anchors)
    try:
        group = _scaled(anchors, gradients, updates, Norms(held, below.__contains__), late)
    except (NotARule, TypeError, ValueError) as error:  # the latter of sympy, for what has no order
        return scaled_late(late, str(error))
    if isinstance(group, Reject):
        return group
    computed = next((node for node in group.inputs if node in below), None)
    if computed is not None:
        return scaled_late(late, f"{computed.name}, an input of the update, is computed from a sum")
    return _checked(group)


def _scaled(
    anchors: Sequence[Anchor],
    gradients: Sequence[Anchor],
    updates: Sequence[Update],
    norms: Norms,
    late: fx.Node,
) -> Group | Reject:
    """The group, with the factor as limits. Raises NotARule, or an error of sympy."""
    scalars: dict[str, fx.Node] = {}
    scaled, limits = [], None
    for gradient, update in zip(gradients, updates, strict=True):
        if update.rule != updates[0].rule:
            return scaled_late(late, f"{updates[0].rule} and {update.rule} are updates of one clipping")
        if update.factor == 1.0:
            return scaled_late(late, f"{gradient.node.name} is in the norm, but its update is not scaled")
        scale, own, members = norms.clip(update.factor, update.scalars)
        if members != {*range(len(gradients))} or own != (limits or own):
            return scaled_late(late, "gradients are scaled by norms of several groups of them")
        limits = own
        numbers = list(update.numbers)
        numbers[SIGN] = numbers[SIGN] * scale
        scaled.append(replace(update, numbers=tuple(numbers), factor=1.0))
        scalars |= symbols_in({**update.scalars, **norms.scalars}, *numbers, *own)
    for by in (by for terms in norms.squares.values() for by in terms.values()):
        scalars |= symbols_in(norms.scalars, by)
    return Group(anchors, gradients, scaled, scalars, limits, norms.squares)
