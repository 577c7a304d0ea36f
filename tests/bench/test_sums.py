"""`autofuse bench sums` where there is no GPU: cells, limits, a table, errors on CPU ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autofuse.bench.gpu.exchange.rows import Rates
from autofuse.bench.gpu.exchange.table import report
from autofuse.bench.gpu.sums.cells import REDUCE, SCATTER, Cell, cells
from autofuse.bench.gpu.sums.peers import work
from tests.bench.exchange import data_of, measured
from tests.ranks import RankPool

EXPERTS = Cell(REDUCE, "experts", "tiny", 8, 16, 2, depth=32, experts=4, top=2)
VOCABULARY = Cell(REDUCE, "vocabulary", "tiny", 8, 16, 2, tables=1, pooling=1, table_rows=20)
TABLES = Cell(REDUCE, "tables", "pooling=3", 8, 32, 2, tables=2, pooling=3, table_rows=20)
PRODUCTS = [Cell(REDUCE, "product", stage, 8, 16, 2, depth=32) for stage in ("bias", "scale", "residual")]
CELLS = [
    replace(cell, op=op) for cell in (EXPERTS, TABLES, VOCABULARY, *PRODUCTS) for op in (REDUCE, SCATTER)
]


def test_the_cells() -> None:
    every = cells(4, quick=False)
    assert len(every) == len({cell.name for cell in every}) == 2 * (3 * 4 + 3 + 3 * 4 + 2 * 4)
    assert [cell.name for cell in cells(2, quick=True)][:3] == [
        f"{REDUCE} experts mixtral rows=128",
        f"{REDUCE} experts mixtral rows=1024",
        f"{REDUCE} tables pooling=1 rows=512",
    ]
    with pytest.raises(ValueError, match="3 ranks cannot share out"):
        cells(3, quick=False)


@pytest.mark.parametrize(
    ("op", "compute_us", "limit_us"), [(REDUCE, 10.0, 38.0), (SCATTER, 10.0, 19.0), (REDUCE, 100.0, 102.6)]
)
def test_limit(op: str, compute_us: float, limit_us: float) -> None:
    """Of the link, or of what comes before."""
    cell = Cell(op, "experts", "mixtral", 1024, 4096, 4, depth=14336, experts=8, top=2)
    assert cell.limit(compute_us, Rates(356.0, 4150.0)) == pytest.approx(limit_us, abs=0.1)
    assert cell.limit(None, Rates(356.0, 4150.0)) is None


def _measured(rank: int, world: int) -> list[dict[str, Any]]:
    return [measured(cell, work) for cell in CELLS]


def test_every_variant_is_right(ranks: Callable[[int], RankPool]) -> None:
    rows = json.loads(json.dumps(ranks(2).run(_measured, timeout=120)[0]))
    for row in rows:
        timings = [row["ours"], *row["peers"].values(), *row["compute"].values()]
        assert len(timings) == 3
        assert all(timing["error"] < 2e-2 for timing in timings), row
    text = report(data_of("sums", rows))
    assert f"### {REDUCE}, 2 GPUs" in text
    assert text.count("experts tiny") >= 2
