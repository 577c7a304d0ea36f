"""Matmuls between an all_gather and a reduction: which of the two takes them.

    reduce(AG(x) @ w)

The reduction takes the matmul if it and what is left of the gather gain at least as much as the gather with
the matmul. What is left: the gather's op has the other matmuls that read AG(x), or on CPU ranks none, and
hands out AG(x). Such a reduction is fused before the gather, which otherwise comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import fx

from .choice.choose import Symbols, saved_us
from .graph.anchors import Anchor
from .graph.follow import SPLITS, aten, is_cast, is_view
from .graph.layout import Size, exact_quotient, prod, same_size
from .matchers.contractions import is_contraction
from .matchers.match import Match
from .matchers.product import is_stage
from .settings import Settings

Shared: TypeAlias = dict[int, dict[int, frozenset[fx.Node]]]
"""By reduction, by all_gather (both as indices of anchors): the matmuls between them."""

Find: TypeAlias = Callable[[int, frozenset[fx.Node]], "tuple[Match, int] | None"]
"""The legal match of a site whose all_gather leaves given matmuls to reductions, and its number of ranks."""

TYPICAL = 4096
"""Replaces, in predictions, a size that may differ between ranks and that no common size can replace."""

_REDUCTIONS = ("all_reduce", "reduce_scatter")
_JOINS = (aten.cat.default, aten.stack.default)


def fusing_order(
    anchors: Sequence[Anchor], settings: Settings, symbols: Symbols, find: Find
) -> Iterator[int]:
    """The indices of all sites, in the order in which they are fused. A reduction that takes a matmul comes
    before the gather in front of it."""
    shared = shared_matmuls(anchors)
    taken: dict[int, frozenset[fx.Node]] = {}
    early: dict[int, list[int]] = {}
    for reduction, gathers in shared.items():
        left = {g: taken.get(g, frozenset()) | matmuls for g, matmuls in gathers.items()}
        if _reduction_first(anchors, reduction, left, settings, symbols, find):
            taken |= left
            early.setdefault(min(gathers), []).append(reduction)
    done = {r for reductions in early.values() for r in reductions}
    for i in range(len(anchors)):
        yield from early.get(i, ())
        if i not in done:
            yield i


def shared_matmuls(anchors: Sequence[Anchor]) -> Shared:
    gathered = {node: i for i, a in enumerate(anchors) if a.kind == "all_gather" for node in a.results}
    shared: Shared = {}
    for i, anchor in enumerate(anchors):
        if not gathered or anchor.kind not in _REDUCTIONS:
            continue
        matmuls = _above([anchor.input], is_contraction, lambda n: is_view(n) or is_stage(n))
        for matmul in matmuls:
            for node in _above(matmul.all_input_nodes, None, lambda n: is_view(n) or is_cast(n)):
                if node in gathered and gathered[node] < i:
                    found = shared.setdefault(i, {})
                    found[gathered[node]] = found.get(gathered[node], frozenset()) | {matmul}
    return shared


def _above(
    nodes: Sequence[fx.Node], wanted: Callable[[object], bool] | None, leads: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """The nodes with a wanted target that are reached from `nodes` upwards, through nodes that `leads`
    accepts. The walk does not go beyond them. Without `wanted`: the nodes at which the walk ends."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    work = list(nodes)
    while work:
        node = work.pop()
        if node in seen:
            continue
        seen.add(node)
        if wanted is not None and wanted(node.target):
            found[node] = None
        elif leads(node) or node.target in _JOINS or node.target in SPLITS:
            work += node.all_input_nodes
        elif wanted is None:
            found[node] = None
    return list(found)


def _reduction_first(
    anchors: Sequence[Anchor],
    reduction: int,
    left: dict[int, frozenset[fx.Node]],
    settings: Settings,
    symbols: Symbols,
    find: Find,
) -> bool:
    """Whether the reduction takes its matmuls. left: by gather, the matmuls that it leaves to reductions."""

    own = find(reduction, frozenset())
    if own is None:
        return False
    if settings.policy != "auto" and all(find(g, taken) is not None for g, taken in left.items()):
        return True
    whole = [found[0].work.matmuls for g in left if (found := find(g, frozenset())) is not None]
    inner, columns = _shared_sizes(own[0].work.matmuls, next(filter(None, whole), ()))

    def saved(i: int, taken: frozenset[fx.Node]) -> float | None:
        found = find(i, taken)
        if found is None:
            return 0.0
        match = with_common_sizes(anchors[i], found[0], inner if i == reduction else columns)
        return saved_us(anchors[i], match, found[1], settings, symbols)

    gains = [
        saved(reduction, frozenset()),
        *(saved(g, taken) for g, taken in left.items()),
        *(saved(g, frozenset()) for g in left),
    ]
    known = [gain for gain in gains if gain is not None]
    if len(known) < len(gains):
        return True
    return sum(known[: 1 + len(left)]) >= sum(known[1 + len(left) :])


def _shared_sizes(
    reduced: Sequence[tuple[Size, Size, Size]], gathered: Sequence[tuple[Size, Size, Size]]
) -> tuple[Size, Size]:
    """Of a matmul that reads a gathered tensor and feeds a reduction: the contracted size and the columns.
    All ranks have the same. The gathered tensor may be the second operand of the matmul."""
    if not reduced or not gathered:
        return TYPICAL, TYPICAL
    (m, _, n), (rows, inner, _) = reduced[0], gathered[0]
    return inner, m if same_size(rows, n) else n


def with_common_sizes(anchor: Anchor, match: Match, other: Size = TYPICAL) -> Match:
    """The match with sizes that are the same on all ranks, for a prediction that chooses between ops.

    A rank may have sizes of its own, which may be symbols on one rank alone. These are the columns of a
    matmul that reads a gathered tensor, and the contracted size of every other matmul. `other` replaces them.
    """
    work = match.work
    if match.pattern == "all_gather_matmul":
        return replace(match, work=replace(work, matmuls=tuple((m, k, other) for m, k, _ in work.matmuls)))
    if not work.matmuls:
        return match
    m, _, n = work.matmuls[0]
    # The rows of experts are a rank's own, too, but not the rows that they are added up to.
    rows = exact_quotient(prod(match.shapes.known(anchor.input)), n)
    matmuls = ((m if rows is None else rows, other, n),) * len(work.matmuls)
    return replace(match, work=replace(work, matmuls=matmuls, count=1, bytes_kept=0))
