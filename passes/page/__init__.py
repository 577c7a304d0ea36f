"""A report as one self-contained HTML page, without network, other files or a server.

`template.html` has the structure and includes `page.css` and `page.js`. The page is readable without the
script, which adds filters, sorting and links between sites, nodes and plans.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from autofuse.lowering.drawing import STYLE, draw_legend, draw_svg, left_out
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Order, contention
from autofuse.lowering.runs import Ran
from autofuse.passes.ran import State, counted, lines_of
from autofuse.passes.report import GraphReport, Line, Report, Site
from autofuse.passes.text import break_advice

from .diff import blocks


def render(report: Report) -> str:
    """The page of a report."""
    views = list(_site_views(report))
    graphs, start = [], 0
    for number, graph in enumerate(report.graphs):
        mine = views[start : start + len(graph.sites)]
        graphs.append(GraphView(number, graph, mine, blocks(graph.before, graph.after)))
        start += len(graph.sites)
    style = _read("page.css") + STYLE
    script = _read("page.js")
    return _template().render(
        report=report,
        sites=views,
        graphs=graphs,
        counted=counted(view.state for view in views),
        counts=Counter(view.state.value for view in views),
        reasons=_by_reason(views),
        plans=_plan_views(views),
        breaks=[text.strip() for text in dict.fromkeys(report.graph_breaks) if text.strip()],
        predicted=_total(report),
        measured=any(s.prediction and s.prediction.measured_us is not None for s in report.sites),
        legend=Markup(draw_legend()),
        style=Markup(style),
        script=Markup(script),
        style_hash=_digest(style),
        script_hash=_digest(script),
    )


# --- What the template shows --------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteView:
    """A site with the number that links it to its nodes and its plan."""

    number: int
    graph: int
    site: Site
    plan: PlanShape | None
    """The plan that is drawn, of an arbitrary size if the sizes are not known; None if kept."""
    state: State
    ran: list[str]
    """What has run there, and what fell back."""

    @property
    def style(self) -> str:
        """The class by which the page colours and filters."""
        styles = {State.AS_TORCH: "torch", State.FELL_BACK: "fell", State.KEPT: "kept"}
        return styles.get(self.state, "fused")

    @property
    def times(self) -> list[float | None]:
        """Microseconds: fused and apart, predicted; fused and apart, measured."""
        p = self.site.prediction
        return [p.fused_us, p.unfused_us, p.measured_us, p.measured_unfused_us] if p else [None] * 4

    @property
    def gain(self) -> float | None:
        """Time of compute and collective apart, divided by the time of the fused op."""
        fused, apart = self.times[:2]
        return apart / fused if fused and apart else None


@dataclass(frozen=True)
class GraphView:
    """A graph, its sites and its text."""

    number: int
    graph: GraphReport
    sites: list[SiteView]
    blocks: list[Any]

    @property
    def fused(self) -> int:
        return sum(view.site.fused for view in self.sites)

    @property
    def first(self) -> int:
        """The number of the first site of the graph."""
        return self.sites[0].number if self.sites else 0


@dataclass(frozen=True)
class PlanView:
    """One shape of plans, its drawings, and the sites that run it."""

    number: int
    shape: PlanShape
    known: bool
    """Whether the sizes that the shape depends on are known."""
    sites: list[SiteView]
    drawings: list[dict[str, Any]]


def _site_views(report: Report) -> Iterator[SiteView]:
    number = 0
    for index, graph in enumerate(report.graphs):
        for site in graph.sites:
            ran = lines_of(Ran(site.runs, site.fell_back))
            yield SiteView(number, index, site, _drawn(site), site.state, ran)
            number += 1


def _drawn(site: Site) -> PlanShape | None:
    if site.plan is not None or not site.fused or site.op is None or site.world is None:
        return site.plan
    return PlanShape.of_any_size(site.op.removeprefix("autofuse::"), site.order or "direct", site.world)


def _by_reason(views: Iterable[SiteView]) -> list[tuple[Any, list[SiteView]]]:
    """Kept sites by reason, the most frequent first."""
    groups: dict[Any, list[SiteView]] = {}
    for view in views:
        if view.site.reason is not None:
            groups.setdefault(view.site.reason, []).append(view)
    return sorted(groups.items(), key=lambda pair: -len(pair[1]))


def _plan_views(views: Iterable[SiteView]) -> list[PlanView]:
    groups: dict[tuple[PlanShape, bool], list[SiteView]] = {}
    for view in views:
        if view.plan is not None:
            groups.setdefault((view.plan, view.site.plan is not None), []).append(view)
    return [
        PlanView(number, shape, known, sites, [_drawing(s) for s in _compared(shape)])
        for number, ((shape, known), sites) in enumerate(groups.items())
    ]


def _compared(shape: PlanShape) -> list[PlanShape]:
    """The plan that runs, and the control beside it. A one-shot plan is the same in every order."""
    if shape.one_shot:
        return [shape]
    other = Order.DIRECT if shape.order == Order.OBLIVIOUS else Order.OBLIVIOUS
    return [shape, replace(shape, order=other.value)]


def _drawing(shape: PlanShape) -> dict[str, Any]:
    plans = shape.plans()
    busiest = contention(plans)
    return {
        "order": "one shot" if shape.one_shot else shape.order,
        "svg": Markup(draw_svg(plans, style=False)),
        "most": max(busiest, default=0),
        "steps": len(busiest),
        "note": left_out(plans),
    }


def _total(report: Report) -> tuple[float, float] | None:
    """Predicted microseconds of all fused sites, fused and apart."""
    known = [s.prediction for s in report.fused if s.prediction and s.prediction.fused_us is not None]
    if not known:
        return None
    return sum(p.fused_us or 0 for p in known), sum(p.unfused_us or 0 for p in known)


# --- Text ---------------------------------------------------------------------------------------------


def _micro(value: float | None) -> str:
    """A time in microseconds as text, with a suitable unit."""
    if value is None:
        return "\N{EN DASH}"
    if value >= 1e6:
        return f"{value / 1e6:.2f} s"
    return f"{value / 1e3:.1f} ms" if value >= 1e3 else f"{value:.0f} µs"


def _bytes(value: int | None) -> str:
    if value is None:
        return "\N{EN DASH}"
    size = float(value)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def _short(source: str) -> str:
    """The file and its folder."""
    return "/".join(source.split("/")[-2:])


def _href(source: str) -> str | None:
    """A link that editors open; None for a path that is not absolute."""
    return f"vscode://file{quote(source, safe='/:')}" if source.startswith("/") else None


def _parts(line: Line) -> tuple[str, str, str]:
    """(name, type, call) of `name: type = call`."""
    rest = line.text.removeprefix(line.name)
    kind, equals, call = rest.partition(" = ")
    if rest == line.text or not equals:
        return "", "", line.text
    return line.name, kind, equals + call


def _runs(views: Iterable[SiteView]) -> list[list[SiteView]]:
    """Runs of sites with consecutive numbers."""
    found: list[list[SiteView]] = []
    for view in views:
        if found and found[-1][-1].number + 1 == view.number:
            found[-1].append(view)
        else:
            found.append([view])
    return found


def _sourced(lines: Iterable[Line]) -> Iterator[tuple[Line, str | None]]:
    """Lines, each with its source line if it differs from that of the line before."""
    last = None
    for line in lines:
        new = line.source if line.source != last else None
        last = line.source or last
        yield line, new


def _advice(text: str) -> list[str]:
    """Advice for a graph break: that of autofuse, else that of dynamo."""
    known = break_advice(text)
    if known is not None:
        return [f"{known[0].upper()}{known[1:]}."]
    lines = (line.strip() for line in text.splitlines())
    hints = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")]
    return [hint for hint in hints if "report an issue" not in hint] or [
        "Move what breaks the graph away from between the compute and its collective."
    ]


def _digest(text: str) -> str:
    """The hash by which the content security policy of the page admits its style and script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters.update(
        micro=_micro,
        bytes=_bytes,
        short=_short,
        href=_href,
        parts=_parts,
        runs=_runs,
        sourced=_sourced,
        advice=_advice,
    )
    return environment.from_string(_read("template.html"))
