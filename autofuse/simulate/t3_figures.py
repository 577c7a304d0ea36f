"""The figures of the T3 paper that are pictures only, drawn from the simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autofuse.lowering.simulate.machine import Machine

from .figures import bars, curves, thinned
from .t3 import SubLayer, Times, compute_first, overlapped, round_robin


def draw(times: Sequence[Times]) -> dict[str, str]:
    """SVG by name of file."""
    return {
        "t3-time.svg": time(times),
        "t3-traffic.svg": traffic(times),
        "t3-queue.svg": queue(times[0].case),
    }


def time(times: Sequence[Times]) -> str:
    """Sequential, ideal, T3 and T3-MCA side by side."""
    groups = {}
    for t in times:
        gather = {"all_gather": t.all_gather}
        groups[t.case.label] = (
            {"matmul": t.matmul, "reduce_scatter": t.reduce_scatter, **gather},
            {"both, ideally overlapped": max(t.matmul, t.reduce_scatter), **gather},
            {"both, T3": t.t3, **gather},
            {"both, T3-MCA": t.mca, **gather},
        )
    return bars("Time by sub-layer: sequential, ideal, T3, T3-MCA", "us", groups)


def traffic(times: Sequence[Times]) -> str:
    """Bytes from and to memory: sequential and T3-MCA."""
    groups: dict[str, Sequence[Mapping[str, float]]] = {}
    for t in times:
        gather = sum(t.gather.traffic.values())
        groups[t.case.label] = tuple(
            {
                "matmul reads": reads / 1e6,
                "reads of sums": sums / 1e6,
                "writes": writes / 1e6,
                "all_gather": gather / 1e6,
            }
            for reads, sums, writes in zip(
                t.accesses("matmul reads"), t.accesses("sum reads"), t.accesses("writes"), strict=True
            )
        )
    return bars("Memory traffic by sub-layer: sequential, T3-MCA", "MB", groups)


def queue(case: SubLayer) -> str:
    """What waits for memory, over time."""
    lines = {}
    for name, machine in (("T3", round_robin()), ("T3-MCA", compute_first(10))):
        points = _waiting(case, machine)
        lines[f"{name}: communication that waits"] = thinned(points)
    return curves(f"Requests before the arbiter, {case.label}", "KB", lines, "us")


def _waiting(case: SubLayer, machine: Machine) -> list[tuple[float, float]]:
    found = overlapped(case, replace(machine, groups=4), record=True)
    return [(at, communication / 1e3) for at, _, _, communication in found.occupancy]
