"""Splits that a graph reads from a GPU, traced without one: how many copies the host waits for."""

from __future__ import annotations

import re

from .experts import TOKENS, TOP, D, Dropless
from .test_on_gpus import WORLD, explained, needs_grouped_mm, tokens

pytestmark = needs_grouped_mm


def forward_graph(chained: bool) -> list[str]:
    report = explained(lambda: Dropless(sorts=True, chained=chained), tokens())
    assert len(report.fused) == 4, report
    (graph,) = (g for g in report.graphs if g.kind == "forward")
    return [line for line in str(graph.after).splitlines() if not line.startswith("#")]


def numbers(lines: list[str]) -> list[str]:
    """Which entries of which vectors the graph reads."""
    selects = dict(
        found.groups() for line in lines if (found := re.match(r"(\w+): .*select\.int\((.*)\)", line))
    )
    reads = (re.search(r"_local_scalar_dense\((\w+)\)", line) for line in lines)
    return [selects[found[1]] for found in reads if found]


def test_a_layer_reads_all_splits_in_one_copy() -> None:
    """The GPU gathers the rows that are sent while the host waits for the copy."""
    lines = forward_graph(chained=False)
    assert sorted(numbers(lines)) == [f"read_default, 0, {i}" for i in range(2 * WORLD)]
    (sent,) = (i for i, line in enumerate(lines) if f"[{TOKENS * TOP}, {D}] = aten.index.Tensor" in line)
    (read,) = (i for i, line in enumerate(lines) if "= autofuse.read(" in line)
    assert lines[sent].partition(":")[0] in lines[read]


def test_splits_that_are_computed_from_splits_are_read_behind_them() -> None:
    lines = forward_graph(chained=True)
    assert not any("autofuse.read" in line for line in lines)
    assert len(set(numbers(lines))) == 2 * WORLD
