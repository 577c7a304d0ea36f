"""What the benchmarks of exchanges measured, as markdown: a table an op, means, worst cells."""

from collections.abc import Mapping, Sequence
from typing import Any

from autofuse.bench.gpu.embedding import cells as embedding_cells
from autofuse.bench.gpu.exchange.rows import Row
from autofuse.bench.gpu.experts import cells as expert_cells
from autofuse.bench.gpu.sums import cells as sum_cells
from autofuse.bench.gpu.table import about, failures, grid, number, time_of, total
from autofuse.lowering.gpu.choice.timing import Timing

_CELLS: Mapping[str, type[Any]] = {
    "embedding": embedding_cells.Cell,
    "experts": expert_cells.Cell,
    "sums": sum_cells.Cell,
}


def report(*runs: Mapping[str, Any]) -> str:
    """All tables of one or more runs, each as the JSON file has it."""
    return "\n\n".join(part for run in runs for part in _run(run))


def _run(data: Mapping[str, Any]) -> list[str]:
    rows = [Row.from_json(row, _CELLS[data["settings"]["benchmark"]]) for row in data["rows"]]
    parts = [about(data, f"memory {data['memory_gb_per_s']:.0f} GB/s read and written"), *data["notes"]]
    for op in dict.fromkeys(row.cell.op for row in rows):
        of_op = [row for row in rows if row.cell.op == op]
        title = f"### {op}, {data['machine']['world']} GPUs"
        parts += [title, table(of_op), "\n".join(f"- {line}" for line in totals(of_op))]
    found = ((row.cell.name, *variant) for row in rows for variant in row.variants().items())
    return [*parts, *failures((f"{cell}, {name}", timing) for cell, name, timing in found)]


def table(rows: Sequence[Row]) -> str:
    """The rows of one op: compute and steps alone, every peer, ours, and the distance of both from the
    limit."""
    compute = list(dict.fromkeys(name for row in rows for name in row.compute))
    steps = list(dict.fromkeys(name for row in rows for name in row.parts))
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    header = (
        *rows[0].cell.labels,
        *(f"{name} alone" for name in (*compute, *steps)),
        *peers,
        *("best peer", "ours", "way", "speed-up", "limit", "share of limit", "by best way"),
        *(f"error {name}" for name in (*peers, "ours")),
    )
    return grid([header, *(_line(row, compute, steps, peers) for row in rows)])


def _line(row: Row, compute: Sequence[str], steps: Sequence[str], peers: Sequence[str]) -> tuple[str, ...]:
    of_peers = [row.peers.get(name, Timing()) for name in peers]
    return (
        *row.cell.labels.values(),
        *(time_of(row.compute.get(name)) for name in compute),
        *(time_of(row.parts.get(name)) for name in steps),
        *(time_of(timing) for timing in of_peers),
        number(row.peer_us),
        time_of(row.ours),
        row.way,
        number(row.speedup, ".2f"),
        number(row.limit_us),
        number(row.share, ".0%"),
        number(row.missed, ".2f"),
        *(number(timing.error, ".1e") for timing in (*of_peers, row.ours)),
    )


def totals(rows: Sequence[Row]) -> list[str]:
    """A line for all rows of an op, and one for every kind of cell if there are several."""
    kinds = dict.fromkeys(row.cell.kind for row in rows)
    lines = [total("all", rows, _where)]
    if len(kinds) > 1:
        lines += [total(kind, [row for row in rows if row.cell.kind == kind], _where) for kind in kinds]
    return lines


def _where(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.cell.labels.items())
