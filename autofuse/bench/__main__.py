"""Command line of the benchmark: starts the ranks of every group, prints the table."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from autofuse.bench.launch import measure
from autofuse.bench.measure import Options, Row
from autofuse.bench.table import table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and writes it where asked."""
    args = _parser().parse_args(arguments)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    rows: list[Row] = []
    for world in args.ranks:
        threads = max(1, cores // world)
        options = Options(tuple(args.rows), args.policy, args.dtype, args.repeats, args.seconds, threads)
        rows += measure(world, options, _show if sys.stderr.isatty() else None)
    if not rows:
        raise SystemExit(f"no row has one of {args.rows} in its name; without --rows all are measured")
    # Whoever reads the numbers must see that something else was running.
    text = f"{table(rows)}\n{cores} cores, torch {torch.__version__}, load average before the run {load:.1f}"
    print(text)
    if args.table:
        args.table.write_text(text + "\n")
    if args.json:
        about = {"torch": torch.__version__, "machine": platform.machine(), "cores": cores, "load": load}
        settings = {"dtype": args.dtype, "policy": args.policy, "device": args.device}
        measured = [{**asdict(row), "speedup": row.speedup} for row in rows]
        args.json.write_text(json.dumps({**about, **settings, "rows": measured}, indent=1) + "\n")


def _show(name: str, done: int, total: int) -> None:
    print(f"{done + 1} of {total}: {name}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autofuse.bench",
        description="The same functions under torch.compile with stock Inductor and with backend='autofuse'.",
    )
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="sizes of the groups")
    parser.add_argument("--rows", nargs="+", default=[], help="only rows whose name contains one of these")
    parser.add_argument("--policy", choices=["auto", "always"], default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--repeats", type=int, default=15, help="least repetitions of a row")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time for a row")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--table", type=Path, help="write the table to this file")
    return parser


if __name__ == "__main__":
    main()
