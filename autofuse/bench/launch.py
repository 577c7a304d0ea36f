"""Starts the ranks of one group and collects what they measured."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from torch import multiprocessing

from autofuse.bench.measure import Options, Row, run_rank

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of what is measured next, how many rows are done, and how many there are."""

_LOOK_S = 0.2


def measure(world: int, options: Options, progress: Progress | None = None) -> list[Row]:
    """The rows of a group of `world` ranks on this machine. Raises what a rank raises."""
    with tempfile.TemporaryDirectory(prefix="autofuse-bench-") as directory:
        log, seen = Path(directory, "progress"), 0
        context = multiprocessing.spawn(run_rank, (world, directory, options), nprocs=world, join=False)
        assert context is not None
        while not context.join(_LOOK_S):
            lines = log.read_text().splitlines() if progress is not None and log.exists() else []
            for done, line in enumerate(lines[seen:], start=seen):
                total, name = line.split(" ", 1)
                progress(name, done, int(total))  # type: ignore[misc]
            seen = len(lines)
        return [Row(**row) for row in json.loads(Path(directory, "rows.json").read_text())]
