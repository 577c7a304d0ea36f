"""The benchmark of schedules: each does what its name says, all agree, rows are kept, the table names the
fastest."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from autofuse.bench import schedules
from autofuse.bench.models.variants import VARIANTS
from autofuse.bench.pieces import INDUCTOR, Layer, Piece, Way, Weights, ways
from autofuse.bench.schedules import Options, Row, resumed, table
from autofuse.lowering.gpu.choice.timing import Effort, Timing
from autofuse.options import resolve
from autofuse.passes.schedules.schedule import SCHEDULES
from tests.ranks import RankPool


def _few(model: Piece | Layer, tokens: int, on_gpus: bool) -> dict[str, Way]:
    """All ways of a layer; of a piece those that a layer does not have, and Inductor."""
    found = ways(model, tokens, on_gpus)
    return found if isinstance(model, Layer) else {name: found[name] for name in (INDUCTOR, "sliced")}


def _rows(rank: int, world: int, file: str) -> tuple[list[Row], list[Row], str]:
    options = Options((32,), (1.0,), (8,), ("float32",), (), 0.0)
    with patch.object(schedules, "ways", _few):
        first = resumed(options, math.inf, {"rows": []}, Path(file))
    before = Path(file).read_text() if rank == 0 else ""
    with patch.object(schedules, "_measure", side_effect=AssertionError("measured again")):
        again = resumed(options, math.inf, {"rows": [row.to_json() for row in first]}, None)
    return first, again, before


@pytest.mark.full
def test_rows(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    (rows, again, text), (others, _, _) = ranks(2).run(_rows, str(tmp_path / "rows.json"), timeout=240)
    assert rows == others == again == [Row.from_json(row) for row in json.loads(text)["rows"]]
    piece, layer = rows
    assert list(piece.us) == [INDUCTOR, "sliced"]
    assert not piece.failed
    assert list(layer.us) == [INDUCTOR, *SCHEDULES]
    assert not layer.failed
    assert layer.did["unchanged"] == "matmul_all_reduce, matmul_all_reduce"
    assert layer.did["split"] == ", ".join(2 * ["matmul_reduce_scatter", "all_gather_matmul"])


def _rows_of_gpus(rank: int, world: int, file: str) -> tuple[list[Row], list[list[float]]]:
    """With CPU tensors, and times of a GPU that the test makes up. Also what calls have returned."""
    returned: list[list[float]] = []

    def timed(calls: dict[str, Callable[[int], Any]], count: int, effort: Effort) -> dict[str, Timing]:
        returned.append([float(calls["auto"](i)[0].sum()) for i in range(3)])
        us = {name: Timing(us=100.0 + i) for i, name in enumerate(calls)}
        return us | {"unchanged": Timing(us=1.0, eager=True), "split": Timing(failed="no memory")}

    def few(model: Piece | Layer, tokens: int, on_gpus: bool) -> dict[str, Way]:
        assert on_gpus
        found = ways(model, tokens, False)
        kept = [INDUCTOR, "auto", "unchanged", "split"] if isinstance(model, Layer) else [INDUCTOR, "auto"]
        return {name: found[name] for name in kept} | {"broken": Way(_Broken(), VARIANTS[INDUCTOR])}

    options = Options((32,), (1.0,), (8,), ("float32",), (), 0.0, device="cuda")
    fakes = {"ways": few, "time_all": timed, "_device": lambda options: torch.device("cpu")}
    with patch.multiple(schedules, **fakes), patch("autofuse.bench.pieces.copies_of", return_value=2):
        rows = resumed(options, math.inf, {"rows": []}, Path(file))
    return rows, returned


class _Broken(torch.nn.Module):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
        raise ValueError("no such kernel")


def test_rows_of_gpus(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    (rows, returned), _ = ranks(2).run(_rows_of_gpus, str(tmp_path / "rows.json"), timeout=240)
    piece, layer = rows
    assert piece.us == {INDUCTOR: 100.0, "auto": 101.0}
    assert layer.us == {INDUCTOR: 100.0, "auto": 101.0}
    assert layer.failed["unchanged"] == "could not be captured"
    assert layer.failed["split"] == "no memory"
    assert "no such kernel" in layer.failed["broken"]
    assert list(layer.predicted) == ["unchanged", "auto", "every", "owner", "split"]
    assert list(piece.predicted) == ["unchanged", "auto", "every", "owner"]
    assert layer.predicted["auto"] == layer.predicted["unchanged"]
    assert [Row.from_json(row) for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == rows
    for first, second, third in returned:  # two copies of the weights take turns
        assert first == third != second


class _Group:
    def size(self) -> int:
        return 2


@pytest.mark.parametrize(("tokens", "cut"), [(1, []), (2, ["sliced", "sliced, async TP"])])
def test_ways_of_gpus(tokens: int, cut: list[str]) -> None:
    piece = Piece(8, 8, _Group())  # type: ignore[arg-type]
    found = ways(piece, tokens, on_gpus=True)
    assert list(found) == [INDUCTOR, "one-shot", "two-shot", *cut, *SCHEDULES]
    for way in found.values():
        if way.ours:
            resolve(None, way.variant.options)
    assert found["auto"].variant.options == {"policy": "auto", "schedule": "auto"}
    assert found["split"].variant.options == {"policy": "always", "schedule": "split"}


def test_weights_take_turns() -> None:
    piece = Piece(8, 4, _Group())  # type: ignore[arg-type]
    first = piece.weight.detach().clone()
    with patch("autofuse.bench.pieces.copies_of", return_value=3):
        weights = Weights(piece, cold=True)
    seen = []
    for i in range(4):
        weights.take(i)
        seen.append((piece.weight.data_ptr(), piece.weight.detach().clone()))
    assert len({pointer for pointer, _ in seen[:3]}) == 3
    assert seen[3][0] == seen[0][0]
    assert torch.equal(seen[0][1], first)
    assert not torch.equal(seen[1][1], first)


def test_the_table() -> None:
    times = {INDUCTOR: 400.0, "sliced": 350.0, "auto": 250.0, "split": 200.0}
    row = Row("piece", 2, 64, "float32", times, {}, 32, 3.5, {"two-shot": "no memory"})
    line = table([row]).splitlines()[2].replace(" ", "")
    assert line == "|2|float32|piece|32|112|64|400|350|250|**200**|-|1.40|"
    assert "- piece 64 float32 32 x 3.5, two-shot: no memory" in table([row])


def test_the_table_has_predictions() -> None:
    us = {"auto": 260.0, "unchanged": 400.0, "split": 200.0}
    rows = [
        Row("layer", 2, 64, "float32", us, {}, 32, 1.0, predicted={"unchanged": 200.0, "split": split})
        for split in (110.0, 80.0, 101.0)
    ]
    text = table(rows)
    assert re.search(r"\| 260 +\| 400 \(200\) +\| \*\*200\*\* \(110\) +\| - +\|", text)
    assert "- split / unchanged: predictions are 10.0% off in the median, -20.0% in the worst case" in text
    assert "- auto" not in text


def test_ranks_that_cannot_share_k() -> None:
    def joined(command: str, check: Callable[[int], object]) -> None:
        assert command == "schedules --device cuda"
        check(2)
        with pytest.raises(ValueError, match="3 ranks cannot share K = 112; choose another --ratio"):
            check(3)

    with patch.object(schedules.driver, "join", joined):
        schedules.join(Options((32,), (1.5, 3.5), (8,), ("bfloat16",), (), 0.0))
