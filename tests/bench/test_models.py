"""`autofuse bench models` on CPU ranks: every variant of tiny models, rows, tables, what fails."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import autofuse
from autofuse.bench.models import run as models_run
from autofuse.bench.models.rows import Measured, Row
from autofuse.bench.models.run import OUT_OF_TIME, Options, begun, chosen, measure
from autofuse.bench.models.table import report
from autofuse.bench.models.variants import VARIANTS
from autofuse.bench.models.work import Cell, Work
from autofuse.lowering import torch_internals
from autofuse.lowering.gpu.choice import timer
from autofuse.lowering.gpu.choice.timing import Effort
from autofuse.options import resolve
from tests.ranks import RankPool

CPU = torch.device("cpu")
MACHINE = {"world": 2, "gpu": "CPU", "torch": "2"}


_shot: list[bool] = []


def _summed(x: torch.Tensor, group: str, once: bool) -> torch.Tensor:
    _shot.append(once)
    total = x.clone()
    dist.all_reduce(total, group=torch_internals.resolve_group(group))
    return total


def _measured(
    rank: int,
    world: int,
    rows: tuple[str, ...],
    seconds: float,
    variants: tuple[str, ...],
    layers: int = 2,
) -> Any:
    """Rows of tiny models, of these variants; torch's symmetric memory is played by gloo."""
    found = []
    with (
        patch.multiple(
            torch_internals,
            symmetric_empty=lambda size, dtype, device: torch.empty(size, dtype=dtype),
            symmetric_views=lambda own, group: [own],
            symmetric_all_reduce=_summed,
            symmetric_all_reduce_into=lambda out, x, group: out.copy_(_summed(x, group, False)),
        ),
        patch("autofuse.bench.gpu.host.run.SAMPLES", 1),
        patch.object(timer, "WARM_UP_US", 0.0),
        patch.object(
            Cell,
            "variants",
            property(lambda cell: (*variants, *(cell.others if "inductor" in variants else ()))),
        ),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch_internals.compiling_variants(),
        autofuse.config.patch(timeout_s=20.0),
    ):
        for cell in chosen(Options(rows, quick=True, layers=(layers, 4)), world):
            row = measure(cell, CPU, Effort(rounds=1, sample_us=1.0), time.monotonic() + seconds)
            found.append({**row.to_json(), "shots": sorted(set(_shot))})
            _shot.clear()
            models_run.cleared()
    return found


@pytest.mark.parametrize("variant", ["autofuse", "ceiling"])
def test_a_model_goes_through(ranks: Callable[[int], RankPool], variant: str) -> None:
    rows = ranks(2).run(_measured, ("decode 4",), 50.0, ("eager", variant), 1)[0]
    (row,) = map(Row.from_json, rows)
    assert row.complete
    for name in ("eager", variant):
        measured = row.variants[name]
        assert not measured.failed
        assert measured.us
        assert measured.host_us
        assert measured.error is None if name == "ceiling" else (measured.error or 1.0) < 1e-5
    assert sum(row.sites["states"].values()) == (2 if variant == "autofuse" else 0)
    assert row.name in report({"machine": MACHINE, "rows": rows})


@pytest.mark.full
def test_all_models(ranks: Callable[[int], RankPool]) -> None:
    rows = ranks(2).run(_measured, (), 600.0, ("eager", "inductor", "autofuse", "ceiling"), timeout=600.0)[0]
    assert len(rows) == 7
    for row in map(Row.from_json, rows):
        assert not {name: each.failed for name, each in row.variants.items() if each.failed}, row.name
        assert row.sites["states"].get("fused"), row
        worst = max(each.error or 0.0 for each in row.variants.values())
        assert worst < (1e-2 if "moe" in row.name else 1e-5), row
    with_shots = [row["name"] for row in rows if row["shots"] == [False, True]]
    assert with_shots == ["tiny x 2 decode 4", "tiny x 2 prefill 64", "tiny x 2 train tp 64"]


def test_what_fails_or_comes_too_late_is_in_the_row(ranks: Callable[[int], RankPool]) -> None:
    (row,) = ranks(2).run(_measured, ("decode 4",), -1.0, ("eager", "autofuse"))[0]
    assert {each["failed"] for each in row["variants"].values()} == {OUT_OF_TIME}
    assert not row["complete"]
    row = ranks(2).run(_wrong)[0]
    assert "the result is wrong" in row["variants"]["eager"]["failed"]
    assert "no room" in row["variants"]["autofuse"]["failed"]
    assert row["complete"]


def _wrong(rank: int, world: int) -> Any:
    def forward(wrong: bool) -> torch.Tensor:
        return torch.ones(2)

    def step(call: Any) -> list[torch.Tensor]:
        if call is not forward and rank:
            raise RuntimeError("no room")
        return [call(True)]

    cell = Cell("bad", lambda device: Work(forward, step, lambda: [torch.zeros(2) + 3]))
    with patch.object(Cell, "variants", ("eager", "autofuse")):
        row = measure(cell, CPU, Effort(1, 1.0), time.monotonic() + 50)
    return row.to_json()


def _no_reference(rank: int, world: int) -> Any:
    def exact() -> list[torch.Tensor]:
        raise RuntimeError("no memory")

    def step(call: Any) -> list[torch.Tensor]:
        return [call(torch.ones(2))]

    cell = Cell("odd", lambda device: Work(torch.neg, step, exact))
    with patch.object(Cell, "variants", ("eager",)), patch.object(timer, "WARM_UP_US", 0.0):
        row = measure(cell, CPU, Effort(1, 1.0), time.monotonic() + 50)
    return row.to_json()


def test_without_a_reference_there_are_times(ranks: Callable[[int], RankPool]) -> None:
    row = ranks(2).run(_no_reference)[0]
    assert "no memory" in row["exact_failed"]
    assert row["variants"]["eager"]["us"]
    assert "- odd, errors: RuntimeError: no memory" in report({"machine": MACHINE, "rows": [row]})


def test_options_of_ours_exist() -> None:
    resolve(None, VARIANTS["autofuse"].options)


def test_names_of_cells() -> None:
    def names(*rows: str) -> list[str]:
        return [cell.name for cell in chosen(Options(rows), 2)]

    assert len(names()) == len(set(names())) == 3 * (4 + 3 + 4) + 3
    assert names("decode 1", "llama70b x 20 decode") == [
        *(f"{model} x 20 decode 1" for model in ("llama70b", "llama8b", "qwen32b")),
        *(f"llama70b x 20 decode {count}" for count in (64, 16, 256)),
    ]
    with pytest.raises(ValueError, match="no cell is named like llama9b"):
        chosen(Options(("llama9b",)), 2)
    with pytest.raises(ValueError, match="3 ranks cannot share out"):
        chosen(Options(), 3)


ROW = Row(
    "a x 20 decode 1",
    {
        "eager": Measured(us=200.0, graph_us=120.0, error=0.01),
        "inductor": Measured(us=100.0, graph_us=90.0, error=0.01),
        "two-shot": Measured(us=150.0, graph_us=80.0),
        "autofuse": Measured(us=80.0, graph_us=70.0, error=0.01),
        "ceiling": Measured(us=60.0, graph_us=60.0),
        "one-shot": Measured(failed="no memory"),
    },
    {"kept": {"all_to_all: layout: for reasons": 2}},
)


def test_shares_and_table() -> None:
    assert ROW.best_other("us") == ("inductor", 100.0)
    assert ROW.best_other("graph_us") == ("two-shot", 80.0)
    assert (ROW.share("us"), ROW.share("graph_us")) == (0.5, 0.5)
    nothing = replace(ROW, variants={**ROW.variants, "ceiling": Measured(us=100.0)})
    assert (nothing.share("us"), nothing.share("graph_us"), nothing.speedup("us")) == (None, None, 1.25)
    assert Row.from_json(json.loads(json.dumps(ROW.to_json()))) == ROW
    text = report({"machine": MACHINE, "rows": [ROW.to_json()]})
    assert "| inductor   | 1.25" in text
    assert "| two-shot   | 1.14" in text
    assert "share 0.50" in text
    assert "- a x 20 decode 1, one-shot: no memory" in text
    assert "2 x all_to_all: layout: for reasons" in text


def _begun(rank: int, world: int, file: Path) -> Any:
    return begun(Options(device="cpu"), file)


def test_a_file_is_gone_on_with(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    data = ranks(2).run(_begun, file)[0]
    assert data["rows"] == []
    file.write_text(json.dumps({**data, "rows": [ROW.to_json()]}))
    assert ranks(2).run(_begun, file)[0]["rows"][0]["name"] == ROW.name
    file.write_text(json.dumps({"machine": {**data["machine"], "world": 4}, "rows": []}))
    with pytest.raises(Exception, match="was measured on"):
        ranks(2).run(_begun, file)
