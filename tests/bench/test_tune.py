"""Tuning: a table from rows that are known, and one run on real ranks, whose numbers are not looked at."""

import os
from pathlib import Path

import pytest
import torch

from autofuse import tune as tuning
from autofuse.bench.cpu.measure import Row
from autofuse.passes.choice.cost_model import Model, Numbers, Task
from autofuse.passes.choice.device_table import read, shipped

CPU = next(table for table in shipped() if table.device == "cpu")


def _row(task: Task, slower: float) -> Row:
    model = Model(CPU, os.cpu_count() or 1)
    fused, apart = (slower * f(task, Numbers()) for f in (model.fused, model.apart))
    return Row("row", task.world, apart, fused, "fused", 0.0, 0.0, None, 1, (task.key,))


def test_a_table_fits_its_rows_and_has_the_ranks_that_were_measured() -> None:
    rows = [
        _row(Task("matmul_all_reduce", 2, "float32", "direct", m * 4096, ((m, 1024, 1024),)), 3.0)
        for m in (1, 128, 1024)
    ]
    table = tuning.table_of(rows)
    assert (table.device, table.cores, table.name) == ("cpu", os.cpu_count(), "cpu, tuned")
    assert {key.split(".")[1] for key in table.constants if key.startswith("all_reduce.")} == {"2"}
    assert [point.task for point in table.points] == [row.tasks[0] for row in rows]
    text = tuning.comparison(table)
    assert len(text.splitlines()) == 1 + len(rows) + 1
    median = int(text.rsplit("median ", 1)[1].split("%")[0])
    assert median < 10


@pytest.mark.parametrize(
    ("ranks", "dtypes", "message"),
    [
        ([], ["float32"], "expected sizes of groups"),
        ([2, 1], ["float32"], r"ranks=\[2, 1\].*at least 2"),
        ([2], [torch.float64], "'float64' has no kernel; expected some of float32"),
        ([2], [], "expected at least one of float32"),
    ],
)
def test_bad_arguments(ranks: list[int], dtypes: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tuning.tune(ranks, dtypes)


@pytest.mark.full  # test_bench measures on real ranks, too
def test_real_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(tuning, "QUICK_ROWS", ("all_gather_matmul tokens=16 k=n=2048",))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    seen = []
    path = tmp_path / "folder" / "cpu.json"
    table = tuning.tune([2], [torch.float32], path, True, lambda *args: seen.append(args))
    assert seen == [("all_gather_matmul tokens=16 k=n=2048 dim=0, 2 ranks", 0, 1)]
    assert read(path).digest == table.digest
    (point,) = table.points
    assert Task.parse(point.task).matmuls == ((16, 2048, 1024),)
    assert [p.name for p in path.parent.iterdir()] == ["cpu.json"]
