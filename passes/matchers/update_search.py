"""Which of the tensors that change by a sum over ranks an optimizer updates."""

from __future__ import annotations

from torch import fx

from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.paths import stops_above
from autofuse.passes.reasons import Reject

from .match import Context
from .update_rule import Update, changed, check_update, find_update


def update_of(anchor: Anchor, context: Context) -> Update | Reject:
    """The update of inputs of the graph by what is reduced: of all that change, or of those that lead."""
    becomes = changed(anchor)
    reject = check_update(anchor, context, becomes)
    if reject is not None:
        return reject
    found = find_update(anchor, becomes)
    leading = _leading(anchor, becomes) if isinstance(found, Reject) else becomes
    if len(leading) == len(becomes):
        return found
    of_leading = find_update(anchor, leading)
    return found if isinstance(of_leading, Reject) else of_leading


def _leading(anchor: Anchor, becomes: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """The tensors that change by the sum itself, or by which others change. The others follow them, as the
    running average of a parameter does. Their changes stay in the graph and read the results of the op."""
    values = {*becomes.values()}
    stops = values.union(anchor.results)
    leading: set[fx.Node] = set()
    for value in values:
        for source in value.all_input_nodes:
            leading.update(stop if stop in values else value for stop in stops_above(source, stops))
    return {node: value for node, value in becomes.items() if value in leading}
