"""A report as text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from autofuse.lowering.reference.tail import parse
from autofuse.lowering.runs import Ran

from .ran import counted, lines_of

if TYPE_CHECKING:
    from .report import Considered, Prediction, Report, Site


def text_of(report: Report) -> str:
    """A table of all sites; then what has run, advice for those that are kept, and graph breaks."""
    count = len(report.graphs)
    graphs = f"{count} graph{'s' * (count != 1)}"
    lines = [f"autofuse: {counted(site.state for site in report.sites)} in {graphs}"]
    if report.sites:
        lines += ["", *_table([_HEADER, *map(_row, report.sites)])]
    schedules = _schedules(report)
    if schedules:
        lines += ["", "schedules:", *schedules]
    considered = _considered(report)
    if considered:
        lines += ["", "schedules of reductions and what is behind them, in predicted us:", *considered]
    ran = _what_ran(report)
    if ran:
        lines += ["", "what has run until now:", *ran]
    reasons = dict.fromkeys(site.reason for site in report.kept if site.reason)
    if reasons:
        lines += ["", "kept:", *(f"  {reason.value}: {reason.advice}" for reason in reasons)]
    if report.graph_breaks:
        lines += ["", "graph breaks (no site can span one):"]
        lines += dict.fromkeys(f"  {_break_line(text)}" for text in report.graph_breaks)
    return "\n".join(lines)


def _schedules(report: Report) -> list[str]:
    """What became of the all_reduces of each graph, and why some stay whole."""
    lines: list[str] = []
    for graph in report.graphs:
        for each in graph.schedules:
            lines.append(
                f"  {graph.name}, {each.world} ranks: {each.name}, {each.reductions} all_reduces "
                f"({each.bytes_reduced} bytes) scatter, {each.gathers} all_gathers "
                f"({each.bytes_gathered} bytes)"
            )
            lines += [f"    whole: {why}" for why in each.refused]
            lines += _times_of(each.considered)
        if graph.schedules and graph.saved_bytes is not None:
            lines.append(f"  {graph.name} saves {graph.saved_bytes} bytes for the backward, inputs aside")
    return lines


def _considered(report: Report) -> list[str]:
    """A line a schedule; clusters for which they are the same are told together."""
    found = Counter(
        (site.graph, site.pattern, site.world, site.behind, site.considered)
        for site in report.fused
        if site.considered
    )
    lines: list[str] = []
    for (graph, op, world, behind, schedules), count in found.items():
        times = f" ({count} times)" if count > 1 else ""
        lines.append(f"  {graph}, {op} of {world} ranks, then {_stages(behind)}{times}")
        lines += _times_of(schedules)
    return lines


def _times_of(considered: tuple[Considered, ...]) -> list[str]:
    return [
        f"  {'*' if each.taken else ' '} {each.name:<9} {_number(each.us):>10}  {each.why}".rstrip()
        for each in considered
    ]


def _stages(tail: str) -> str:
    return ", ".join(stage.name for stage in parse(tail))


def _what_ran(report: Report) -> list[str]:
    """By line of the model, op and ranks: sites that share these are told together."""
    known: dict[str, Ran] = {}
    for site in report.fused:
        title = f"{_place(site)}, {site.pattern} of {site.world} ranks"
        before = known.get(title, Ran())
        runs = dict.fromkeys((*before.runs, *site.runs))
        fell_back = dict.fromkeys((*before.fell_back, *site.fell_back))
        known[title] = Ran(tuple(runs), tuple(fell_back))
    return [
        line
        for title, ran in known.items()
        if ran.runs or ran.fell_back
        for line in (f"  {title}", *(f"    {text}" for text in lines_of(ran)))
    ]


_HEADER = (
    "graph",
    "collective",
    "fused into",
    "now",
    "order",
    "world",
    "bytes",
    "us",
    "unfused us",
    "wins",
    "source",
    "why",
)


def _row(site: Site) -> tuple[str, ...]:
    why = ": ".join(filter(None, (site.reason.value if site.reason else "", site.detail))) or tail_line(site)
    fused_into = site.op.removeprefix("autofuse::") if site.op else "-"
    now = site.state.value if site.fused else "-"
    numbers = (_number(x) for x in (site.world, site.nbytes))
    times = _times(site.prediction)
    place = _place(site)
    return (site.graph, site.collective, fused_into, now, site.order or "-", *numbers, *times, place, why)


def tail_line(site: Site) -> str:
    """The tail of a fused site, or why it has none; empty if no tail can follow."""
    if not site.tail:
        return f"no tail: {site.tail_end}" if site.tail_end else ""
    return f"tail: {_stages(site.tail)} ({site.tail_form})"


def _place(site: Site) -> str:
    """The file and its folder; `Site.source` has the whole path."""
    return "/".join((site.source or "-").split("/")[-2:])


def _times(prediction: Prediction | None) -> tuple[str, str, str]:
    """Times of the fused op and of compute and collective apart, and the condition for a gain."""
    if prediction is None:
        return "-", "-", "-"
    fused = _time(prediction.fused_us, prediction.measured_us)
    return fused, _time(prediction.unfused_us, prediction.measured_unfused_us), prediction.wins


def _time(predicted: float | None, measured: float | None) -> str:
    """The predicted time. With a measurement: both times, and the error of the prediction."""
    if predicted is None or measured is None:
        return _number(predicted)
    return f"{predicted:.1f} (measured {measured:.1f}, {predicted / measured - 1:+.0%})"


# Advice for graph breaks that collectives cause, by a text in the reason of the break.
_BREAK_ADVICE = {
    "async_op=True": (
        "leave async_op=True out, or call torch.distributed._functional_collectives, which wait only where "
        "the result is read"
    ),
    "torch.distributed.nn": (
        "call torch.distributed._functional_collectives instead of torch.distributed.nn; those that end in "
        "_autograd have a gradient"
    ),
    "_maybe_view_chunk_cat": (
        "torch before 2.13 cannot trace all_gather_tensor on a dim other than 0: update torch, or gather on "
        "dim 0 and move the dim"
    ),
}


def break_advice(text: str) -> str | None:
    """Advice for a graph break that a collective causes; None for other breaks."""
    return next((advice for sign, advice in _BREAK_ADVICE.items() if sign in text), None)


def _break_line(text: str) -> str:
    first, advice = text.strip().splitlines()[0], break_advice(text)
    return f"{first}: {advice}" if advice else first


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.1f}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
