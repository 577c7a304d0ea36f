"""The benchmark of optimizers runs, all peers agree with ours, and its table names the best of torch's."""

from collections.abc import Callable
from math import prod

import pytest
import torch

import autofuse
from autofuse.bench.optimizer.cells import CELLS, FEW_BUCKETS
from autofuse.bench.optimizer.rows import ALONE, OURS, WRITTEN, Options, Row, table
from autofuse.bench.optimizer.run import _measure
from autofuse.bench.optimizer.training import TRAINING
from tests.ranks import RankPool


def _rows(rank: int, world: int, cell: str, rule: str, dtype: str) -> Row:
    options = Options((), (dtype,), True, 0.0)
    return _measure(cell, CELLS[cell], rule, dtype, options, torch.device("cpu"))


# Inductor takes a minute to compile LAMB for 64 tensors.
@pytest.mark.parametrize(
    ("cell", "rule", "dtype", "peers"),
    [("64 of 2^10", "AdamW", "bfloat16", 5), ("2^10", "LAMB", "float32", 2)],
)
def test_a_row(ranks: Callable[[int], RankPool], cell: str, rule: str, dtype: str, peers: int) -> None:
    (row, other) = ranks(2).run(_rows, cell, rule, dtype)
    assert row == other
    assert row.elements == sum(map(prod, CELLS[cell]))
    assert len(row.us) == 1 + peers
    assert all(us > 0 for us in row.us.values())


def _training(rank: int, world: int) -> Row:
    options = Options((), ("float32",), False, 0.0, training=True)
    ((name, sizes),) = TRAINING.items()
    return _measure(name, sizes, "AdamW", "float32", options, torch.device("cpu"))


def test_a_training_step(ranks: Callable[[int], RankPool]) -> None:
    """Parameters of both of ours and of DDP agree. What has no exchange is not the best of torch's."""
    (row, _) = ranks(2).run(_training)
    assert list(row.us) == [OURS, f"{OURS} in the backward", "DDP", "FSDP2", ALONE]
    assert row.best[0] in ("DDP", "FSDP2")


def _written(rank: int, world: int, cell: str, dtype: str) -> tuple[Row, list[str]]:
    options = Options((), (dtype,), False, 0.0, written=True)
    with autofuse.debug() as report:
        row = _measure(cell, FEW_BUCKETS[cell], WRITTEN, dtype, options, torch.device("cpu"))
    return row, [site.pattern or "" for site in report.fused]


@pytest.mark.parametrize(
    ("cell", "dtype", "flat"),
    [("2^10", "bfloat16", False), pytest.param("8 of 2^15", "float32", True, marks=pytest.mark.full)],
)
def test_a_step_in_tensor_ops(ranks: Callable[[int], RankPool], cell: str, dtype: str, flat: bool) -> None:
    """All peers have the parameters of AdamW in float64, and ours is fused."""
    (row, fused), other = ranks(2).run(_written, cell, dtype, timeout=200)
    assert (row, fused) == other
    assert fused == ["all_reduce_update"] * len(FEW_BUCKETS[cell])
    assert list(row.us) == [OURS, "Inductor", *["Inductor, one flat all_reduce"] * flat]


def test_the_table() -> None:
    row = Row("2^10", "AdamW", "float32", 2, 1024, {OURS: 100.0, "one": 400.0, "two": 250.0})
    assert row.best == ("two", 2.5)
    assert "| 2 | AdamW | float32 | 2^10 | 100 | 400 | 250 | 2.50 (two) |  |" in table([row])
