"""The benchmark of optimizers runs, all peers agree with ours, and its table names the best of torch's."""

from collections.abc import Callable

import pytest
import torch

from autofuse.bench.optimizer.cells import CELLS
from autofuse.bench.optimizer.rows import OURS, Options, Row, table
from autofuse.bench.optimizer.run import _measure
from tests.ranks import RankPool


def _rows(rank: int, world: int, rule: str, dtype: str) -> Row:
    options = Options((), (dtype,), True, 0.0)
    return _measure("64 of 2^10", CELLS["64 of 2^10"], rule, dtype, options, torch.device("cpu"))


@pytest.mark.parametrize(("rule", "dtype"), [("AdamW", "bfloat16"), ("LAMB", "float32")])
def test_a_row(ranks: Callable[[int], RankPool], rule: str, dtype: str) -> None:
    (row, other) = ranks(2).run(_rows, rule, dtype)
    assert row == other
    assert row.elements == 1 << 16
    assert len(row.us) == (6 if rule == "AdamW" else 3)
    assert all(us > 0 for us in row.us.values())


def test_the_table() -> None:
    row = Row("2^10", "AdamW", "float32", 2, 1024, {OURS: 100.0, "one": 400.0, "two": 250.0})
    assert row.best == ("two", 2.5)
    assert "| 2 | AdamW | float32 | 2^10 | 100 | 400 | 250 | 2.50 (two) |  |" in table([row])
