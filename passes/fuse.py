"""The pass: for every collective find a match, check, choose, rewrite; report all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx
from torch.distributed import ProcessGroup

from autofuse.lowering import ops as _ops  # noqa: F401  (registers torch.ops.autofuse)
from autofuse.lowering import torch_internals
from autofuse.lowering.cpu.workspace import decline
from autofuse.lowering.gpu import support as gpu
from autofuse.lowering.notes import place, tell_kept
from autofuse.lowering.orders import PlanShape, make_plan
from autofuse.native_kernels import cpu

from . import opaque
from .choice.choose import Choice, Symbols, on_gpu, predict
from .choice.crossover import Known
from .choice.table import Table, shipped, table_for
from .graph.anchors import OPAQUE, Anchor, find_anchors, is_collective
from .graph.emit import CannotEmit, Emitter, erase_unused, order_nodes, relax_views
from .graph.follow import Shapes, dtype_of, expression, tensor
from .graph.layout import same_size
from .graph.listing import listing, owners_of, tie, tie_merged
from .matchers.combine import match_combine, match_single_combine
from .matchers.dispatch import match_dispatch, match_single_dispatch
from .matchers.embedding import match_embedding
from .matchers.embedding_backward import match_embedding_backward
from .matchers.embedding_update import match_embedding_update
from .matchers.gather_matmul import match_all_gather
from .matchers.match import Context, Found, Match, collective_above
from .matchers.matmul_reduce import match_all_reduce, match_reduce_scatter
from .matchers.product import Reject
from .merge import merge_fused
from .plan_shape import plan_shape
from .report import GraphReport, Listing, Prediction, Reason, Site, listening

log = logging.getLogger(__name__)

Matcher = Callable[[Anchor, Context], Found]

# The patterns, in the order in which they are tried for each kind of collective.
MATCHERS: dict[str, tuple[tuple[str, Matcher], ...]] = {
    "all_reduce": (("matmul_all_reduce", match_all_reduce),),
    "reduce_scatter": (("matmul_reduce_scatter", match_reduce_scatter),),
    "all_gather": (("all_gather_matmul", match_all_gather),),
    "all_to_all": (
        ("expert_matmul_all_to_all", match_combine),
        ("all_to_all_expert_matmul", match_dispatch),
        ("embedding_bag_all_to_all", match_embedding),
        ("all_to_all_embedding_bag_backward", match_embedding_backward),
        ("all_to_all_embedding_bag_update", match_embedding_update),
        ("expert_matmul_all_to_all", match_single_combine),
        ("all_to_all_expert_matmul", match_single_dispatch),
    ),
}


@dataclass(frozen=True)
class Settings:
    """What steers the pass; equal on all ranks."""

    policy: str = "auto"
    patterns: frozenset[str] | None = None
    order: str = "direct"
    tables: tuple[Table, ...] = field(default_factory=shipped, repr=False)
    captured: bool = False


def fuse(graph: fx.Graph, settings: Settings, kind: str, name: str) -> GraphReport:
    """Rewrite in place every site that is legal and wanted. ValueError if the graph has no `meta["val"]`.

    The report has the graph's nodes only if somebody will read it: printing a large graph takes long.
    """
    show = listing if listening() else lambda graph: Listing()
    before = show(graph)
    start = time.perf_counter()
    stand_ins = opaque.stand_in(graph)
    anchors = find_anchors(graph)
    for anchor in anchors:
        if tensor(anchor.node) is None and anchor.kind in MATCHERS:
            raise ValueError(
                f'{anchor.node.name} has no meta["val"]: run FakeTensorProp on the graph before fusing it'
            )
    symbols = _symbols(graph)
    sites: list[Site] = []
    collectives = {node.name: i for i, anchor in enumerate(anchors) for node in anchor.results}
    changed: dict[str, int] = {}
    for i, anchor in enumerate(anchors):
        site, names = _visit(graph, anchor, settings, name, symbols)
        sites.append(site)
        changed.update((node, i) for node in names)
    _tell_kept(anchors, sites)
    opaque.put_back(stand_ins)
    if any(site.fused for site in sites):
        owners = owners_of(graph, changed)
        merge_fused(graph)
        tie_merged(graph, owners, changed)
        relax_views(graph)
        graph.lint()
    seconds = time.perf_counter() - start
    before, after = tie(before, show(graph), changed, collectives)
    return GraphReport(name, kind, before, after, tuple(sites), seconds)


def _visit(
    graph: fx.Graph, anchor: Anchor, settings: Settings, name: str, symbols: Symbols
) -> tuple[Site, list[str]]:
    """The site, and the names of the nodes that were removed, inserted or given other inputs."""
    collective, nbytes = anchor.name, anchor.nbytes
    pattern, found, world = _find(anchor, settings)
    prediction: Prediction | None = None
    if isinstance(found, Match):
        assert world is not None
        table = table_for(settings.tables, anchor.node.meta["val"].device)
        choice = predict(anchor, found, world, settings.order, table, symbols, listening())
        if anchor.node.meta["val"].device.type == "cuda":
            choice = on_gpu(choice, found.pattern, found.work, settings.captured)
        prediction, found = choice.prediction, _choose(found, settings, choice)
    plan: PlanShape | None = None
    names: list[str] = []
    if isinstance(found, Match):
        emitter = _rewrite(graph, anchor, found)
        if isinstance(emitter, Reject):
            found = emitter
        elif listening():
            hints = {symbol: known.hint for symbol, known in symbols.items() if known.hint is not None}
            plan = next(filter(None, (plan_shape(node, hints) for node in emitter.new)), None)
            names = emitter.touched
    fused = isinstance(found, Match)
    site = Site(
        pattern=pattern,
        op=f"autofuse::{pattern}" if fused else None,
        fused=fused,
        reason=None if isinstance(found, Match) else found.reason,
        detail="" if isinstance(found, Match) else found.detail,
        graph=name,
        collective=collective,
        source=anchor.source,
        nbytes=nbytes,
        world=world,
        order=settings.order if fused else None,
        prediction=prediction,
        plan=plan,
    )
    return site, names


def _find(anchor: Anchor, settings: Settings) -> tuple[str | None, Found, int | None]:
    """(pattern, match or the most telling rejection, size of the group)."""
    matchers = MATCHERS.get(anchor.kind, ())
    if anchor.node.target in OPAQUE:
        unread = f"an argument of {anchor.kind} is no constant, or has no role and not its default"
        return None, Reject(Reason.UNSUPPORTED_VARIANT, unread), None
    if not matchers:
        return None, Reject(Reason.NO_COMPUTE, f"no fused op has a {anchor.kind}"), None
    pattern = matchers[0][0] if len(matchers) == 1 else None
    if anchor.problem:
        return pattern, Reject(Reason.GROUP_UNKNOWN, anchor.problem), None
    if anchor.known_group is None:
        unknown = f"the group is an input of the graph, {anchor.group}, that was none while it was traced"
        return pattern, Reject(Reason.GROUP_UNKNOWN, unknown), None
    world = torch_internals.group_world(anchor.known_group)
    if world is None:
        return pattern, Reject(Reason.GROUP_UNKNOWN, f"there is no group {anchor.group!r}"), None
    reject = _check_place(anchor, world)
    if reject is not None:
        return pattern, reject, world
    best: tuple[str | None, Reject] = (pattern, Reject(Reason.NO_COMPUTE, "nothing was tried"))
    for pattern, matcher in matchers:
        # Never the node's name: it counts the collectives of the graph, and ranks may break it differently.
        site = anchor.source or anchor.kind
        found = matcher(anchor, Context(anchor.group, world, settings.order, site, _shapes(anchor, world)))
        if isinstance(found, Match):
            found = _check_match(anchor, found, settings, world)
        if isinstance(found, Match):
            return pattern, found, world
        if best[1].detail == "nothing was tried" or (
            best[1].reason is Reason.NO_COMPUTE and found.reason is not Reason.NO_COMPUTE
        ):
            only = len(matchers) == 1 or found.reason is not Reason.NO_COMPUTE
            best = (pattern if only else None, found)
    return *best, world


def _shapes(anchor: Anchor, world: int) -> Shapes:
    """Shapes under what a reduce_scatter, or the splits of an all_to_all, imply."""
    shapes = Shapes()
    source, result = tensor(anchor.input), tensor(anchor.node)
    if (
        anchor.kind == "reduce_scatter"
        and anchor.input is not None
        and source is not None
        and result is not None
    ):
        shapes.assume_cut(expression(source.shape[0]), world, expression(result.shape[0]))
        shapes.assume_alike(anchor.input)
    for splits, val in ((anchor.input_splits, source), (anchor.output_splits, result)):
        sizes = [expression(s) for s in splits]
        if sizes and val is not None and all(same_size(s, sizes[0]) for s in sizes):
            shapes.assume_cut(expression(val.shape[0]), world, sizes[0])
    return shapes


def _check_place(anchor: Anchor, world: int) -> Reject | None:
    """Reasons that lie in the group and the device."""
    val = tensor(anchor.node)
    assert val is not None
    assert anchor.known_group is not None
    if world == 1:
        return Reject(Reason.SINGLE_RANK, "the group has one rank")
    if val.device.type != "cpu" and (why := gpu.why_not(val.device)) is not None:
        return Reject(Reason.NO_KERNEL_FOR_DEVICE, why)
    if val.device.type == "cuda" and world > gpu.MOST_RANKS:
        return Reject(
            Reason.NO_KERNEL_FOR_DEVICE, f"the group has {world} ranks, kernels serve {gpu.MOST_RANKS}"
        )
    if torch_internals.inductor_option("cpp_wrapper"):
        # It takes an op that returns a list of one tensor for one that returns the tensor, and crashes.
        return Reject(Reason.UNSUPPORTED_VARIANT, "Inductor's cpp_wrapper cannot call fused ops")
    if val.device.type == "cpu" and not cpu.available():
        decline(anchor.known_group, cpu.why_not())
        return Reject(Reason.NO_NATIVE_KERNELS, cpu.why_not())
    if torch_internals.group_spans_hosts(anchor.known_group):
        decline(anchor.known_group, "the group spans hosts", val.device.type)
        return Reject(Reason.GROUP_SPANS_HOSTS, "its ranks do not share memory")
    return None


def _check_match(anchor: Anchor, match: Match, settings: Settings, world: int) -> Found:
    """Reasons that every match is subject to."""
    if settings.patterns is not None and match.pattern not in settings.patterns:
        return Reject(
            Reason.PATTERN_DISABLED, f"{match.pattern} is not among {', '.join(sorted(settings.patterns))}"
        )
    device = tensor(anchor.node).device  # type: ignore[union-attr]
    if device.type == "cuda" and match.not_on_gpus:
        return Reject(Reason.NO_KERNEL_FOR_DEVICE, match.not_on_gpus)
    if device.type == "cuda" and match.work.matmuls and dtype_of(anchor.node) is torch.float32:
        return Reject(Reason.DTYPE, "float32 is exchanged; GPU kernels take bfloat16 and float16")
    for node in match.inputs:
        val = tensor(node)
        if val is not None and val.device != device and val.dim():
            return Reject(Reason.MIXED_DEVICES, f"{node.name} is on {val.device}, the collective on {device}")
    try:
        make_plan(match.pattern, settings.order, world, 0, ((1, 1),) * world, (1, 1))
    except ValueError as error:  # a ring that is too long
        return Reject(Reason.UNSUPPORTED_VARIANT, str(error))
    return _check_order(anchor, match) or match


def _check_order(anchor: Anchor, match: Match) -> Reject | None:
    """The fused op must not overtake, nor be overtaken by, another collective."""
    for user in match.early:
        between = _collective_between(user, anchor.node) if user < anchor.node else None
        if between is not None:
            return Reject(Reason.EXTRA_USERS, f"{user.name} reads the product before {between.name}")
    for node in match.inputs:
        between = collective_above(node, anchor.node) if anchor.node < node else None
        if between is not None:
            return Reject(Reason.EXTRA_USERS, f"{node.name} depends on the later collective {between.name}")
    return None


def _collective_between(first: fx.Node, last: fx.Node) -> fx.Node | None:
    """A collective, fused or not, that stands between two nodes."""
    node = first.next
    while node is not last:
        if is_collective(node):
            return node
        node = node.next
    return None


def _tell_kept(anchors: list[Anchor], sites: list[Site]) -> None:
    """For a rank that fused what this one kept, and waits in vain: its error says so."""
    notes: dict[str | ProcessGroup, list[str]] = {}
    for anchor, site in zip(anchors, sites, strict=True):
        if site.reason is not None and (site.world or 1) > 1 and anchor.known_group is not None:
            why = ": ".join(filter(None, (site.reason.value, site.detail)))
            at = place(site.source or anchor.kind)
            notes.setdefault(anchor.known_group, []).append(f"{anchor.kind} at {at} ({why})")
    for group, lines in notes.items():
        tell_kept(group, lines)


def _choose(match: Match, settings: Settings, choice: Choice) -> Found:
    if settings.policy == "never":
        return Reject(Reason.POLICY_NEVER, "")
    if settings.policy == "auto" and not choice.fuse:
        wins, known = choice.prediction.wins, choice.prediction
        times = f"{known.fused_us} us fused, {known.unfused_us} us apart"
        if choice.why:
            return Reject(Reason.NOT_PROFITABLE, choice.why)
        return Reject(Reason.NOT_PROFITABLE, times if wins == "never" else f"gains only for {wins}")
    return match


def _rewrite(graph: fx.Graph, anchor: Anchor, match: Match) -> Emitter | Reject:
    emitter = Emitter(anchor.node, match.shapes)
    unordered = bool(match.early) or any(anchor.node < n for n in match.inputs)
    try:
        emitter.replace_sizes(anchor.results)
        match.apply(emitter)
    except CannotEmit as error:
        emitter.undo()
        return Reject(Reason.LAYOUT, str(error))
    emitter.commit()
    emitter.touched += erase_unused([*emitter.replaced, *anchor.results])
    if unordered:
        order_nodes(graph)
    log.debug("%s -> autofuse::%s", anchor.node.name, match.pattern)
    return emitter


def _symbols(graph: fx.Graph) -> Symbols:
    """The graph's symbols that stand for sizes known when the graph is called."""
    for node in graph.nodes:
        val = node.meta.get("val")
        for size in val.shape if isinstance(val, torch.Tensor) else (val,):
            if isinstance(size, torch.SymInt):
                hints, ranges = torch_internals.symbol_hints(size), torch_internals.symbol_ranges(size)
                integers = {
                    s: int(hint) for s, hint in hints.items() if isinstance(hint, (int, sympy.Integer))
                }
                return {s: Known(*ranges[s], hint) for s, hint in integers.items() if s in ranges}
    return {}
