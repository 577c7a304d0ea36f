"""What `autofuse bench dense` measured, as markdown: a table an op, geometric means, worst cells."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autofuse.bench.gpu.dense.cells import OPS, Row, Sweep
from autofuse.bench.gpu.table import about, failures, grid, number, time_of, total
from autofuse.lowering.gpu.choice.timing import Timing

DECODE_SHAPE, DECODE_TOKENS = "llama70b.o_proj", 32
"""Rows of decoding, where latency decides. They have a line of their own."""


def report(*runs: Mapping[str, Any]) -> str:
    """All tables of one or more runs, each as the JSON file has it."""
    return "\n\n".join(part for run in runs for part in _run(run))


def _run(data: Mapping[str, Any]) -> list[str]:
    world = data["machine"]["world"]
    parts = [about(data)]
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
    return [*parts, *failures(_variants(rows, every_sweep))]


def table(rows: Sequence[Row]) -> str:
    """The rows of one op: every peer, ours, and the distance of both from the limit."""
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    header = (
        *("shape", "tokens", "matmul", *names, "ours", "way", "speed-up", "limit", "share of limit"),
        *("by best way", "predicted", "factor", "error nccl", "error ours"),
    )
    return grid([header, *(_cells(row, names) for row in _sorted(rows))])


def _cells(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    nccl = row.peers.get("cublas+nccl", Timing())
    return (
        row.cell.shape,
        str(row.cell.tokens),
        number(row.compute_us),
        *(time_of(row.peers.get(name)) for name in names),
        time_of(row.ours),
        row.way,
        number(row.speedup, ".2f"),
        number(row.limit_us),
        number(row.share, ".0%"),
        number(row.missed, ".2f"),
        number(row.predicted_us),
        number(row.factor, ".2f"),
        number(nccl.error, ".1e"),
        number(row.ours.error, ".1e"),
    )


def totals(rows: Sequence[Row]) -> list[str]:
    """A line for all rows of an op, and one for decode."""
    decode = [r for r in rows if r.cell.shape == DECODE_SHAPE and r.cell.tokens <= DECODE_TOKENS]
    lines = [total("all", rows, _where, _MEANS)]
    if decode:
        what = f"decode ({DECODE_SHAPE}, at most {DECODE_TOKENS} tokens)"
        lines.append(total(what, decode, _where, _MEANS))
    return [f"- {line}" for line in lines]


def _where(row: Row) -> str:
    return f"{row.cell.shape}, {row.cell.tokens} tokens"


_MEANS: Mapping[str, Callable[[Row], float | None]] = {
    "off the prediction by": lambda row: None if row.factor is None else max(row.factor, 1 / row.factor),
}


def sweep_table(sweeps: Sequence[Sweep], kind: str) -> str:
    """A line for each way of a cell, with its time (and, for orders, the skew between ranks) in every
    setting."""
    names = list(dict.fromkeys(name for sweep in sweeps for name in sweep.settings))
    skews = names if kind == "orders" else []
    titles = [f"{name} programs" if kind == "programs" else name for name in names]
    header = ("op", "shape", "tokens", "way", *titles, *(f"{name} skew" for name in skews))
    lines: list[tuple[str, ...]] = [header]
    for sweep in sweeps:
        cell, settings = sweep.cell, sweep.settings
        times = [time_of(settings.get(name)) for name in names]
        late = [_skew(settings.get(name, Timing())) for name in skews]
        lines.append((cell.op, cell.shape, str(cell.tokens), sweep.way, *times, *late))
    return grid(lines)


def _variants(rows: Sequence[Row], sweeps: Sequence[Sweep]) -> Iterator[tuple[str, Timing]]:
    for row in rows:
        yield from ((f"{row.cell.name}, {name}", timing) for name, timing in row.variants().items())
    for sweep in sweeps:
        for name, timing in sweep.settings.items():
            yield f"{sweep.cell.name}, {sweep.way}, {name}", timing


def _sorted(rows: Sequence[Row]) -> list[Row]:
    """Shapes in the order of measurement, fewest tokens first."""
    shapes = list(dict.fromkeys(row.cell.shape for row in rows))
    return sorted(rows, key=lambda row: (shapes.index(row.cell.shape), row.cell.tokens))


def _skew(timing: Timing) -> str:
    return "-" if timing.us is None else number(timing.skew_us)
