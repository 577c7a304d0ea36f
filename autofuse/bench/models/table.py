"""The tables of the benchmark of models, as markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autofuse.bench.cpu.table import geometric_mean
from autofuse.bench.gpu.table import grid, number
from autofuse.bench.models.rows import CEILING, DECLARED, LAUNCHES, NO_TAILS, OURS, Measured, Row

NAMES = ("eager", "inductor", "async TP", "one-shot", "two-shot", NO_TAILS, OURS, DECLARED, CEILING)
LEAST_SHARE = 0.01
"""What a share that is smaller counts in the geometric mean."""


def report(data: Mapping[str, Any]) -> str:
    """The tables of times, of kernel and host time, of means, of sites, and of failures, as markdown."""
    about, rows = data["machine"], [Row.from_json(row) for row in data["rows"]]
    head = (
        f"{about['world']} x {about['gpu']}, torch {about['torch']}. Microseconds of a step, the median, of "
        "the slowest rank."
    )
    parts = [head, _times(rows), _means(rows), _made_of(rows), _sites(rows), _failed(rows)]
    return "\n\n".join(part for part in parts if part)


def _times(rows: Sequence[Row]) -> str:
    header = ("row", "launched by", *NAMES, "best other", "speed-up", "share")
    lines: list[tuple[str, ...]] = [header]
    for row in rows:
        for launched in LAUNCHES:
            times = [row.time(name, launched) for name in NAMES]
            if not any(times):
                continue
            best = row.best_other(launched)
            how = "host" if launched == "us" else "graph"
            last = (number(row.speedup(launched), ".2f"), number(row.share(launched), ".2f"))
            lines.append(
                (row.name, how, *(number(us, ".0f") for us in times), best[0] if best else "-", *last)
            )
    return grid(lines)


def _means(rows: Sequence[Row]) -> str:
    lines = []
    for launched in LAUNCHES:
        speeds = {row.name: speed for row in rows if (speed := row.speedup(launched))}
        if not speeds:
            continue
        shares = [max(LEAST_SHARE, share) for row in rows if (share := row.share(launched)) is not None]
        worst = min(speeds, key=lambda name: speeds[name])
        text = f"{'Launched by the host' if launched == 'us' else 'CUDA graphs'}: {len(speeds)} rows, worst "
        text += (
            f"{speeds[worst]:.2f}x ({worst}), geometric means: {geometric_mean(list(speeds.values())):.2f}x"
        )
        lines.append(text + (f", share {geometric_mean(shares):.2f}." if shares else "."))
    return "\n".join(lines)


def _made_of(rows: Sequence[Row]) -> str:
    """Kernel and host time and errors, of ours and of Inductor."""
    parts = ("kernel_us", "host_us", "error", "ready_s")
    lines: list[tuple[str, ...]] = [
        ("row", *(f"{what} {name}" for what in ("kernels", "host", "error", "ready s") for name in _TWO))
    ]
    for row in rows:
        values = [
            (part, getattr(row.variants.get(name, Measured()), part)) for part in parts for name in _TWO
        ]
        lines.append((row.name, *(number(value, _SPECS.get(part, ".0f")) for part, value in values)))
    return grid(lines)


_TWO = ("inductor", OURS)
_SPECS = {"error": ".1e", "ready_s": ".1f"}


def _sites(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        kinds = (f"{kind}: {_counts(found)}" for kind, found in row.sites.items() if found)
        lines.append(f"- {row.name}: {'. '.join(kinds) or 'no collectives'}")
    return "\n".join(["Sites:", "", *lines]) if lines else ""


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {what}" for what, count in found.items())


def _failed(rows: Sequence[Row]) -> str:
    lines = [
        f"- {row.name}, {name}{where}: {why}"
        for row in rows
        for name, measured in row.variants.items()
        for where, why in (("", measured.failed), (" in a graph", measured.graph_failed))
        if why
    ]
    lines += [f"- {row.name}, errors: {row.exact_failed}" for row in rows if row.exact_failed]
    return "\n".join(["Failed:", "", *lines]) if lines else ""
