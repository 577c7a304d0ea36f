"""Measured points: the microseconds of every way to run a problem, and the files that hold them.

A file is a JSON list of points. The user's own is `~/.cache/autofuse/ways/<gpu>.json`, which `autofuse bench
dense --tune` and `AUTOFUSE_MEASURE` write; others are shipped.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .gpu import gpu_name
from .kernel import Problem, Way, ways_of

_SHIPPED = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Point:
    """A measured problem: microseconds of each way, on the slowest rank."""

    op: str
    m: int
    k: int
    n: int
    world: int
    times: tuple[tuple[str, float], ...]
    sources: tuple[tuple[str, str], ...] = ()
    """`Way.source` when it was measured, by the first word of the way's name. Older files have none."""
    gpu: str = ""
    """The kind of GPU on which it was measured; empty if that is the kind of this GPU."""

    @classmethod
    def of(cls, problem: Problem, times: dict[str, float]) -> Point:
        found = tuple((way, round(us, 2)) for way, us in sorted(times.items(), key=lambda item: item[1]))
        ways = ways_of(problem)
        sources = {_kind(name): ways[name].source for name, _ in found if name in ways}
        sizes = problem.m, problem.k, problem.n, problem.world
        return cls(problem.measured_as, *sizes, found, tuple(sorted(sources.items())))

    @classmethod
    def parsed(cls, values: dict[str, Any]) -> Point:
        """A point as JSON has it. ValueError, TypeError or KeyError for anything else."""
        times = tuple((way, float(us)) for way, us in values["times"])
        sources = tuple((kind, str(source)) for kind, source in values.get("sources", ()))
        found = cls(**{**values, "times": times, "sources": sources})
        if not all(isinstance(size, int) and size > 0 for size in found.sizes):
            raise ValueError(f"sizes {found.sizes}: expected positive integers")
        if not all(0 < us < math.inf for _, us in times):
            raise ValueError(f"times of {found.op} {found.sizes}: expected positive numbers")
        return found

    @property
    def values(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: value for name, value in vars(self).items() if value or name not in ("sources", "gpu")}

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.m, self.k, self.n, self.world

    def is_fresh(self, problem: Problem) -> bool:
        """Whether this very problem was measured on this kind of GPU, with the present sources of the
        kernels."""
        sizes = problem.m, problem.k, problem.n, problem.world
        if self.gpu or (self.op, self.sizes) != (problem.measured_as, sizes):
            return False
        ways, times = ways_of(problem), dict(self.times)
        fused = [way for way in ways.values() if way.fused]
        return not any(map(self.is_stale, ways.values())) and (
            not fused or any(way.name in times for way in fused)
        )

    def is_stale(self, way: Way) -> bool:
        """Whether the time of the way was measured with another source. False if the point has no source."""
        return dict(self.sources).get(_kind(way.name), way.source) != way.source


Points = tuple[Point, ...]


def _kind(way: str) -> str:
    return way.split(" ")[0]


def own_file(device: torch.device) -> Path:
    """The file to which rank 0 writes points of this kind of GPU."""
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
        json.dumps(p.values) for p in sorted((*old, *points), key=lambda p: (p.op, p.world, p.k, p.n, p.m))
    ]
    draft.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    draft.replace(path)


def known(device: torch.device) -> Points:
    """The points of the user's own file, then the shipped ones of this kind of GPU, then those of others."""
    own = gpu_name(device)
    return (*read(own_file(device)), *shipped(own))


def shipped(own: str) -> Points:
    """The points that come with autofuse, those of the kind `own` first. Points of other kinds name
    theirs."""
    files = sorted(_SHIPPED.glob("*.json"), key=lambda path: path.stem != own)
    return tuple(replace(p, gpu="" if f.stem == own else f.stem) for f in files for p in read(f))
