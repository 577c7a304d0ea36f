"""Every program: what is fused and kept, and on real ranks the same numbers as eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.ranks import RankPool

from . import (
    contractions,
    dense,
    epilogues,
    expert_loops,
    experts,
    pooled_exchange,
    recommendation,
    training,
    ulysses,
    uneven,
    views,
)
from .harness import Program, compare, explain

MODULES = (
    *(dense, contractions, epilogues, views, training),
    *(recommendation, pooled_exchange, experts, expert_loops, ulysses, uneven),
)
CASES = [(m, name) for m in MODULES for name in m.PROGRAMS]


def _id(case: tuple) -> str:
    return f"{case[0].__name__.rsplit('.', 1)[-1]}: {case[1]}"


def _by_kind(program: Program) -> tuple[list[str], list[str]]:
    fused = sorted(f"{kind} {p}" for kind, patterns in program.fused.items() for p in patterns)
    kept = sorted(f"{kind} {r}" for kind, reasons in program.kept.items() for r in reasons)
    return fused, kept


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_sites(case: tuple) -> None:
    program = case[0].PROGRAMS[case[1]]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        report = explain(program, 4)
    kinds = {g.name: g.kind for g in report.graphs}
    fused = sorted(f"{kinds[s.graph]} {s.pattern}" for s in report.fused)
    kept = sorted(f"{kinds[s.graph]} {s.reason.value}" for s in report.kept if s.reason is not None)
    expected = _by_kind(program)
    if program.dynamic:  # explain traces static shapes
        expected = (fused, expected[1])
    assert (fused, kept) == expected, str(report)
    assert bool(report.graph_breaks) == bool(program.breaks), str(report)
    assert program.breaks in str(report)


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_numbers(case: tuple, ranks: Callable[[int], RankPool]) -> None:
    program = case[0].PROGRAMS[case[1]]
    for world in program.worlds:
        results = ranks(world).run(compare, case[0].__name__, case[1], timeout=120)
        expected = sorted(p for patterns in program.fused.values() for p in patterns)
        for rank, result in enumerate(results):
            assert sorted(result["fused"]) == expected, (rank, result)
            assert result["error"] <= program.tolerance, (rank, result)
