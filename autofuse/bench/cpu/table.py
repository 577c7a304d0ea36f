"""The rows as a markdown table, with the geometric mean and the minimum of every group."""

import math
from collections.abc import Sequence

from autofuse.bench.cpu.measure import Row

_HEADER = (
    "row",
    "ranks",
    "inductor us",
    "autofuse us",
    "speed-up",
    "site",
    "error inductor",
    "error autofuse",
    "predicted",
)


def table(rows: Sequence[Row]) -> str:
    """A markdown table of `rows` and a line of totals for every number of ranks."""
    cells = [_HEADER, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, tuple("-" * width for width in widths))
    lines = [f"| {' | '.join(c.ljust(w) for c, w in zip(row, widths, strict=True))} |" for row in cells]
    worlds = sorted({row.world for row in rows})
    totals = [(f"{world} ranks", [row for row in rows if row.world == world]) for world in worlds]
    if len(worlds) > 1:
        totals.append(("all", list(rows)))
    return "\n".join([*lines, "", *(_total(name, part) for name, part in totals)])


def geometric_mean(values: Sequence[float]) -> float:
    """`(v_1 * ... * v_n)^(1/n)` of positive values."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _total(name: str, rows: Sequence[Row]) -> str:
    worst = min(rows, key=lambda row: row.speedup)
    mean = geometric_mean([row.speedup for row in rows])
    return (
        f"{name}: {len(rows)} rows, geometric mean {mean:.2f}x, minimum {worst.speedup:.2f}x ({worst.name})"
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        str(row.world),
        f"{row.inductor_us:.0f}",
        f"{row.autofuse_us:.0f}",
        f"{row.speedup:.2f}",
        row.fused,
        f"{row.inductor_error:.1e}",
        f"{row.autofuse_error:.1e}",
        "-" if row.predicted is None else f"{row.predicted:.2f}",
    )
