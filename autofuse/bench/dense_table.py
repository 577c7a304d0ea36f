"""What `autofuse bench dense` measured, as markdown: a table an op, geometric means, worst cells."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autofuse.bench.dense_cells import OPS, Row, Sweep, Timing
from autofuse.bench.table import geometric_mean

DECODE_SHAPE, DECODE_TOKENS = "llama70b.o_proj", 32
"""Rows of decoding, where latency is all: they have a line of their own."""


def report(*runs: Mapping[str, Any]) -> str:
    """All tables of one or more runs, each as the JSON file has it."""
    return "\n\n".join(part for run in runs for part in _run(run))


def _run(data: Mapping[str, Any]) -> list[str]:
    machine = data["machine"]
    world, link = machine["world"], data["link_gb_per_s"]
    measured = f"assumed: {data['link_failed']}" if data["link_failed"] else "measured"
    parts = [
        f"{world} x {machine['gpu']}, {data['settings']['dtype']}, torch {machine['torch']}, "
        f"Triton {machine['triton']}, NCCL {machine['nccl']}, copy engines {link:.0f} GB/s ({measured}). "
        "Microseconds of the slowest rank; * not captured as a CUDA graph."
    ]
    rows = [Row.from_json(row) for row in data["rows"]]
    for op in OPS:
        of_op = [row for row in rows if row.cell.op == op]
        if of_op:
            parts += [f"### {op}, {world} GPUs", table(of_op), "\n".join(totals(of_op))]
    every_sweep: list[Sweep] = []
    for kind in ("orders", "programs"):
        sweeps = [Sweep.from_json(sweep) for sweep in data[kind]]
        if sweeps:
            parts += [f"### {kind}, {world} GPUs", sweep_table(sweeps, kind)]
            every_sweep += sweeps
    failures = _failures(rows, every_sweep)
    return [*parts, "\n".join(["Failed:", "", *failures])] if failures else parts


def table(rows: Sequence[Row]) -> str:
    """The rows of one op: every peer, ours, and how far both are from the limit."""
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    header = (
        *("shape", "tokens", "matmul", *names, "ours", "way", "speed-up", "limit", "share of limit"),
        *("by best way", "predicted", "factor", "error nccl", "error ours"),
    )
    return _grid([header, *(_cells(row, names) for row in _sorted(rows))])


def _cells(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    nccl = row.peers.get("cublas+nccl", Timing())
    return (
        row.cell.shape,
        str(row.cell.tokens),
        _number(row.compute_us),
        *(_time(row.peers.get(name)) for name in names),
        _time(row.ours),
        row.way,
        _number(row.speedup, ".2f"),
        _number(row.limit_us),
        _number(row.share, ".0%"),
        _number(row.missed, ".2f"),
        _number(row.predicted_us),
        _number(row.factor, ".2f"),
        _number(nccl.error, ".1e"),
        _number(row.ours.error, ".1e"),
    )


def totals(rows: Sequence[Row]) -> list[str]:
    """A line for all rows of an op, and one for decode."""
    decode = [r for r in rows if r.cell.shape == DECODE_SHAPE and r.cell.tokens <= DECODE_TOKENS]
    lines = [_total("all", rows)]
    if decode:
        lines.append(_total(f"decode ({DECODE_SHAPE}, at most {DECODE_TOKENS} tokens)", decode))
    return [f"- {line}" for line in lines]


def _total(name: str, rows: Sequence[Row]) -> str:
    counted = [row for row in rows if row.speedup is not None]
    if not counted:
        return f"{name}: none of {len(rows)} cells has both times"
    worst = min(counted, key=lambda row: row.speedup or 0.0)
    where = f"{worst.cell.shape}, {worst.cell.tokens} tokens"
    text = f"{name}: {len(counted)} of {len(rows)} cells, worst {worst.speedup:.2f}x ({where}); "
    text += f"geometric means: {_mean(counted, lambda row: row.speedup)}x the best peer"
    for what, value in _MEANS.items():
        mean = _mean(counted, value)
        text += f", {what} {mean}" if mean else ""
    return text


_MEANS: dict[str, Callable[[Row], float | None]] = {
    "share of limit": lambda row: row.share,
    "best peer by limit": lambda row: None if row.limit_us is None else (row.peer_us or 0) / row.limit_us,
    "chosen by best way": lambda row: row.missed,
    "off the prediction by": lambda row: None if row.factor is None else max(row.factor, 1 / row.factor),
}


def _mean(rows: Sequence[Row], value: Callable[[Row], float | None]) -> str:
    """The geometric mean of what is known; empty if nothing is."""
    known = [v for v in map(value, rows) if v]
    return f"{geometric_mean(known):.2f}" if known else ""


def sweep_table(sweeps: Sequence[Sweep], kind: str) -> str:
    """A line a way of a cell, with time (and, of orders, the skew between ranks) in every setting."""
    names = list(dict.fromkeys(name for sweep in sweeps for name in sweep.settings))
    skews = names if kind == "orders" else []
    titles = [f"{name} programs" if kind == "programs" else name for name in names]
    header = ("op", "shape", "tokens", "way", *titles, *(f"{name} skew" for name in skews))
    grid = [header]
    for sweep in sweeps:
        cell, settings = sweep.cell, sweep.settings
        times = [_time(settings.get(name)) for name in names]
        late = [_skew(settings.get(name, Timing())) for name in skews]
        grid.append((cell.op, cell.shape, str(cell.tokens), sweep.way, *times, *late))
    return _grid(grid)


def _failures(rows: Sequence[Row], sweeps: Sequence[Sweep]) -> list[str]:
    """A line for every text of an error, with the first variant that had it and how many had."""
    found: dict[str, list[str]] = {}
    for row in rows:
        groups = {"compute": row.compute, "peers": row.peers, "ours": {"auto": row.ours}, "ways": row.ways}
        for kind, timings in groups.items():
            for name, timing in timings.items():
                if timing.failed:
                    found.setdefault(timing.failed, []).append(f"{row.cell.name}, {kind} {name}")
    for sweep in sweeps:
        for name, timing in sweep.settings.items():
            if timing.failed:
                found.setdefault(timing.failed, []).append(f"{sweep.cell.name}, {sweep.way}, {name}")
    return [
        f"- {where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}: {text}"
        for text, where in found.items()
    ]


def _sorted(rows: Sequence[Row]) -> list[Row]:
    """Shapes as they were measured, fewest tokens first."""
    shapes = list(dict.fromkeys(row.cell.shape for row in rows))
    return sorted(rows, key=lambda row: (shapes.index(row.cell.shape), row.cell.tokens))


def _time(timing: Timing | None) -> str:
    if timing is None or timing.us is None:
        return "failed" if timing is not None and timing.failed else "-"
    return f"{timing.us:.1f}{'*' if timing.eager else ''}"


def _skew(timing: Timing) -> str:
    return "-" if timing.us is None else _number(timing.skew_us)


def _number(value: float | None, spec: str = ".1f") -> str:
    return "-" if value is None else format(value, spec)


def _grid(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [rows[0], tuple("-" * width for width in widths), *rows[1:]]
    return "\n".join(
        f"| {' | '.join(c.ljust(w) for c, w in zip(row, widths, strict=True))} |" for row in lines
    )
