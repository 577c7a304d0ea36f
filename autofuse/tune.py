"""`autofuse tune`: measures this machine and writes its device table, which the cost model then uses.

The rows are those of the benchmark, fused wherever that is legal. `fit` fits the constants of the shipped
table to all rows at once; constants that no row depends on keep their values.
"""

import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from autofuse.bench.cpu.measure import Options, Row
from autofuse.bench.cpu.run import run
from autofuse.fit import Sample, fit
from autofuse.passes.choice.cost_model import Model, Numbers, Task
from autofuse.passes.choice.device_table import DeviceTable, Point, cache_folder, shipped, table_for
from autofuse.progress import Progress, silent

DTYPES = ("float32", "bfloat16", "float16")

QUICK_ROWS = (
    "tokens=1 k=n=2048",
    "tokens=128 k=n=2048",
    "embedding batch=512 pooling=10",
    "experts tokens=128 hidden=512",
)
_QUICK, _FULL = (3, 0.1), (15, 1.0)  # least repetitions and seconds of a row


def tune(
    ranks: Sequence[int] = (2, 4),
    dtypes: Sequence[str | torch.dtype] = ("float32",),
    output: Path | None = None,
    quick: bool = False,
    progress: Progress = silent,
) -> DeviceTable:
    """Measures groups of `ranks` ranks on this machine's CPU, fits a table and writes it.

    `output` is the file; None: `default_output()`. `quick` measures a few rows a few times: under a minute on
    an idle machine, and less accurate. `progress(name, done, total)` is called before each row; it counts
    those of one group and dtype. Nothing else should run meanwhile.

    Raises ValueError for a number of ranks below 2, and for a dtype without kernels.
    """
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    _check(ranks, names)
    rows = measure_rows(ranks, names, quick, progress)
    table = table_of(rows)
    path = output or default_output()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Replaced in one step: ranks that compile meanwhile must not read half a table.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(table.to_json())
    draft.replace(path)
    return table


def default_output() -> Path:
    """The file in the cache folder, where the cost model looks for it."""
    return cache_folder() / "cpu.json"


def measure_rows(
    ranks: Sequence[int], dtypes: Sequence[str], quick: bool, progress: Progress = silent
) -> list[Row]:
    """The rows of the benchmark for all groups and dtypes."""
    repeats, seconds = _QUICK if quick else _FULL
    rows: list[Row] = []
    for dtype in dtypes:
        chosen = QUICK_ROWS if quick else ()
        rows += run(ranks, Options(chosen, "always", dtype, repeats, seconds), progress)
    return rows


def table_of(rows: Sequence[Row]) -> DeviceTable:
    """The table for this machine's CPU that fits the rows best. Rows with one site become the table's
    points."""
    cores = os.cpu_count() or 1
    start = _start(table_for(shipped(), torch.device("cpu")), rows, cores)
    points = tuple(
        Point(row.tasks[0], round(row.autofuse_us, 1), round(row.inductor_us, 1))
        for row in rows
        if len(row.tasks) == 1
    )
    return replace(fit(start, samples(rows), cores), points=points)


def samples(rows: Sequence[Row]) -> list[Sample]:
    """The two measured times of every row, fused and unfused."""
    found = []
    for row in rows:
        if not row.tasks:  # a graph break hides its collectives
            continue
        tasks = tuple(map(Task.parse, row.tasks))
        found += [Sample("fused", tasks, row.autofuse_us), Sample("apart", tasks, row.inductor_us)]
    return found


def comparison(table: DeviceTable) -> str:
    """A text: predicted and measured times of the table's points, in microseconds, and the errors."""
    model = Model(table, os.cpu_count() or 1)
    lines = [f"{'fused us':>9} {'predicted':>9} {'error':>6}  {'apart us':>9} {'predicted':>9} {'error':>6}"]
    errors = []
    for point in table.points:
        task, cells = Task.parse(point.task), []
        for time, predicted in ((point.fused_us, model.fused), (point.unfused_us, model.apart)):
            if time is None:
                cells.append(" " * 26)
                continue
            guess = predicted(task, Numbers())
            errors.append(abs(guess / time - 1))
            cells.append(f"{time:>9.0f} {guess:>9.0f} {guess / time - 1:>+6.0%}")
        lines.append(f"{'  '.join(cells)}  {point.task}")
    if errors:
        lines.append(f"error: median {statistics.median(errors):.0%}, largest {max(errors):.0%}")
    return "\n".join(lines)


def _start(table: DeviceTable, rows: Sequence[Row], cores: int) -> DeviceTable:
    """The shipped table with constants for the numbers of ranks that were measured, and no others: constants
    of another machine say nothing about how ranks share the cores of this one."""
    constants = {}
    for key, value in table.constants.items():
        *prefix, ranks, name = key.split(".")
        if not ranks.isdecimal():
            constants[key] = value
            continue
        for world in sorted({row.world for row in rows}):
            common = ".".join(prefix)
            constants[f"{common}.{world}.{name}"] = table.ranked(common, name, world, cores)
    return replace(table, name="cpu, tuned", cores=cores, constants=constants)


def _check(ranks: Sequence[int], dtypes: Sequence[str]) -> None:
    if not ranks or any(world < 2 for world in ranks):
        raise ValueError(f"ranks={list(ranks)}: expected sizes of groups, each at least 2")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"dtypes: {dtype!r} has no kernel; expected some of {', '.join(DTYPES)}")
    if not dtypes:
        raise ValueError(f"dtypes: expected at least one of {', '.join(DTYPES)}")
