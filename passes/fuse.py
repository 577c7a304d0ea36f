"""The pass: normalize, find sites, check legality, choose, rewrite, report.

`fuse` and `_fuse_site` take these steps in this order; each step is a function with a module of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import fx
from torch.distributed import ProcessGroup

from autofuse.lowering import ops as _ops  # noqa: F401  (registers torch.ops.autofuse)
from autofuse.lowering.notes import place, tell_kept
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.runs import SiteKey
from autofuse.lowering.torch_internals import group_world

from . import opaque
from .bag_sizes import sizes_from_offsets
from .between import fusing_order, with_common_sizes
from .choice.choose import Symbols, choose, saved_us, symbols_of
from .counting_sort import count_to_sort
from .foreach import split_foreach
from .gathered_once import gather_once
from .graph.anchors import Anchor, find_anchors, group_of, is_fused_op
from .graph.emit import CannotEmit, Emitter, erase_unused, order_nodes, relax_views
from .graph.follow import WAIT, aten
from .graph.functional import arguments
from .graph.listing import listing, owners_of, tie, tie_merged
from .legality import check_match, check_metadata, check_place, group_size, late_readers
from .matchers import matchers_of
from .matchers.match import Match, context_of
from .merge import merge_fused
from .narrow import narrow_collectives
from .packed import join_kept, split_packed
from .pieces import forward_pieces
from .plan_shape import plan_shape
from .reads import read_at_once
from .reasons import Reason, Reject
from .report import GraphReport, Listing, Prediction, Site, listening
from .returned import Returned
from .scaled_pieces import scale_pieces
from .schedules.layouts import UNKNOWN, Layouts
from .schedules.schedule import AUTO, WITH_TAILS, Basis, Prover, fixed
from .schedules.search import Search
from .settings import Settings
from .site_key import fused_ops, ops_now, site_keys
from .sum_first import sum_first
from .tails import Tail, absorb_tails

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """A collective that stays as it is. `pattern`: the pattern that was tried, if only one is possible."""

    pattern: str | None
    why: Reject
    world: int | None = None
    prediction: Prediction | None = None


@dataclass(frozen=True)
class Fused:
    """A collective that a fused op replaces. `touched`: names of the new, erased and changed nodes; `new`:
    the new ones. Both are empty unless reports are collected. `detail`: where another op was legal, too, what
    both were predicted to save; and the remark of the match. `takes`: other collectives that the op replaces,
    too."""

    pattern: str
    world: int
    prediction: Prediction
    plan: PlanShape | None
    touched: list[str]
    new: list[fx.Node]
    detail: str = ""
    takes: tuple[fx.Node, ...] = ()


class Fault(Exception):
    """A fault in the pass at the site with this index; it is the cause of this exception."""

    def __init__(self, site: int) -> None:
        super().__init__(f"a fault in autofuse at site {site}")
        self.site = site


def fuse(
    graph: fx.Graph,
    settings: Settings,
    kind: str,
    name: str,
    faults: Mapping[int | None, str] = MappingProxyType({}),
    basis: Basis | None = None,
) -> GraphReport:
    """Rewrite in place every site that is legal and that the policy fuses. ValueError without `meta["val"]`.

    The report lists the nodes of the graph only while reports are collected: printing them takes long.
    `faults`: of an earlier try, by the index of the site that it keeps, None for all. `Fault` or another
    exception leaves the graph as it is at that moment; see `fuse_or_keep`. `basis`: what forms of tails may
    rest on; by default nothing is known of inputs.
    """
    basis = basis or Basis()
    listens = listening()
    before = _shown(graph, basis) if listens else Listing()
    start = time.perf_counter()
    returned = Returned(graph)
    if settings.policy != "never":
        sizes_from_offsets(graph)
        narrow_collectives(graph)
        forward_pieces(graph)
        split_foreach(graph)
        scale_pieces(graph)
        sum_first(graph)
        count_to_sort(graph)
    parts = split_packed(graph) if settings.policy != "never" else []
    stand_ins = opaque.stand_in(graph)
    anchors = find_anchors(graph)
    check_metadata(anchors)
    collectives = {node.name: i for i, anchor in enumerate(anchors) for node in anchor.results}
    symbols = symbols_of(graph)
    reported: dict[int, Site] = {}
    changed: dict[str, int] = {}
    new: dict[int, list[fx.Node]] = {}

    def legal(i: int, taken: frozenset[fx.Node] = frozenset()) -> tuple[Match, int] | None:
        if i in faults or None in faults:
            return None
        try:
            found = _find(anchors[i], settings, symbols, taken)
        except Exception as error:
            raise Fault(i) from error
        return None if isinstance(found, Kept) else found[:2]

    sizes = [anchor.nbytes for anchor in anchors]  # the rewrite erases nodes and their arguments
    again = {} if settings.policy == "never" else gather_once(anchors, legal)
    for i in fusing_order(anchors, settings, symbols, legal):
        if i in again:
            continue
        anchor = anchors[i]
        fault = faults.get(i) or faults.get(None)
        try:
            outcome = _faulty(anchor, fault) if fault else _fuse_site(graph, anchor, settings, symbols)
        except Exception as error:
            raise Fault(i) from error
        reported[i] = _report(anchor, sizes[i], outcome, settings, name)
        if isinstance(outcome, Fused):
            changed.update((node, i) for node in outcome.touched)
            new[i] = outcome.new
            again |= {j: i for j, other in enumerate(anchors) if other.node in outcome.takes}
    for i, first in again.items():
        anchor = anchors[i]
        reported[i] = replace(reported[first], collective=anchor.name, source=anchor.source, nbytes=sizes[i])
    sites = [reported[i] for i in range(len(anchors))]
    _tell_kept(anchors, sites)
    join_kept(parts)
    opaque.put_back(stand_ins)
    if any(site.fused for site in sites):
        ops = fused_ops(new)
        tails = _finish(graph, changed, settings, kind, basis, symbols)
        ops = ops_now(graph, ops)
        keys = site_keys(ops)
        own = [again.get(i, i) for i in range(len(sites))]
        sites = [
            _finished(site, keys.get(i), tails.get(ops.get(i))) for i, site in zip(own, sites, strict=True)
        ]
    returned.keep_apart()
    seconds = time.perf_counter() - start
    after = _shown(graph, basis) if listens else Listing()
    before, after = tie(before, after, changed, collectives)
    return GraphReport(name, kind, before, after, tuple(sites), seconds)


def _shown(graph: fx.Graph, basis: Basis) -> Listing:
    """The nodes of the graph, with what is proven of their layouts."""
    groups = [anchor.known_group for anchor in find_anchors(graph)]
    given = [arguments(node) for node in graph.nodes if is_fused_op(node)]
    groups += [group_of(each["group_name"]) for each in given if each is not None]
    known = [group for group in groups if group is not None]
    if not known:
        return listing(graph)
    layouts = Layouts(graph, known[0], basis.inputs(graph))

    def layout_of(node: fx.Node) -> str:
        found = layouts.of(node)
        return "" if found == UNKNOWN or node.op == "output" else str(found)

    return listing(graph, layout_of)


def _faulty(anchor: Anchor, fault: str) -> Kept:
    group = anchor.known_group
    return Kept(None, Reject(Reason.PASS_FAILED, fault), None if group is None else group_world(group))


def _fuse_site(graph: fx.Graph, anchor: Anchor, settings: Settings, symbols: Symbols) -> Kept | Fused:
    """Find, check, choose and rewrite one site. The first step that returns a reason keeps it."""
    found = _find(anchor, settings, symbols)
    if isinstance(found, Kept):
        return found
    match, world, instead_of = found
    prediction, unwanted = choose(anchor, match, world, settings, symbols)
    if unwanted is not None:
        return Kept(match.pattern, unwanted, world, prediction)
    emitter = _rewrite(graph, anchor, match)
    if isinstance(emitter, Reject):
        return Kept(match.pattern, emitter, world, prediction)
    if not listening():
        return Fused(match.pattern, world, prediction, None, [], [], takes=match.takes)
    plan = _plan_of(emitter.new, symbols)
    detail = "; ".join(filter(None, (instead_of, match.remark)))
    return Fused(match.pattern, world, prediction, plan, emitter.touched, emitter.new, detail, match.takes)


def _find(
    anchor: Anchor, settings: Settings, symbols: Symbols, taken: frozenset[fx.Node] = frozenset()
) -> Kept | tuple[Match, int, str]:
    """A legal match, the number of ranks of its group, and the text of the report that compares it with the
    match that it is taken instead of. Of several legal matches the first one is taken, or one that competes
    with it and is predicted to save more.

    Without a legal match a `Kept`, with the reason of the first matcher that has found compute; if no matcher
    has found any, with that of the first matcher.

    `taken`: matmuls that an all_gather leaves to reductions.
    """
    matchers = matchers_of(anchor.kind)
    only = matchers[0].pattern if len(matchers) == 1 else None
    world = group_size(anchor)
    if isinstance(world, Reject):
        return Kept(only, world)
    nowhere = check_place(anchor, world)
    if nowhere is not None:
        return Kept(only, nowhere, world)
    kept: Kept | None = None
    legal: list[Match] = []
    for matcher in matchers:
        if legal and not matcher.competes:
            continue
        context = context_of(anchor, world, settings, taken)
        found = matcher.match(anchor, context)
        if isinstance(found, Match) and late_readers(anchor.node, found) is None:
            found = matcher.match(anchor, replace(context, hands_out=False))
        reject = check_match(anchor, found, settings, world) if isinstance(found, Match) else found
        if isinstance(found, Match) and reject is None:
            legal.append(found)
            continue
        assert reject is not None
        if kept is None or (reject.telling and not kept.why.telling):
            kept = Kept(matcher.pattern if reject.telling else only, reject, world)
    if legal:
        match, instead_of = _best(anchor, legal, world, settings, symbols)
        return match, world, instead_of
    assert kept is not None
    return kept


def _best(
    anchor: Anchor, legal: Sequence[Match], world: int, settings: Settings, symbols: Symbols
) -> tuple[Match, str]:
    """The match that is predicted to save most, and a text with the predictions of all. Of equal ones the
    first is taken. Predictions use sizes that are the same on all ranks, so that ranks choose alike."""
    first, *others = legal
    if not others:
        return first, ""
    common = [with_common_sizes(anchor, match) for match in legal]
    saved = [saved_us(anchor, match, world, settings, symbols) or 0.0 for match in common]
    best = saved.index(max(saved))
    text = ", ".join(f"{match.pattern} {us:.1f} us" for match, us in zip(legal, saved, strict=True))
    return legal[best], f"predicted to save: {text}"


def _rewrite(graph: fx.Graph, anchor: Anchor, match: Match) -> Emitter | Reject:
    emitter = Emitter(anchor.node, match.shapes)
    unordered = bool(match.early) or any(anchor.node < n for n in match.inputs)
    reader = _reader_of_unread(anchor)
    behind = anchor.node
    for node in late_readers(anchor.node, match) or ():
        behind.append(node)
        behind = node
    try:
        emitter.replace_sizes(anchor.results)
        match.apply(emitter)
    except CannotEmit as error:
        emitter.undo()
        if reader is not None:
            graph.erase_node(reader)
        return Reject(Reason.LAYOUT, str(error))
    emitter.commit()
    emitter.touched += erase_unused([*emitter.replaced, *anchor.results])
    if unordered:
        order_nodes(graph)
    log.debug("%s -> autofuse::%s", anchor.node.name, match.pattern)
    return emitter


def _reader_of_unread(anchor: Anchor) -> fx.Node | None:
    """A reader of a result that this rank does not read. Its peers may read theirs and wait for this rank: a
    wait has side effects, so that the fused op is not erased."""
    results = anchor.results
    readers = (user for result in results for user in result.users if user not in results)
    if any(reader.target is not aten.sym_size.int for reader in readers):  # a size is taken from another node
        return None
    held = results[0]
    with held.graph.inserting_after(held):
        reader = held.graph.call_function(WAIT, (held,))
    reader.meta.update(held.meta)
    return reader


def _plan_of(nodes: Iterable[fx.Node], symbols: Symbols) -> PlanShape | None:
    """What the plans of the fused op among `nodes` are made from, at the sizes seen while tracing."""
    hints = {symbol: known.hint for symbol, known in symbols.items() if known.hint is not None}
    return next(filter(None, (plan_shape(node, hints) for node in nodes)), None)


def _finish(
    graph: fx.Graph, changed: dict[str, int], settings: Settings, kind: str, basis: Basis, symbols: Symbols
) -> dict[fx.Node, Tail]:
    """Merge fused ops that can be one, absorb the tails of reductions, read the splits of fused ops at once,
    and make the graph valid.

    `changed`: sites by names of nodes. Returns what became of the tails, by the op.
    """
    owners = owners_of(graph, changed)
    merge_fused(graph)
    prover, schedule = Prover(graph, kind, basis), settings.schedule
    tails = {}
    if schedule == AUTO:
        tails = absorb_tails(graph, Search(prover, settings, symbols))
    elif schedule in WITH_TAILS:
        tails = absorb_tails(graph, fixed(schedule, prover))
    read_at_once(graph)
    tie_merged(graph, owners, changed)
    relax_views(graph)
    graph.lint()
    return tails


def _finished(site: Site, key: SiteKey | None, tail: Tail | None) -> Site:
    if tail is None:
        return replace(site, key=key)
    return replace(
        site, key=key, tail=tail.text, tail_form=tail.form, tail_end=tail.end, considered=tail.considered,
        behind=tail.behind,
    )  # fmt: skip


def _report(
    anchor: Anchor, nbytes: int | None, outcome: Kept | Fused, settings: Settings, graph: str
) -> Site:
    fused = isinstance(outcome, Fused)
    return Site(
        pattern=outcome.pattern,
        op=f"autofuse::{outcome.pattern}" if fused else None,
        fused=fused,
        reason=None if isinstance(outcome, Fused) else outcome.why.reason,
        detail=outcome.detail if isinstance(outcome, Fused) else outcome.why.detail,
        graph=graph,
        collective=anchor.name,
        source=anchor.source,
        nbytes=nbytes,
        world=outcome.world,
        order=settings.order if fused else None,
        prediction=outcome.prediction,
        plan=outcome.plan if isinstance(outcome, Fused) else None,
    )


def _tell_kept(anchors: list[Anchor], sites: list[Site]) -> None:
    """Publish the kept sites of each group. A rank that fuses such a site waits for this rank until its
    timeout, and its error then names the site and the reason."""
    notes: dict[str | ProcessGroup, list[str]] = {}
    for anchor, site in zip(anchors, sites, strict=True):
        if site.reason is not None and (site.world or 1) > 1 and anchor.known_group is not None:
            why = ": ".join(filter(None, (site.reason.value, site.detail)))
            at = place(site.source or anchor.kind)
            notes.setdefault(anchor.known_group, []).append(f"{anchor.kind} at {at} ({why})")
    for group, lines in notes.items():
        tell_kept(group, lines)
