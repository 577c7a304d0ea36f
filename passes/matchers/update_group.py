"""What one op reduces and updates: one gradient, or all that are scaled by the norm of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autofuse.lowering.update_rules import SIGN
from autofuse.passes.graph.anchors import Anchor, find_anchors
from autofuse.passes.graph.follow import dtype_of
from autofuse.passes.graph.paths import all_below, depends_on, stops_above
from autofuse.passes.reasons import Reject

from .match import Context
from .update_algebra import Coefficient
from .update_clip import Limits, Norms
from .update_norms import NotARule
from .update_rule import Update, changed, is_read, scaled_late, symbols_in, update_of


@dataclass(frozen=True)
class Group:
    """Gradients and their updates, by one rule. keeps: whether something else reads a sum. limits: of the
    factor by the norm of all; None without one. squares: sums of squares that the graph has, as multiples of
    those of the gradients."""

    anchors: Sequence[Anchor]
    updates: Sequence[Update]
    keeps: Sequence[bool]
    scalars: dict[str, fx.Node]
    limits: Limits | None = None
    squares: Mapping[fx.Node, Mapping[int, Coefficient]] = field(default_factory=dict)

    @property
    def kept(self) -> list[Anchor]:
        """Those whose sum is read."""
        return [anchor for anchor, keep in zip(self.anchors, self.keeps, strict=True) if keep]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """Those of the op."""
        changed = (node for update in self.updates for node in update.changed)
        return (*(anchor.input for anchor in self.anchors), *changed, *self.scalars.values())


def clipped_group(anchor: Anchor, context: Context, update: Update) -> Group | Reject:
    """The gradients whose norm `update` is scaled by, if the anchor is the first of them."""
    late = depends_on(anchor, update.scalars.values())
    assert late is not None
    every = {a.node: a for a in find_anchors(anchor.node.graph)}
    anchors = [every[node] for node in stops_above(late, every.keys())]
    if anchors[0].node is not anchor.node:
        return scaled_late(late, f"it is kept, as {anchors[0].node.name} is, the first in its norm")
    for other in anchors:
        alike = (other.kind, other.group, other.reduce_op) == (anchor.kind, anchor.group, anchor.reduce_op)
        if not alike:
            return scaled_late(late, f"{other.node.name} is another collective than {anchor.node.name}")
    below = all_below(a.node for a in anchors)
    norms = Norms({node: i for i, a in enumerate(anchors) for node in a.results}, below.__contains__)
    updates = [update]
    for other in anchors[1:]:
        found = update_of(other, context, changed(other))
        if isinstance(found, Reject):
            return scaled_late(late, f"of {other.node.name}, which is in the norm, {found.detail}")
        updates.append(found)
    try:
        return _group(anchors, updates, norms, below, late)
    except (NotARule, TypeError, ValueError) as error:  # the latter of sympy, for what has no order
        return scaled_late(late, str(error))


def _group(
    anchors: Sequence[Anchor], updates: Sequence[Update], norms: Norms, below: set[fx.Node], late: fx.Node
) -> Group | Reject:
    """Raises NotARule, or an error of sympy."""
    scalars: dict[str, fx.Node] = {}
    scaled, limits = [], None
    for anchor, update in zip(anchors, updates, strict=True):
        if update.rule != updates[0].rule:
            return scaled_late(late, f"{updates[0].rule} and {update.rule} are updates of one clipping")
        if update.factor == 1.0:
            return scaled_late(late, f"{anchor.node.name} is in the norm, but its update is not scaled")
        scale, own, members = norms.clip(update.factor, update.scalars)
        if members != {*range(len(anchors))} or own != (limits or own):
            return scaled_late(late, "gradients are scaled by norms of several groups of them")
        limits = own
        numbers = list(update.numbers)
        numbers[SIGN] = numbers[SIGN] * scale
        scaled.append(replace(update, numbers=tuple(numbers), factor=1.0))
        scalars |= symbols_in({**update.scalars, **norms.scalars}, *numbers, *own)
    for by in (by for terms in norms.squares.values() for by in terms.values()):
        scalars |= symbols_in(norms.scalars, by)
    keeps = [is_read(a, u, norms.squares.keys()) for a, u in zip(anchors, scaled, strict=True)]
    group = Group(anchors, scaled, keeps, scalars, limits, norms.squares)
    if len({dtype_of(anchor.node) for anchor in group.kept}) > 1:
        return scaled_late(late, "sums of several dtypes are read, too")
    computed = next((node for node in group.inputs if node in below), None)
    if computed is not None:
        return scaled_late(late, f"{computed.name}, an input of the update, is computed from a sum")
    return group
