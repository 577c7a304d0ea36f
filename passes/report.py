"""Reports: a record for each collective and each graph, and the collector of the records."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autofuse.lowering import torch_internals
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.runs import FallBack, Ran, Run, SiteKey, Timed, of_site

from .ran import State, state_of
from .reasons import Reason
from .text import text_of


@dataclass(frozen=True)
class Prediction:
    """The prediction of the cost model. Times are in microseconds; None if sizes depend on data."""

    fused_us: float | None
    """Time of the fused op at the sizes seen while tracing."""
    unfused_us: float | None
    """Time of compute and collective apart, at the same sizes."""
    fused: str
    """The fused time as an expression in the symbols of the graph; empty if no report is collected."""
    unfused: str
    wins: str
    """The condition under which the fused op is faster: `s0 >= 384`, `always`, `never`, or `not known`."""
    table: str
    """Name of the device table that the prediction uses."""
    measured_us: float | None = None
    """Measured time of the fused op at these sizes; None if it was not measured."""
    measured_unfused_us: float | None = None
    task: str = ""
    """The site at these sizes, as text that names a measured point in a device table."""


@dataclass(frozen=True)
class Considered:
    """A schedule of a fused reduction and what lies behind it (docs/schedules.md)."""

    name: str
    us: float | None
    """Its predicted time at the sizes seen while tracing; None if it is illegal, or not predicted."""
    taken: bool = False
    why: str = ""
    """Why it is illegal or not predicted; of the one that is taken, why no other is."""


@dataclass(frozen=True)
class Site:
    """One collective of a compiled graph, fused or kept."""

    pattern: str | None
    """Name of the fused op that replaces the site, or that would replace it; None if not known."""
    op: str | None
    """Qualified name of the op that replaces the site, `autofuse::matmul_all_reduce`; None if kept."""
    fused: bool
    reason: Reason | None
    """Why the site is kept; None if fused."""
    detail: str
    """The particulars of the reason; if fused, what the op leaves to torch, and other ops that were legal."""
    graph: str
    """Kind and number of the graph: `forward 0`."""
    collective: str
    """Name of the collective: `all_reduce`, or `namespace::name` of a user-defined op."""
    source: str | None
    """`file:line` of the user's code, if known."""
    nbytes: int | None
    """Bytes of the collective's input on one rank; None if not known at compile time."""
    world: int | None
    """Size of the group."""
    order: str | None
    """Order of the plan; None if kept."""
    prediction: Prediction | None
    """The prediction of the cost model; None if there is no legal match."""
    plan: PlanShape | None = None
    """The values that the executor makes plans from, at the sizes seen while tracing; None if kept, or if
    sizes depend on data."""
    key: SiteKey | None = None
    """By what calls of the site are known; None if kept."""
    tail: str = ""
    """The stages behind the reduction that the op applies, as docs/ops.md has them; empty if none."""
    tail_form: str = ""
    """`every`: each rank applies it to all rows. `owner`: the owner of a row applies it, if ranks agree."""
    tail_end: str = ""
    """Why the tail ends there, or why there is none."""
    considered: tuple[Considered, ...] = ()
    """The schedules that `auto` has considered, if something is behind the reduction that could be a tail."""
    behind: str = ""
    """What is behind it then, as a tail."""
    ran: Ran | None = field(default=None, compare=False)
    """What had run when the site was written to JSON or pickled. None: what this process has run until now.
    """

    def until_now(self) -> "Site":
        """The site with what has run until now; later runs do not change it."""
        if self.ran is not None:
            return self
        return replace(self, ran=Ran() if self.key is None else of_site(self.key))

    @property
    def _ran(self) -> Ran:
        ran = self.until_now().ran
        assert ran is not None
        return ran

    @property
    def runs(self) -> tuple[Run, ...]:
        """What runs the calls of the site, one for each kind of call that there was."""
        return self._ran.runs

    @property
    def fell_back(self) -> tuple[FallBack, ...]:
        """Calls that torch ran because something was missing, and how many."""
        return self._ran.fell_back

    @property
    def state(self) -> State:
        return state_of(self._ran) if self.fused else State.KEPT

    def __getstate__(self) -> dict[str, Any]:
        """Another process, such as the rank that gathers reports, has run other calls."""
        return dict(vars(self.until_now()))

    def to_dict(self) -> dict[str, Any]:
        now = self.until_now()
        return {**asdict(now), "state": now.state}

    @classmethod
    def _from_dict(cls, data: dict) -> "Site":
        known = {name: value for name, value in data.items() if name != "state"}
        prediction = None if data["prediction"] is None else Prediction(**data["prediction"])
        plan = None if data["plan"] is None else PlanShape(**{k: _tuples(v) for k, v in data["plan"].items()})
        key = None if data.get("key") is None else SiteKey(**{k: _tuples(v) for k, v in data["key"].items()})
        ran = None if data.get("ran") is None else _ran_of(data["ran"])
        known |= {
            "prediction": prediction, "plan": plan, "key": key, "ran": ran, "considered": _considered(data)
        }  # fmt: skip
        return cls(**{**known, "reason": _reason(data["reason"])})


@dataclass(frozen=True, slots=True)
class Line:
    """One node of a graph."""

    name: str
    text: str
    """`mm: f32[16, 16] = aten.mm(view, permute)`."""
    source: str | None
    """`file:line` of the user's code, if known."""
    site: int | None
    """Index of the site that the node belongs to, or whose rewrite erased, inserted or changed the node."""
    layout: str = ""
    """Over the ranks of the graph's first collective, if it is proven: `replicated`, `local`, `sliced(0)`."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A graph, one line for each node. `str()` is its code, with a comment where the source line changes.

    Empty if no report was collected while the graph was compiled.
    """

    lines: tuple[Line, ...] = ()

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __str__(self) -> str:
        code: list[str] = []
        last = None
        for line in self.lines:
            if line.source is not None and line.source != last:
                code.append(f"# {line.source}")
                last = line.source
            code.append(line.text)
        return "\n".join(code)

    @classmethod
    def _from_dict(cls, data: dict) -> "Listing":
        return cls(tuple(Line(**line) for line in data["lines"]))


@dataclass(frozen=True)
class Schedule:
    """How the all_reduces of one group in a graph are computed, with what lies between them.

    Attributes:
        name: `split` if it is computed on slices, else `unchanged`.
        world: the number of ranks.
        reductions: how many all_reduces have become reduce_scatters.
        gathers: how many all_gathers there are instead.
        bytes_reduced, bytes_gathered: of the whole tensors.
        refused: why the other all_reduces stay whole.
        considered: the schedules of all that lies between them that `auto` has considered.
    """

    name: str
    world: int
    reductions: int
    gathers: int
    bytes_reduced: int
    bytes_gathered: int
    refused: tuple[str, ...] = ()
    considered: tuple[Considered, ...] = ()


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph: its nodes before and after the rewrite, and its collectives."""

    name: str
    kind: str
    """`forward`, `backward` or `inference`."""
    before: Listing
    after: Listing
    sites: tuple[Site, ...]
    seconds: float = 0.0
    """Duration of the pass, without the time to print the graphs."""
    schedules: tuple[Schedule, ...] = ()
    """Of the joint graph, one for each group; told with the forward graph."""
    saved_bytes: int | None = None
    """Of what a forward graph computes and saves for its backward, at the sizes that it was traced with; None
    of other graphs, and where sizes depend on data."""

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(replace(self, sites=())), "sites": [site.to_dict() for site in self.sites]}

    @classmethod
    def from_json(cls, text: str) -> "GraphReport":
        return cls._from_dict(json.loads(text))

    @classmethod
    def _from_dict(cls, data: dict) -> "GraphReport":
        sites = tuple(Site._from_dict(site) for site in data["sites"])
        before, after = (Listing._from_dict(data[name]) for name in ("before", "after"))
        schedules = tuple(
            Schedule(**{**each, "refused": _tuples(each["refused"]), "considered": _considered(each)})
            for each in data.get("schedules", ())
        )
        return cls(
            **{**data, "before": before, "after": after, "sites": sites, "schedules": schedules},
        )


@dataclass
class Report:
    """Collects the graphs of one or more compilations. `str()` is a table, `to_json()` keeps everything."""

    graphs: list[GraphReport] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    """Why dynamo cut the model into several graphs. A site cannot span two graphs."""

    def add(self, graph: GraphReport) -> None:
        self.graphs.append(graph)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(site for graph in self.graphs for site in graph.sites)

    @property
    def fused(self) -> tuple[Site, ...]:
        """Those that a fused op stands for; their `state` says what has run."""
        return tuple(site for site in self.sites if site.fused)

    @property
    def kept(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if not site.fused)

    @property
    def counts(self) -> dict[State, int]:
        """Sites by what has become of them until now."""
        states = [site.state for site in self.sites]
        return {state: states.count(state) for state in State}

    def until_now(self) -> "Report":
        """The report with what has been compiled and has run until now. Other threads do not change it, so
        that all of it agrees."""
        graphs = [
            replace(graph, sites=tuple(site.until_now() for site in graph.sites))
            for graph in list(self.graphs)
        ]
        return Report(graphs, list(self.graph_breaks))

    def to_json(self) -> str:
        now = self.until_now()
        graphs = [graph.to_dict() for graph in now.graphs]
        counts = {state.value: count for state, count in now.counts.items()}
        return json.dumps({"graphs": graphs, "graph_breaks": now.graph_breaks, "counts": counts}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        data = json.loads(text)
        return cls([GraphReport._from_dict(graph) for graph in data["graphs"]], data["graph_breaks"])

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained page: all sites, their reasons, graphs side by side, drawings of plans."""
        from .page import render  # slow to import

        with open(path, "w", encoding="utf-8") as file:
            file.write(render(self.until_now()))

    def __str__(self) -> str:
        return text_of(self.until_now())


def _considered(data: dict) -> tuple[Considered, ...]:
    return tuple(Considered(**each) for each in data.get("considered", ()))


def _tuples(value: Any) -> Any:
    """Nested lists as tuples, since JSON has no tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _ran_of(data: dict) -> Ran:
    runs = tuple(
        Run(
            _tuples(run["shapes"]), Timed(**run["way"]), run["fused"], run["captured"],
            *(None if run[who] is None else Timed(**run[who]) for who in ("torch", "ours")),
        )
        for run in data["runs"]
    )  # fmt: skip
    return Ran(
        runs, tuple(FallBack(**{**each, "shapes": _tuples(each["shapes"])}) for each in data["fell_back"])
    )


def _reason(code: str | None) -> Reason | None:
    return None if code is None else next(reason for reason in Reason if reason.value == code)


# A list, not a context variable: backward graphs are compiled on threads of autograd, which inherit none.
_collectors: list[Report] = []
_lock = threading.Lock()


@contextmanager
def collecting(report: Report | None = None) -> Iterator[Report]:
    """Add every graph that is compiled inside, on any thread, to the yielded report."""
    report = Report() if report is None else report
    with _lock:
        _collectors.append(report)
    try:
        yield report
    finally:
        with _lock:
            # By identity: two reports may compare equal.
            del _collectors[next(i for i, other in enumerate(_collectors) if other is report)]


def publish(graph: GraphReport) -> None:
    """Add `graph` to every active collector."""
    with _lock:
        for collector in _collectors:
            collector.add(graph)


def listening() -> bool:
    """Whether graphs are printed: a collector is active, or torch writes its structured log."""
    return bool(_collectors) or torch_internals.structured_log_on()
