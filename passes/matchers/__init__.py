"""The matchers: functions that find one pattern at a collective and describe how to rewrite it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.passes.graph.anchors import Anchor

from .combine import match_combine, match_single_combine
from .dispatch import match_dispatch, match_single_dispatch
from .embedding import match_embedding
from .embedding_backward import match_embedding_backward
from .embedding_update import match_embedding_update
from .gather_matmul import match_all_gather
from .match import Context, Found
from .matmul_gather import match_matmul_gather
from .matmul_reduce import match_all_reduce, match_reduce_scatter
from .optimizer_update import match_update
from .sliced_update import match_sliced_update


@dataclass(frozen=True)
class Matcher:
    """A function that finds one pattern.

    Attributes:
        pattern: name of the fused op that replaces the pattern.
        match: returns a `Match` for a collective of the kind that this op replaces, or a `Reject` with the
            reason.
        competes: whether it is tried, too, where a matcher before it has found a match; the one that is
            predicted to save more is taken.
    """

    pattern: str
    match: Callable[[Anchor, Context], Found]
    competes: bool = False

    @property
    def collective(self) -> str:
        """The kind of collective that the pattern contains."""
        return FUSED_OPS[self.pattern].replaces


MATCHERS = [
    Matcher("matmul_all_reduce", match_all_reduce),
    Matcher("all_reduce_update", match_update, competes=True),
    Matcher("matmul_reduce_scatter", match_reduce_scatter),
    Matcher("reduce_scatter_update_all_gather", match_sliced_update, competes=True),
    Matcher("all_gather_matmul", match_all_gather),
    Matcher("matmul_all_gather", match_matmul_gather),
    Matcher("expert_matmul_all_to_all", match_combine),
    Matcher("all_to_all_expert_matmul", match_dispatch),
    Matcher("embedding_bag_all_to_all", match_embedding),
    # A rank may have updates and gradients of tables, and its peers updates alone: updates come first.
    Matcher("all_to_all_embedding_bag_update", match_embedding_update),
    Matcher("all_to_all_embedding_bag_backward", match_embedding_backward),
    Matcher("expert_matmul_all_to_all", match_single_combine),
    Matcher("all_to_all_expert_matmul", match_single_dispatch),
]
"""All matchers. Those of one kind of collective are tried in this order."""


def matchers_of(kind: str) -> list[Matcher]:
    """The matchers for a kind of collective, in the order in which they are tried."""
    return [matcher for matcher in MATCHERS if matcher.collective == kind]
