"""Starts the ranks of every group and collects what they measured."""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import multiprocessing

from autofuse.bench.cpu.measure import Options, Row, run_rank
from autofuse.progress import Progress, silent

_POLL_S = 0.2


def run(worlds: Sequence[int], options: Options, progress: Progress = silent) -> list[Row]:
    """The rows of groups of so many ranks each, which share out the cores of this process.

    Raises ValueError if no row has one of `options.rows` in its name.
    """
    rows: list[Row] = []
    for world in worlds:
        threads = max(1, cores() // world)
        rows += _run_group(world, replace(options, threads=threads), progress)
    if not rows:
        names = list(options.rows)
        raise ValueError(f"no row has one of {names} in its name; without --rows all are measured")
    return rows


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_group(world: int, options: Options, progress: Progress) -> list[Row]:
    events = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="autofuse-bench-") as directory:
        arguments = (world, directory, options, events)
        ranks = multiprocessing.spawn(run_rank, arguments, nprocs=world, join=False)
        while not ranks.join(_POLL_S):
            while not events.empty():
                progress(*events.get())
        return [Row(**row) for row in json.loads(Path(directory, "rows.json").read_text())]
