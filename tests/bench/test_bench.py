"""The benchmark runs end to end on real ranks; its numbers are not looked at, its errors are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autofuse.bench.cpu.measure import Row
from autofuse.bench.cpu.table import geometric_mean, table


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(["matmul_all_reduce tokens=1 k=n=2048"], id="dense", marks=pytest.mark.full),
        pytest.param(
            ["matmul_all_reduce tokens=1 k=n=2048", "experts tokens=128 hidden=512"],
            id="both",
            marks=pytest.mark.full,
        ),
    ],
)
def test_rows_are_measured_and_written(rows: list[str], tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "autofuse", "bench", "--device", "cpu", "--ranks", "2", "--policy", "always"),
        *("--repeats", "1", "--seconds", "0", *(text for row in rows for text in ("--rows", row))),
        *("--json", str(tmp_path / "rows.json"), "--table", str(tmp_path / "table.md")),
    ]
    env = {**os.environ, "AUTOFUSE_TIMEOUT_S": "30", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    # Torch for CUDA mentions that this machine has none.
    assert [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line] == []
    measured = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in measured["rows"]] == rows
    for row in measured["rows"]:
        assert row["fused"] == "fused"
        assert 0 < row["autofuse_error"] < 5e-6
        assert 0 < row["inductor_error"] < 5e-6
    assert (tmp_path / "table.md").read_text() == done.stdout


@pytest.mark.full
def test_an_unknown_row_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autofuse", "bench", "--ranks", "2", "--rows", "no such row"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "no row has one of ['no such row'] in its name" in done.stderr


def _row(name: str, world: int, inductor_us: float, autofuse_us: float) -> Row:
    return Row(name, world, inductor_us, autofuse_us, "fused", 1e-7, 1e-7, None, 5)


def test_totals_of_every_world_and_of_all() -> None:
    text = table([_row("a", 2, 400, 100), _row("b", 2, 100, 100), _row("c", 4, 50, 100)])
    assert "2 ranks: 2 rows, geometric mean 2.00x, minimum 1.00x (b)" in text
    assert "4 ranks: 1 rows, geometric mean 0.50x, minimum 0.50x (c)" in text
    assert "all: 3 rows, geometric mean 1.26x, minimum 0.50x (c)" in text


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
