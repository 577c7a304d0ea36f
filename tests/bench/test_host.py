"""`autofuse bench host` where there is no GPU: CPU ranks run every cell, and the table has every row."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import pytest
import torch

from autofuse.bench.gpu.host import cells as host_cells
from autofuse.bench.gpu.host import run as host_run
from tests.bench.exchange import MACHINE
from tests.ranks import RankPool

SMALL = {
    "HIDDEN": 32, "INTERMEDIATE": 32, "VOCABULARY": 64, "TABLES": 2, "ROWS": 10, "DIM": 8, "EXPERTS": 2,
    "WIDTH": 16, "DTYPE": torch.float32,
}  # fmt: skip


def _measured(rank: int, world: int, few: bool) -> list[dict[str, Any]]:
    """Rows of all cells; before that, ours and what it replaces have the same results."""
    found = []
    with (
        torch.no_grad(),
        patch.multiple(host_cells, **SMALL),
        patch.multiple(host_run, CALLS=2, SAMPLES=1, WARM_UP=0),
        patch.multiple(host_run, together=lambda what: what(), slowest=lambda value: value),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        every = host_cells.cells(world)
        for cell in [every[0], every[2]] if few else [every[1], *every[3:]]:  # a kind of calls is noted once
            torch.manual_seed(rank)
            given = [*cell.make(torch.device("cpu")), *cell.shared(torch.device("cpu"))]
            if cell.ours is not None:
                ours, replaced = cell.ours(given), cell.replaced(given)
                torch.testing.assert_close(ours.view(replaced.shape), replaced)
            found.append(asdict(host_run.measure(cell, torch.device("cpu"))))
    return found


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.full)])
def test_cells_run_and_are_fused(ranks: Callable[[int], RankPool], few: bool) -> None:
    rows = ranks(2).run(_measured, few)[0]
    assert len(rows) == (2 if few else 9)
    for row in rows:
        assert not row["failed"], row
        assert row["way"].startswith("plan, "), row
        eager = {"replaced eager"} if "norm" in row["name"] else {"ours eager", "replaced eager"}
        assert set(row["us"]) == eager | {"ours compiled", "replaced compiled"}
    table = host_run.report({"machine": MACHINE, "rows": rows})
    assert all(row["name"] in table for row in rows)
    assert "compiled: " not in table.partition("| ways")[2]


def test_a_call_that_fails_has_its_text_below_the_table() -> None:
    row = {"name": "op 8 tokens", "op": "op", "us": {"ours compiled": 10.0, "replaced compiled": 25.0}}
    rows = [{**row, "way": "words", "failed": {"ours eager": "no room"}}]
    table = host_run.report({"machine": MACHINE, "rows": rows})
    assert "| op 8 tokens | 10.0" in table
    assert "| 2.50 " in table
    assert "- op 8 tokens, ours eager: no room" in table
