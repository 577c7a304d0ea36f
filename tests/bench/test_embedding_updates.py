"""Cells of updates in `autofuse bench embedding` without a GPU: sizes, errors on CPU ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autofuse.bench.gpu.embedding import gradients as embedding_gradients
from autofuse.bench.gpu.embedding import updates as embedding_updates
from autofuse.bench.gpu.embedding.cells import UPDATE, Cell
from autofuse.bench.gpu.exchange.rows import Row
from autofuse.bench.gpu.exchange.run import WORK
from autofuse.lowering.ops.library import FUSED_OPS
from tests.bench.exchange import measured
from tests.bench.test_embedding_gradients import DIFFERENT, TINY
from tests.ranks import RankPool

CELLS = [replace(TINY, op=UPDATE), replace(DIFFERENT, op=UPDATE)]
ROUNDING = 1e-2
"""Of bfloat16: the rows, and with torch also sums."""


def test_sizes() -> None:
    cell = CELLS[0]
    named = 50 * (1 - (49 / 50) ** 24)  # of 24 indices a table
    assert cell.named_bytes == round(4 * named * 16 * 2)
    assert cell.moved_bytes == 2 * 3 * 8 * 4 * 16 + 2 * cell.named_bytes


def _measured(rank: int, world: int, cell: Cell) -> dict[str, Any]:
    return measured(cell, WORK[cell.op])


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_all_variants_are_right(ranks: Callable[[int], RankPool], cell: Cell) -> None:
    row, _ = ranks(2).run(_measured, cell)
    kinds = {kind: row[kind] for kind in ("compute", "parts", "peers")} | {"ours": {"auto": row["ours"]}}
    errors = {kind: {name: t["error"] for name, t in timings.items()} for kind, timings in kinds.items()}
    assert list(errors["compute"]) == ["dense", "sparse"]
    assert errors["parts"] == {"all-to-all": 0, "pack": 0, "unpack": 0}
    assert list(errors["peers"]) == ["dense+nccl", "sparse+nccl"]
    rows = [*errors["compute"].values(), *errors["peers"].values(), *errors["ours"].values()]
    assert all(0 < error < ROUNDING for error in rows), row
    assert Row.from_json(json.loads(json.dumps(row)), Cell).cell == cell


def _missed(rank: int, world: int) -> tuple[float, float]:
    """Errors of tables that have not changed, and of those that the reference has."""
    group = dist.group.WORLD
    assert group is not None
    given = embedding_gradients.operands(CELLS[1], torch.device("cpu"), group.group_name)
    *_, gradients = embedding_gradients.exact(given)
    tables = embedding_updates.Tables.of(given, gradients.rows, gradients.exact)
    before = tables.error(tables.all)
    arguments = embedding_updates.arguments(given, tables, given.bags[0])
    FUSED_OPS[UPDATE].reference(FUSED_OPS[UPDATE].parse(arguments))
    return before, tables.error(tables.all)


def test_an_update_that_is_missing_is_noticed(ranks: Callable[[int], RankPool]) -> None:
    for before, after in ranks(2).run(_missed):
        assert before > 0.1
        assert after < ROUNDING
