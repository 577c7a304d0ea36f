"""The benchmark of schedules: each does what its name says, all agree, rows are kept, the table names the
fastest."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from autofuse.bench import schedules
from autofuse.bench.pieces import INDUCTOR, Layer, Piece, Way, Weights, ways
from autofuse.bench.schedules import Options, Row, resumed, table
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
    text = table([row])
    assert "| 2 | float32 | piece | 32 | 112 | 64 | 400 | 350 | 250 | **200** | - | 1.40 |" in text
    assert "- piece 64 float32 32 x 3.5, two-shot: no memory" in text
