"""Which of the tensors that change by a sum over ranks an optimizer updates."""

from __future__ import annotations

from torch import fx

from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.reasons import Reject

from .match import Context
from .update_rule import Update, changed, check_update, find_update


def update_of(anchor: Anchor, context: Context) -> Update | Reject:
    """The update of inputs of the graph by what is reduced: of all that change, or of those that lead."""
    becomes = changed(anchor)
    reject = check_update(anchor, context, becomes)
    if reject is not None:
        return reject
    found, leading = find_update(anchor, becomes), _leading(anchor, becomes)
    if isinstance(found, Reject) and len(leading) < len(becomes):
        of_leading = find_update(anchor, leading)
        return found if isinstance(of_leading, Reject) else of_leading
    return found


def _leading(anchor: Anchor, becomes: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Those that change by the sum itself, or by which others change. The others follow them, as the
    running average of a parameter does. They stay in the graph, and read what the op returns."""
    values = {*becomes.values()}
    leading: set[fx.Node] = set()
    for value in values:
        seen: set[fx.Node] = set()
        work = [value]
        while work:
            for node in work.pop().all_input_nodes:
                if node in values or node in anchor.results:
                    leading.add(node if node in values else value)
                elif node not in seen:
                    seen.add(node)
                    work.append(node)
    return {node: value for node, value in becomes.items() if value in leading}
