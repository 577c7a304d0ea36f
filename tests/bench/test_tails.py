"""What was measured of tails on GPUs, and what follows from it."""

from dataclasses import replace
from pathlib import Path

import pytest
import sympy
import torch

pytest.importorskip("triton")

from autofuse.bench.cpu.table import geometric_mean
from autofuse.bench.gpu import tails
from autofuse.bench.gpu.measured import RESULTS, TAIL_OP
from autofuse.bench.gpu.tails import TORCH, Cell
from autofuse.lowering.gpu.choice.choose import choose
from autofuse.lowering.gpu.choice.correction import Predictor
from autofuse.lowering.gpu.choice.model import shipped as shipped_model
from autofuse.lowering.gpu.choice.points import shipped
from autofuse.lowering.gpu.dense.ways import REDUCE, DenseProblem
from autofuse.passes.choice.cost_model import Task
from autofuse.passes.choice.crossover import Known
from autofuse.passes.choice.gpu_pricing import GpuPricing
from autofuse.passes.choice.scheduled import Cluster, cheapest
from autofuse.passes.schedules.schedule import EVERY, OWNER, UNCHANGED

MEASURED = Path(__file__).parents[2] / "docs" / "benchmarks" / "tails_2xh100.json"
OF_FOUR = MEASURED.with_name("tails_4xh100.json")
KIND = "h100-80gb-hbm3"
CELLS = tails.read(MEASURED)


def test_points_are_shipped() -> None:
    """Of calls with a tail, and of what a tail adds: the mean of both files. Sums alone are of other runs, in
    which more ways were measured."""
    own = {(p.op, p.sizes): dict(p.times) for p in shipped(KIND) if not p.gpu}
    added: dict[tuple[int, ...], list[float]] = {}
    for cells in (CELLS, tails.read(OF_FOUR)):
        for _, with_tail in (cell.points() for cell in cells):
            # Sums with slices of 8 items are gone, since words have taken the place of signals.
            times = {way: us for way, us in with_tail.times if "slice_items" not in way}
            assert own[with_tail.op, with_tail.sizes] == times
        for point in tails.tail_points(cells):
            added.setdefault(point.sizes, []).append(dict(point.times)["tail_alone"])
    for sizes, us in added.items():
        assert own[TAIL_OP, sizes]["tail_alone"] == pytest.approx(geometric_mean(us), abs=0.01)


def test_auto_takes_what_is_measured_to_be_fast() -> None:
    """Over the best of all ways to leave the tail to Inductor."""
    model = shipped_model(KIND)
    assert model is not None
    predictor = Predictor(model, shipped(KIND))
    ratios, taken = list[float](), set[str]()
    for cell in CELLS:
        sizes, matrix = (cell.tokens, cell.k, cell.hidden), 2 * cell.tokens * cell.hidden
        task = Task(REDUCE, cell.world, "bfloat16", "direct", matrix, (sizes,))
        cluster = Cluster(task, matrix, matrix + 2 * cell.hidden, 2 * matrix, added=matrix)
        problem = DenseProblem(REDUCE, *sizes, cell.world, torch.bfloat16)
        written = {OWNER: replace(problem, written=RESULTS * cell.hidden)}
        for legal in ((UNCHANGED, EVERY), (UNCHANGED, EVERY, OWNER)):
            name, _ = cheapest([cluster], legal, GpuPricing(predictor), {})
            way = choose(written.get(name, problem), predictor).way
            us = {
                EVERY: cell.us[EVERY],
                OWNER: cell.us[EVERY] | cell.us[OWNER],
                UNCHANGED: cell.us[UNCHANGED],
            }
            taken.add(name)
            if way in us[name]:  # some configurations were not measured
                ratios.append(cell.best(UNCHANGED)[0] / us[name][way])
            if cell.tokens <= tails.FEW:
                assert name != UNCHANGED
    assert len(ratios) > len(CELLS) // 2
    assert min(ratios) > 0.98
    assert geometric_mean(ratios) > 1.03
    assert EVERY in taken


def test_any_number_of_tokens() -> None:
    """Whatever number was seen: many tokens cost time where no kernel of a sum adds the operand of a tail."""
    model = shipped_model(KIND)
    assert model is not None
    rows = sympy.Symbol("s0", integer=True, positive=True)
    matrix = 2 * 4096 * rows
    task = Task(REDUCE, 2, "bfloat16", "direct", matrix, ((rows, 2048, 4096),))
    cluster = Cluster(task, matrix, matrix, 2 * matrix)
    pricing = GpuPricing(Predictor(model, shipped(KIND)))
    for seen in (None, 2, 64):
        for most, expected in ((64, EVERY), (1 << 20, UNCHANGED)):
            name, _ = cheapest([cluster], (UNCHANGED, EVERY), pricing, {rows: Known(2, most, seen)})
            assert name == expected


def test_table() -> None:
    cell = Cell(
        64,
        4,
        8,
        2,
        {TORCH: {"a": 3.0, "b": 2.0}, UNCHANGED: {"words": 1.6}, EVERY: {"rows": 1.25}, OWNER: {}},
    )
    text = tails.table([cell])
    assert "| 2     | 8      | 4           | 64     | 2.0      | 1.6          | 1.2     | rows" in text
    assert "up to 64 tokens: geometric mean 1.60x, worst 1.60x" in text


def test_worlds_that_share_no_weight_are_refused() -> None:
    tails.check(4)
    with pytest.raises(ValueError, match="3 ranks cannot share K = 8192; start 2, 4 or 8"):
        tails.check(3)
