"""Measured points: the microseconds of every way to run a problem, and the files that hold them.

A file is a JSON list of points. The user's own is `~/.cache/autofuse/ways/<gpu>.json`, which `autofuse bench
dense --tune` and `AUTOFUSE_MEASURE` write; others are shipped.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .kernel import Problem

_SHIPPED = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Point:
    """What was measured: microseconds by way, on the slowest rank."""

    op: str
    m: int
    k: int
    n: int
    world: int
    times: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, problem: Problem, times: dict[str, float]) -> Point:
        found = tuple((way, round(us, 2)) for way, us in sorted(times.items(), key=lambda item: item[1]))
        return cls(problem.op, problem.m, problem.k, problem.n, problem.world, found)

    @classmethod
    def parsed(cls, values: dict[str, Any]) -> Point:
        """A point as JSON has it."""
        return cls(**{**values, "times": tuple((way, float(us)) for way, us in values["times"])})

    def distance(self, problem: Problem) -> float:
        """In doublings of the sizes; tokens count in full, since ways change with them."""
        if self.op != problem.op:
            return math.inf
        apart = sum(
            abs(math.log2(a / b))
            for a, b in zip((self.m, self.k, self.n), (problem.m, problem.k, problem.n), strict=True)
        )
        return apart + 0.5 * abs(math.log2(self.world / problem.world))


Points = tuple[Point, ...]


def gpu_name(device: torch.device) -> str:
    """`h200` of NVIDIA H200."""
    return torch.cuda.get_device_name(device).lower().removeprefix("nvidia ").replace(" ", "-")


def own_file(device: torch.device) -> Path:
    """Where rank 0 writes what was measured on this kind of GPU."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
        / "autofuse"
        / "ways"
        / f"{gpu_name(device)}.json"
    )


def read(path: Path) -> Points:
    """The points of a file; none if there is no such file. ValueError if it holds anything else."""
    if not path.exists():
        return ()
    try:
        return tuple(map(Point.parsed, json.loads(path.read_text())))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} holds no measured points ({error}); delete it, and run "
            "`autofuse bench dense --tune` again"
        ) from error


def write(path: Path, points: Sequence[Point]) -> None:
    """Adds points to a file; those of the same problem are replaced."""
    problems = {(p.op, p.m, p.k, p.n, p.world) for p in points}
    old = [p for p in read(path) if (p.op, p.m, p.k, p.n, p.world) not in problems]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    rows = [
        json.dumps(vars(p)) for p in sorted((*old, *points), key=lambda p: (p.op, p.world, p.k, p.n, p.m))
    ]
    draft.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    draft.replace(path)


def known(device: torch.device) -> Points:
    """The points of this machine's own file and of those shipped, nearest kin first."""
    shipped = [_SHIPPED / f"{gpu_name(device)}.json", *sorted(_SHIPPED.glob("*.json"))]
    return (*read(own_file(device)), *(p for path in dict.fromkeys(shipped) for p in read(path)))
