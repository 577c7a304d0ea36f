"""The benchmark of schedules: each does what its name says, all agree, and the table names the fastest."""

from collections.abc import Callable

from autofuse.bench.schedules import INDUCTOR, Options, Row, _measure, table
from autofuse.passes.schedules.schedule import SCHEDULES
from tests.ranks import RankPool


def _rows(rank: int, world: int) -> Row:
    return _measure("layer", 8, "float32", Options(32, 1.0, (8,), ("float32",), (), 0.0))


def test_a_row(ranks: Callable[[int], RankPool]) -> None:
    row, other = ranks(2).run(_rows, timeout=180)
    assert row == other
    assert list(row.us) == [INDUCTOR, *SCHEDULES]
    assert row.did["unchanged"] == "matmul_all_reduce, matmul_all_reduce"
    assert row.did["split"] == ", ".join(2 * ["matmul_reduce_scatter", "all_gather_matmul"])


def test_the_table() -> None:
    row = Row("piece", 2, 64, "float32", {INDUCTOR: 400.0, "auto": 250.0, "split": 200.0}, {})
    assert "| 2 | float32 | piece | 64 | 400 | 250 | **200** | 1.60 |" in table([row])
