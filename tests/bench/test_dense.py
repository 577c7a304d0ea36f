"""The GPU benchmark where there is no GPU: its cells, limits, tables and mistakes on the command line."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from autofuse.bench.gpu.dense.cells import OPS, SHAPES, WEIGHTS, Cell, Row, Sweep, cells, check, ops_of
from autofuse.bench.gpu.dense.table import report
from autofuse.lowering.gpu.choice.timing import Timing, calls_for

O_PROJ, DOWN_PROJ, LM_HEAD = "llama70b.o_proj", "llama70b.down_proj", "llama70b.lm_head"
MACHINE = {"gpu": "GPU", "world": 4, "torch": "2.11", "cuda": "13.0", "triton": "3.6", "nccl": "2.28"}


def test_sizes_of_the_matmul_on_a_rank() -> None:
    reduce = Cell("matmul_all_reduce", DOWN_PROJ, 512, 4)
    gather = Cell("all_gather_matmul", DOWN_PROJ, 512, 4)
    assert (reduce.m, reduce.k, reduce.n) == (512, 7168, 8192)
    assert (gather.m, gather.k, gather.n) == (512, 8192, 7168)
    assert reduce.exchanged == gather.exchanged == 512 * 8192
    logits = Cell("matmul_all_gather", LM_HEAD, 512, 4)
    assert (logits.m, logits.k, logits.n, logits.exchanged) == (512, 8192, 32064, 512 * 128256)


def test_logits_have_shapes_of_their_own() -> None:
    found = cells(4, LM_HEAD, (1, 512, 8192), ops_of(LM_HEAD, ()))
    assert [(c.op, c.tokens) for c in found] == [("matmul_all_gather", 512), ("matmul_all_gather", 1)]


def test_any_size_is_a_shape() -> None:
    size = "14336,4096"  # K,N
    assert ops_of(size, ()) == ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")
    assert [(c.m, c.k, c.n) for c in cells(4, size, (8,), OPS)] == [
        (8, 3584, 4096), (8, 3584, 4096), (8, 4096, 3584), (8, 14336, 1024),
    ]  # fmt: skip
    for op in OPS:  # as the shape of a model of the same extents
        cell = Cell(op, "28672,8192", 512, 4)
        named = replace(cell, shape=DOWN_PROJ)
        assert (cell.m, cell.k, cell.n, cell.exchanged) == (named.m, named.k, named.n, named.exchanged)
        assert sum(op in alike for alike in WEIGHTS) == 1
    check("14336,4095", 4)
    with pytest.raises(ValueError, match="14336,4095: 4 ranks cannot share out N = 4095"):
        check("14336,4095", 4, ("matmul_all_gather",))


@pytest.mark.parametrize(
    ("op", "tokens", "compute_us", "limit_us"),
    [
        ("matmul_all_reduce", 8192, 369.4, 568.1),
        ("matmul_all_reduce", 512, 25.1, 37.9),
        ("matmul_reduce_scatter", 8192, 369.4, 370.7),
        ("matmul_all_reduce", 1, 10.9, 13.5),
        ("all_gather_matmul", 128, 11.9, 13.2),
    ],
)
def test_limit(op: str, tokens: int, compute_us: float, limit_us: float) -> None:
    assert Cell(op, O_PROJ, tokens, 4).limit(compute_us, 356.0) == pytest.approx(limit_us, abs=0.1)


def test_rows_that_cannot_be_shared_out_are_reduced_only() -> None:
    found = [cell for ops in WEIGHTS[:2] for cell in cells(4, O_PROJ, (1, 8), ops)]
    assert [(c.op, c.tokens) for c in found] == [
        ("matmul_all_reduce", 8),
        ("matmul_reduce_scatter", 8),
        ("matmul_all_reduce", 1),
        ("all_gather_matmul", 8),
    ]


def test_a_world_that_does_not_divide_k() -> None:
    with pytest.raises(ValueError, match="3 ranks cannot share out K = 8192"):
        check(O_PROJ, 3)
    with pytest.raises(ValueError, match="5 ranks cannot share out N = 128256"):
        check(LM_HEAD, 5)
    for shape in SHAPES:
        check(shape, 8)


def test_short_calls_are_many_in_a_graph() -> None:
    assert calls_for(Cell("matmul_all_reduce", O_PROJ, 1, 4).roughly_us) == 10
    assert calls_for(Cell("matmul_all_reduce", "llama405b.down_proj", 8192, 4).roughly_us) == 2


def _row(op: str, shape: str, tokens: int, ours_us: float | None, peer_us: float = 200.0) -> Row:
    return Row(
        cell=Cell(op, shape, tokens, 4),
        link_gb_per_s=356.0,
        compute={"cublas": Timing(100.0), "tiles 128x256": Timing(80.0)},
        peers={"cublas+nccl": Timing(250.0, error=2e-3), "async_tp": Timing(peer_us, eager=True)},
        ours=Timing(ours_us, error=1.5e-3) if ours_us else Timing(failed="RuntimeError: no such kernel"),
        way="tiles 128x256x64",
        ways={"tiles 128x256x64": Timing(100.0), "parts": Timing(failed="RuntimeError: no such kernel")},
        predicted_fused_us=50.0,
        predicted_apart_us=300.0,
    )


def _data(**parts: list[Any]) -> dict[str, Any]:
    measured = {kind: [p.to_json() for p in parts.get(kind, [])] for kind in ("rows", "orders", "programs")}
    data = {"machine": MACHINE, "settings": {"dtype": "bfloat16"}, "link_gb_per_s": 356.0, "link_failed": ""}
    data["link_rates"] = {"out": 356.0, "in": 350.0}
    written: dict[str, Any] = json.loads(json.dumps({**data, **measured}))
    return written


def test_what_follows_from_a_row() -> None:
    row = _row("matmul_reduce_scatter", O_PROJ, 128, 125.0)
    assert row.compute_us == 80.0
    assert row.limit_us == pytest.approx(81.3)
    assert row.speedup == pytest.approx(1.6)
    assert row.share == pytest.approx(81.3 / 125)
    assert row.missed == pytest.approx(1.25)
    assert row.factor == pytest.approx(2.5)
    assert replace(row, way="cublas+nccl").factor == pytest.approx(125 / 300)
    assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_the_tables() -> None:
    rows = [
        _row("matmul_reduce_scatter", DOWN_PROJ, 2048, 250.0),
        _row("matmul_reduce_scatter", O_PROJ, 128, 100.0),
        _row("matmul_reduce_scatter", O_PROJ, 8, 50.0),
        _row("all_gather_matmul", O_PROJ, 8, None),
    ]
    text = report(_data(rows=rows))
    assert (
        "4 x GPU, bfloat16, torch 2.11, Triton 3.6, NCCL 2.28, links 356 GB/s (measured, out 356, in 350)"
        in text
    )
    assert "### matmul_reduce_scatter, 4 GPUs" in text
    assert "### matmul_all_reduce" not in text
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if "proj" in line]
    named = [dict(zip(_header(text), line, strict=True)) for line in lines if len(line) > 3]
    assert [(cells["shape"], cells["tokens"]) for cells in named] == [
        (DOWN_PROJ, "2048"),
        (O_PROJ, "8"),
        (O_PROJ, "128"),
        (O_PROJ, "8"),
    ]
    first, decode, _, failed = named
    assert (first["async_tp"], first["ours"], first["speed-up"]) == ("200.0*", "250.0", "0.80")
    assert (decode["share of limit"], decode["factor"], decode["error ours"]) == ("163%", "1.00", "1.5e-03")
    assert (failed["ours"], failed["speed-up"], failed["share of limit"]) == ("failed", "-", "-")
    assert f"all: 3 of 3 cells, worst 0.80x ({DOWN_PROJ}, 2048 tokens); geometric means: 1.86x" in text
    assert f"decode ({O_PROJ}, at most 32 tokens): 1 of 1 cells, worst 4.00x" in text
    assert "all: none of 1 cells has both times" in text
    assert "matmul_reduce_scatter llama70b.down_proj tokens=2048, ways parts and 4 more: RuntimeError" in text


def _header(text: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith("| shape"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_sweeps() -> None:
    cell = Cell("matmul_all_reduce", O_PROJ, 2048, 4)
    orders = Sweep(
        cell, "tiles", {"direct": Timing(100.0, skew_us=1.0), "oblivious": Timing(150.0, skew_us=20.0)}
    )
    programs = Sweep(cell, "tiles", {"66": Timing(180.0), "132": Timing(failed="too many")})
    text = report(_data(orders=[orders], programs=[programs]))
    assert "direct | oblivious | direct skew | oblivious skew" in text
    assert "100.0  | 150.0     | 1.0         | 20.0" in text
    assert "66 programs | 132 programs" in text
    assert f"{cell.name}, tiles, 132: too many" in text


def test_runs_of_several_worlds_are_put_one_below_the_other() -> None:
    other = _data(rows=[_row(OPS[0], O_PROJ, 8, 50.0)])
    other["machine"]["world"] = 8
    text = report(_data(rows=[_row(OPS[0], O_PROJ, 8, 50.0)]), other)
    assert text.index("matmul_all_reduce, 4 GPUs") < text.index("matmul_all_reduce, 8 GPUs")


MISTAKES = {
    "no torchrun": ([], {}, "this process is no rank of torchrun"),
    "unknown shape": (["--shapes", "llama"], {}, "--shapes 'llama': expected one of llama70b.o_proj"),
    "no size": (["--size", "8192"], {}, "--size: expected K,N such as 8192,8192, got '8192'"),
    "unknown op": (["--op", "mm"], {}, "--op 'mm': expected one of matmul_all_reduce"),
    "no tokens": (["--tokens", "0"], {}, "--tokens"),
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
    result = CliRunner().invoke(app, ["bench", "dense", *arguments])
    assert result.exit_code == 2
    assert text in result.stderr
