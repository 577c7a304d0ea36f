"""`autofuse bench embedding` where there is no GPU: cells, limits, tables, errors on CPU ranks, mistakes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from autofuse.bench.gpu.embedding import peers as embedding_work
from autofuse.bench.gpu.embedding.cells import BACKWARD, OP, UPDATE, Cell, cells
from autofuse.bench.gpu.exchange.rows import Rates, Row, chosen
from autofuse.bench.gpu.exchange.table import report
from autofuse.lowering.gpu.choice.timing import Timing
from tests.bench.exchange import RATES, data_of, measured, reference
from tests.ranks import RankPool

TINY = Cell(8, 4, 3, 2, rows=50, dim=16)
MIXED = Cell(8, 8, 3, 2, "mixed", rows=500, dim=16)


def test_sizes_of_the_tables() -> None:
    assert Cell(512, 64, 10, 4).sizes == [(100_000, 256)] * 64
    assert MIXED.sizes[:3] == [(5, 4), (50, 4), (500, 8)]
    dims = [dim for _, dim in MIXED.sizes]
    assert dims == sorted(dims)
    assert MIXED.columns == 2 * (4 + 8 + 16 + 32)


@pytest.mark.parametrize(
    ("batch", "tables", "pooling", "limit_us"),
    [(512, 64, 1, 36.6), (512, 64, 70, 288.3), (2048, 256, 10, 712.8)],
)
def test_limit(batch: int, tables: int, pooling: int, limit_us: float) -> None:
    """Of the link where bags are small, else of the memory."""
    found = Cell(batch, tables, pooling, 4).limit(None, Rates(356.0, 4150.0))
    assert found == pytest.approx(limit_us, abs=0.1)


def test_the_cells() -> None:
    every = cells(4, quick=False)
    assert len(every) == len({cell.name for cell in every}) == 13 + 10 + 10
    assert [cell.op for cell in every] == [OP] * 13 + [BACKWARD] * 10 + [UPDATE] * 10
    quick = cells(4, quick=True)
    assert quick[3].name == f"{OP} batch=2048 tables=64 mixed pooling=10"
    for op, some in ((BACKWARD, quick[4:8]), (UPDATE, quick[8:])):
        assert [cell.name.removeprefix(op) for cell in some] == [
            cell.name.removeprefix(OP) for cell in quick[:4]
        ]
    assert [cell.pooling for cell in chosen(every, (f"{OP} batch=512 ",))] == [1, 10, 70]
    assert [cell.pooling for cell in chosen(every, (f"{BACKWARD} batch=512 ",))] == [1, 10, 70]
    with pytest.raises(ValueError, match="3 ranks cannot share out a batch of 512"):
        cells(3, quick=False)
    with pytest.raises(ValueError, match="no cell has one of"):
        chosen(every, ("batch=5 ",))


def _measured(rank: int, world: int, cell: Cell) -> dict[str, Any]:
    return measured(cell, embedding_work.work)


@pytest.mark.parametrize("cell", [TINY, MIXED], ids=str)
def test_all_variants_are_right(ranks: Callable[[int], RankPool], cell: Cell) -> None:
    row, _ = ranks(2).run(_measured, cell)
    kinds = {kind: row[kind] for kind in ("compute", "parts", "peers")} | {"ours": {"auto": row["ours"]}}
    names = {kind: list(timings) for kind, timings in kinds.items()}
    assert names["compute"] == ["per table", "merged"]
    assert names["parts"] == ["all-to-all", "pack", "unpack"]
    assert names["peers"] == ["per table+nccl", "merged+nccl"]
    errors = [timing["error"] for timings in kinds.values() for timing in timings.values()]
    assert all(0 < error < 4e-3 for error in errors), row
    assert (row["way"], row["ways"]) == ("reference", {})
    assert Row.from_json(json.loads(json.dumps(row)), Cell).cell == cell


def _wrong(rank: int, world: int) -> tuple[float, float, str]:
    group = dist.group.WORLD
    assert group is not None
    given = embedding_work.operands(TINY, torch.device("cpu"), group.group_name)
    auto = embedding_work.work(TINY, torch.device("cpu"), group.group_name).variants["ours"]["auto"]
    y = auto.call(0)
    with pytest.raises(RuntimeError) as caught:
        auto.error(y[1:])
    other = embedding_work.peers(given)["merged+nccl"](given.bags[0])  # of other tables
    return auto.error(y.roll(1, 1)), auto.error(other), str(caught.value)


def test_wrong_results_are_noticed(ranks: Callable[[int], RankPool]) -> None:
    for shifted, other, text in ranks(2).run(_wrong):
        assert min(shifted, other) > 1
        assert text == "expected a result of shape (4, 128), got (3, 128)"


def _reference(rank: int, world: int) -> float:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(rank)
    given = embedding_work.operands(MIXED, torch.device("cpu"), group.group_name)
    torch.manual_seed(rank)  # the same again
    auto = embedding_work.work(MIXED, torch.device("cpu"), group.group_name).variants["ours"]["auto"]
    return reference(OP, embedding_work.arguments(given, given.bags[0]), auto)


def test_what_runs_without_a_kernel_is_right(ranks: Callable[[int], RankPool]) -> None:
    assert max(ranks(2).run(_reference)) < 4e-3


def test_the_table() -> None:
    row = Row(
        cell=Cell(512, 64, 70, 4),
        rates=RATES,
        compute={"per table": Timing(1791.0), "merged": Timing(1086.0)},
        parts={"all-to-all": Timing(67.0), "pack": Timing(20.0), "unpack": Timing(20.0)},
        peers={"per table+nccl": Timing(1900.0, error=2e-3), "merged+nccl": Timing(1200.0, error=2e-3)},
        ours=Timing(600.0, error=1e-3),
        way="reference",
        ways={"rows": Timing(500.0), "bags": Timing(failed="RuntimeError: no such kernel")},
    )
    text = report(data_of("embedding", [json.loads(json.dumps(row.to_json()))]))
    assert "links 356 GB/s (measured), memory 4150 GB/s read and written. Microseconds" in text
    assert "A note." in text
    lines = [
        [c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line[0:1] == "|"
    ]
    named = dict(zip(lines[0], lines[2], strict=True))
    assert (named["tables a GPU"], named["merged alone"], named["all-to-all alone"]) == (
        "64",
        "1086.0",
        "67.0",
    )
    assert (named["best peer"], named["ours"], named["way"]) == ("1200.0", "600.0", "reference")
    assert (named["speed-up"], named["limit"], named["share of limit"]) == ("2.00", "288.3", "48%")
    assert (named["by best way"], named["error merged+nccl"], named["error ours"]) == (
        "1.20",
        "2.0e-03",
        "1.0e-03",
    )
    assert "- all: 1 of 1 cells, worst 2.00x (batch 512, tables a GPU 64, pooling 70)" in text
    assert f"{row.cell.name}, ways bags: RuntimeError: no such kernel" in text


MISTAKES = {
    "tuning in a hurry": (["--tune", "--quick"], {}, "--tune --quick: tuning takes times of all ways"),
    "no torchrun": ([], {}, "start `torchrun --nproc-per-node 4 -m autofuse bench embedding`"),
    "no folder": (["--json", "/no/such/a.json"], {}, "no folder /no/such"),
    "no GPU": ([], {"LOCAL_RANK": "99", "WORLD_SIZE": "100"}, "rank 99 has no GPU"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from autofuse.cli.app import app

    arguments, environment, text = MISTAKES[name]
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    result = CliRunner().invoke(app, ["bench", "embedding", *arguments])
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())
