"""The pass for compilations: no fault in it may break them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TypeVar

from torch import fx

from .choice.choose import symbols_of
from .fuse import Fault, fuse
from .report import GraphReport, Listing, Schedule
from .schedules.joint import no_proofs, reschedule
from .schedules.schedule import AUTO, SPLIT, Basis
from .schedules.search import SplitSearch
from .settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")


def fuse_or_keep(
    graph: fx.Graph, settings: Settings, kind: str, name: str, basis: Basis | None = None
) -> GraphReport:
    """As `fuse`, but an exception keeps the site where it was raised, or all sites, and is logged.

    The graph then becomes what it was, with new nodes, and `fuse` begins again without the site.
    """
    before = copy.deepcopy(graph)
    faults: dict[int | None, str] = {}
    while True:
        try:
            return fuse(graph, settings, kind, name, faults, basis)
        except Exception as error:
            site, cause = (error.site, error.__cause__) if isinstance(error, Fault) else (None, error)
            log.error("%s: a fault in autofuse; what it concerns is kept", name, exc_info=cause)
            _restore(graph, before)
            if site in faults:  # not even a report of kept sites can be made
                return GraphReport(name, kind, Listing(), Listing(), ())
            faults[site] = f"{type(cause).__name__}: {cause}"


def reschedule_or_not(joint: fx.Graph, settings: Settings, basis: Basis) -> list[Schedule]:
    """As `reschedule`, if the schedule is `split` or may become it, but an exception leaves the graph as it
    was, and is logged.

    The ranks of the groups still meet where `split` was asked for: another rank may have had no fault.
    """
    searches = settings.schedule == AUTO and settings.policy != "never" and basis.compared
    if settings.schedule != SPLIT and not searches:
        return []
    before, proofs = copy.deepcopy(joint), list(basis.proofs)
    try:
        return reschedule(joint, basis, SplitSearch(settings, symbols_of(joint)) if searches else None)
    except Exception:
        log.exception("a fault in autofuse; the schedule of a graph stays as it was")
        _restore(joint, before)
        basis.proofs[:] = proofs if searches else [*proofs, *no_proofs(joint)]
        return []


def unless_faulty(step: Callable[[fx.Graph], T], graph: fx.Graph) -> T | None:
    """The result of a step that leaves a valid graph if it raises; None then, and the exception is logged."""
    try:
        return step(graph)
    except Exception:
        log.exception("a fault in autofuse; the compilation goes on")
        return None


def _restore(graph: fx.Graph, before: fx.Graph) -> None:
    """Fill `graph` with copies of the nodes of `before`."""
    for node in list(graph.nodes):  # a graph that is half changed may have users before their inputs
        node.args, node.kwargs = (), {}
    for node in list(graph.nodes):
        graph.erase_node(node)
    result = graph.graph_copy(before, {}, return_output_node=True)
    if result is not None:
        values, old = result
        graph.output(values).meta = copy.copy(old.meta)
