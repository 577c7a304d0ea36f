"""Every program: what is fused and kept, and on real ranks the same numbers as eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.ranks import RankPool

from . import (
    between,
    contractions,
    dense,
    epilogues,
    expert_loops,
    experts,
    gathered_products,
    own_tables,
    pooled_exchange,
    recommendation,
    sharded_bags,
    tensor_parallel_experts,
    training,
    ulysses,
    uneven,
    views,
    vocabularies,
)
from .harness import compare, explain, sites
from .tiers import full_tier

Ranks = Callable[[int], RankPool]

MODULES = (
    *(dense, gathered_products, contractions, epilogues, views, training),
    *(recommendation, own_tables, pooled_exchange, experts, expert_loops, tensor_parallel_experts, ulysses),
    *(uneven, vocabularies, between, sharded_bags),
)
CASES = [(m, name) for m in MODULES for name in m.PROGRAMS]


def case_name(case: tuple) -> str:
    return f"{case[0].__name__.rsplit('.', 1)[-1]}: {case[1]}"


def _on_ranks() -> Iterator[Any]:
    """Every program with every number of ranks; the fast tier has one number, and not all programs."""
    full = full_tier()
    for case in CASES:
        worlds = case[0].PROGRAMS[case[1]].worlds
        for world in worlds:
            fast = world == worlds[0] and case_name(case) not in full
            marks = [] if fast else [pytest.mark.full]
            yield pytest.param(case, world, marks=marks, id=f"{case_name(case)}, {world} ranks")


@pytest.mark.parametrize(("case", "world"), list(_on_ranks()))
def test_on_ranks(case: tuple, world: int, ranks: Ranks) -> None:
    program = case[0].PROGRAMS[case[1]]
    results = ranks(world).run(compare, case[0].__name__, case[1], timeout=120)
    for rank, result in enumerate(results):
        where = f"rank {rank}\n{result['report']}"
        assert result["error"] <= program.tolerance, (where, result["error"])
        assert result["sites"] == program.sites, where
        assert bool(result["breaks"]) == bool(program.breaks), where
        assert program.breaks in result["report"], where


def test_tiers() -> None:
    assert full_tier() <= {case_name(case) for case in CASES}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_explained(case: tuple) -> None:
    """For 4 ranks, of which none runs."""
    program = case[0].PROGRAMS[case[1]]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        report = explain(program, 4)
    fused, kept = sites(report)
    # explain traces static shapes
    assert (fused, kept) == (fused if program.dynamic else program.sites[0], program.sites[1]), str(report)
    assert bool(report.graph_breaks) == bool(program.breaks), str(report)
    assert program.breaks in str(report)
