"""Splits that a graph reads from a GPU, traced without one: how many copies the host waits for."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from .experts import DISPATCH, TOKENS, TOP, D, Dropless, OneExpert, exchange
from .test_on_gpus import WORLD, explained, needs_grouped_mm, tokens

pytestmark = needs_grouped_mm


def forward_graph(build: Callable[[], nn.Module]) -> list[str]:
    report = explained(build, tokens())
    assert len(report.fused) >= 2, report
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
    """The GPU gathers the rows that are sent while the host waits for the copy and works with the splits."""
    lines = forward_graph(lambda: Dropless(sorts=True))
    assert sorted(numbers(lines)) == [f"read_default, 0, {i}" for i in range(2 * WORLD)]
    (sent,) = (i for i, line in enumerate(lines) if f"[{TOKENS * TOP}, {D}] = aten.index.Tensor" in line)
    begun, read = (i for i, line in enumerate(lines) if re.search(r"= autofuse\.(begin_)?read\(", line))
    assert begun < sent < read
    assert lines[sent].partition(":")[0] in lines[read]


def test_splits_that_are_computed_from_splits_are_read_behind_them() -> None:
    lines = forward_graph(lambda: Dropless(sorts=True, chained=True))
    assert not any("autofuse.read" in line for line in lines)
    assert len(set(numbers(lines))) == 2 * WORLD


class Told(OneExpert):
    """Scores are exchanged with the same splits as rows, and rows are reduced behind that exchange."""

    def forward(self, x: Tensor) -> Tensor:
        score, order, end, inputs, outputs = self.routed(x)
        scores = exchange(score, outputs, inputs)
        reduced = funcol.all_reduce(x.detach(), "sum", "0")
        y = self.expert(exchange(x[order] + reduced[order], outputs, inputs), end)
        back = exchange((y * scores).to(y.dtype), inputs, outputs)
        return torch.zeros_like(x).index_add(0, order, back)


def test_collectives_do_not_change_places() -> None:
    found = (re.search(r"= (?:autofuse|_c10d_functional)\.(\w+)\(", line) for line in forward_graph(Told))
    calls = [each[1] for each in found if each and each[1] != "wait_tensor"]
    exchanged = "all_to_all_single"
    assert calls == [exchanged, "begin_read", "read", exchanged, "all_reduce", DISPATCH, exchanged]
