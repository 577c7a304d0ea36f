"""Tables of numbers beside published or measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A number that somebody published, and what the simulation says.

    `unit`: `%` for parts of one hundred, which differ by points; `x` for factors. `role`: `fitted` (a
    constant was chosen for it), `tested`, or `estimated` (it rests on an assumption beside the machine's).
    """

    name: str
    published: float
    simulated: float
    unit: str = "%"
    role: str = "tested"
    note: str = ""

    @property
    def difference(self) -> float:
        return self.simulated - self.published

    @property
    def close(self) -> bool:
        """Within 5 points, or 5 % of a factor."""
        return abs(self.difference) <= (5 if self.unit == "%" else 0.05 * self.published)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """A table of text: the first row has the titles, the first column is aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def beside(rows: Sequence[Row]) -> str:
    """Published and simulated numbers with their differences, and a count of those that are close."""
    table = [["", "published", "simulated", "difference", "role"]]
    for row in rows:
        digits, unit = (1, "%") if row.unit == "%" else (2, "x")
        sign = f"{row.difference:+.{digits}f}"
        far = "" if row.close else " !"
        table.append(
            [row.name, f"{row.published:g}{unit}", f"{row.simulated:.{digits}f}{unit}", sign + far, row.role]
        )
    tested = [row for row in rows if row.role == "tested"]
    close = sum(row.close for row in tested)
    fitted = sum(row.role == "fitted" for row in rows)
    summary = (
        f"{fitted} fitted; {close} of {len(tested)} tested numbers within 5 points (factors: 5 %); "
        f"{sum(r.role == 'estimated' for r in rows)} estimated"
    )
    return f"{columns(table)}\n\n{summary}"
