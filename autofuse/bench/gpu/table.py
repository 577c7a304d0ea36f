"""What the tables of the GPU benchmarks share: numbers, grids, the machine, means, what failed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from autofuse.bench.cpu.table import geometric_mean
from autofuse.bench.gpu.ratios import ratio
from autofuse.bench.gpu.rows import Measured
from autofuse.lowering.gpu.choice.timing import Timing

R = TypeVar("R", bound=Measured)


def about(data: Mapping[str, Any], *rates: str) -> str:
    """The line above the tables; `rates`: what else was measured at the start."""
    machine, link = data["machine"], data["link_gb_per_s"]
    every = data.get("link_rates", {})  # older files have none
    measured = ", ".join(["measured", *(f"{name} {rate:.0f}" for name, rate in every.items())])
    measured = f"assumed: {data['link_failed']}" if data["link_failed"] else measured
    copies = ", ".join([f"links {link:.0f} GB/s ({measured})", *rates])
    return (
        f"{machine['world']} x {machine['gpu']}, {data['settings']['dtype']}, torch {machine['torch']}, "
        f"Triton {machine['triton']}, NCCL {machine['nccl']}, {copies}. "
        "Microseconds of the slowest rank; * not captured as a CUDA graph."
    )


def total(
    name: str,
    rows: Sequence[R],
    where: Callable[[R], str],
    also: Mapping[str, Callable[[R], float | None]] = MappingProxyType({}),
) -> str:
    """The line of some rows: the worst, `where` that is, and geometric means, `also` of these values."""
    counted = [row for row in rows if row.speedup is not None]
    if not counted:
        return f"{name}: none of {len(rows)} cells has both times"
    worst = min(counted, key=lambda row: row.speedup or 0.0)
    text = f"{name}: {len(counted)} of {len(rows)} cells, worst {worst.speedup:.2f}x ({where(worst)}); "
    text += f"geometric means: {_mean(counted, lambda row: row.speedup)}x the best peer"
    for what, value in {**_MEANS, **also}.items():
        known = _mean(counted, value)
        text += f", {what} {known}" if known else ""
    return text


_MEANS: Mapping[str, Callable[[Any], float | None]] = {
    "share of limit": lambda row: row.share,
    "best peer by limit": lambda row: ratio(row.peer_us, row.limit_us),
    "chosen by best way": lambda row: row.missed,
}


def _mean(rows: Sequence[R], value: Callable[[R], float | None]) -> str:
    """The geometric mean of what is known; empty if nothing is."""
    known = [v for v in map(value, rows) if v]
    return f"{geometric_mean(known):.2f}" if known else ""


def failures(variants: Iterable[tuple[str, Timing]]) -> list[str]:
    """A line for every text of an error, with the first variant that had it and how many had."""
    found: dict[str, list[str]] = {}
    for name, timing in variants:
        if timing.failed:
            found.setdefault(timing.failed, []).append(name)
    lines = [
        f"- {where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}: {text}"
        for text, where in found.items()
    ]
    return ["\n".join(["Failed:", "", *lines])] if lines else []


def time_of(timing: Timing | None) -> str:
    """Microseconds, `failed`, or `-` for what was not asked for."""
    if timing is None or timing.us is None:
        return "failed" if timing is not None and timing.failed else "-"
    return f"{timing.us:.1f}{'*' if timing.eager else ''}"


def number(value: float | None, spec: str = ".1f") -> str:
    return "-" if value is None else format(value, spec)


def grid(rows: Sequence[tuple[str, ...]]) -> str:
    """A markdown table, whose header is the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [rows[0], tuple("-" * width for width in widths), *rows[1:]]
    return "\n".join(
        f"| {' | '.join(c.ljust(w) for c, w in zip(row, widths, strict=True))} |" for row in lines
    )
