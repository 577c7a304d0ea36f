"""Cells of the backward in `autofuse bench embedding` without a GPU: limits, errors on CPU ranks, tables."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autofuse.bench.gpu.embedding import gradients as embedding_gradients
from autofuse.bench.gpu.embedding import peers as embedding_work
from autofuse.bench.gpu.embedding.cells import BACKWARD, BATCHES, MIXED, MOST_BYTES, OP, POOLINGS, Cell
from autofuse.bench.gpu.embedding.gradients import Gradients
from autofuse.bench.gpu.exchange.rows import Rates, Row
from autofuse.bench.gpu.exchange.run import WORK
from autofuse.bench.gpu.exchange.table import report
from autofuse.lowering.gpu.choice.timing import Timing
from autofuse.lowering.ops.library import FUSED_OPS
from tests.bench.exchange import RATES, data_of, measured
from tests.ranks import RankPool

TINY = Cell(8, 4, 3, 2, rows=50, dim=16, op=BACKWARD)
DIFFERENT = Cell(8, 8, 3, 2, "mixed", rows=500, dim=16, op=BACKWARD)
ROUNDING = 1e-2
"""Torch adds in bfloat16 on CPUs, and rows of small tables have many indices."""


def test_sizes() -> None:
    assert TINY.gradient_bytes == 2 * 4 * 50 * 16
    assert TINY.moved_bytes == 2 * (3 * 8 * 4 * 16 + 4 * 50 * 16)
    assert replace(TINY, op=OP).moved_bytes == 2 * (3 + 1) * 8 * 4 * 16
    assert TINY.by_dim == [(16, [50] * 4)]
    assert DIFFERENT.by_dim == [
        (4, [5, 50]), (8, [500, 5000]), (16, [5, 50]), (32, [500, 5000])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "tables", "pooling", "limit_us"),
    [(512, 64, 1, 794.9), (4096, 64, 70, 3054.8), (4096, 64, 1, 823.3)],
)
def test_limit(batch: int, tables: int, pooling: int, limit_us: float) -> None:
    """3.3 GB of gradients, and rows of 134 MB, of which each is read `pooling` times, at 4150 GB/s."""
    cell = Cell(batch, tables, pooling, 4, op=BACKWARD)
    assert cell.limit(None, Rates(356.0, 4150.0)) == pytest.approx(limit_us, abs=0.1)
    slow_link = cell.limit(None, Rates(1.0, 4150.0))
    assert slow_link == pytest.approx(3 / 4 * batch * tables * 256 * 2 / 1e3 + 1.3)


def test_cells_that_do_not_fit_are_left_out() -> None:
    held = {
        (batch, tables): max(Cell(batch, tables, pooling, 4, op=BACKWARD).held_bytes for pooling in POOLINGS)
        for batch, tables in BATCHES
    }
    assert {size for size, nbytes in held.items() if nbytes > MOST_BYTES} == {(2048, 256)}
    # 11 gradients of 3.3 GB, and twice the sums of 6.4 million rows and of a tenth of 18.4 million indices
    assert held[4096, 64] == 11 * 3_276_800_000 + 2 * (6_400_000 + 1_835_008) * 256 * 4
    assert Cell(*MIXED, 4, "mixed", op=BACKWARD).held_bytes < MOST_BYTES


def _measured(rank: int, world: int, cell: Cell) -> dict[str, Any]:
    return measured(cell, WORK[cell.op])


@pytest.mark.parametrize("cell", [TINY, DIFFERENT], ids=str)
def test_all_variants_are_right(ranks: Callable[[int], RankPool], cell: Cell) -> None:
    row, _ = ranks(2).run(_measured, cell)
    kinds = {kind: row[kind] for kind in ("compute", "parts", "peers")} | {"ours": {"auto": row["ours"]}}
    errors = {kind: {name: t["error"] for name, t in timings.items()} for kind, timings in kinds.items()}
    assert list(errors["compute"]) == ["per table", "merged"]
    assert errors["parts"] == {"all-to-all": 0, "pack": 0, "unpack": 0}
    assert list(errors["peers"]) == ["per table+nccl", "merged+nccl"]
    sums = [*errors["compute"].values(), *errors["peers"].values(), *errors["ours"].values()]
    assert all(0 < error < ROUNDING for error in sums), row
    assert (row["way"], row["ways"]) == ("reference", {})
    assert Row.from_json(json.loads(json.dumps(row)), Cell).cell == cell


def _gradients_by_autograd(rank: int, world: int, cell: Cell) -> float:
    """The largest difference of the exact rows to autograd's through all ranks' bags, in fp64."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(rank)
    given = embedding_gradients.operands(cell, torch.device("cpu"), group.group_name)
    *_, gradients = embedding_gradients.exact(given)
    grads = [torch.empty_like(given.grad) for _ in range(world)]
    dist.all_gather(grads, given.grad)
    mine = torch.cat([g[:, rank * cell.columns : (rank + 1) * cell.columns] for g in grads]).double()
    worst = 0.0
    for t, piece in enumerate(mine.split([dim for _, dim in cell.sizes], 1)):
        rows, dim = cell.sizes[t]
        table = torch.zeros(rows, dim, dtype=torch.float64, requires_grad=True)
        bags = given.bags[0].indices[t].view(cell.batch, cell.pooling)
        table[bags].sum(1).backward(piece)
        assert table.grad is not None
        worst = max(worst, float((table.grad[gradients.rows[t]] - gradients.exact[t]).abs().max()))
        assert not table.grad[gradients.unused[t]].any()
        assert int(gradients.unused[t].sum()) == rows - len(bags.unique())
        # What memory that is used again may still have: rows of the next set.
        assert rows < 1000 or gradients.unused[t][gradients.rows[t]].any()
    return worst


@pytest.mark.parametrize("cell", [TINY, DIFFERENT], ids=str)
def test_the_exact_rows(ranks: Callable[[int], RankPool], cell: Cell) -> None:
    assert max(ranks(2).run(_gradients_by_autograd, cell)) < 1e-12


def _reference(rank: int, world: int) -> float:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(rank)
    given = embedding_gradients.operands(DIFFERENT, torch.device("cpu"), group.group_name)
    *_, gradients = embedding_gradients.exact(given)
    arguments = embedding_gradients.arguments(given, given.bags[0])
    return gradients.error(FUSED_OPS[BACKWARD].reference(FUSED_OPS[BACKWARD].parse(arguments)))


def test_what_runs_without_a_kernel_is_right(ranks: Callable[[int], RankPool]) -> None:
    assert max(ranks(2).run(_reference)) < ROUNDING


def _gradients() -> Gradients:
    """Of two tables of 3 rows, of which no index names the last one."""
    rows, unused = torch.tensor([0, 1]), torch.tensor([False, False, True])
    return Gradients([rows] * 2, [torch.ones(2, 4, dtype=torch.float64)] * 2, [unused] * 2)


def test_wrong_results_are_noticed() -> None:
    right = torch.ones(3, 4).index_fill_(0, torch.tensor([2]), 0.0)
    assert _gradients().error([right, right]) == 0
    assert _gradients().error([right, 2 * right]) == pytest.approx(0.5**0.5)
    for value in (1e-30, float("nan")):
        stale = right.clone()
        stale[2, 3] = value
        with pytest.raises(RuntimeError, match="the gradient of table 1 is not 0 where no index is"):
            _gradients().error([right, stale])
    with pytest.raises(RuntimeError, match="expected gradients of shapes"):
        _gradients().error([right])
    with pytest.raises(RuntimeError, match="expected gradients of shapes"):
        _gradients().error([right, right[:2]])


def test_a_table_an_op() -> None:
    rows = [
        Row(
            cell=replace(Cell(512, 64, 70, 4), op=op),
            rates=RATES,
            compute={"per table": Timing(5000.0), "merged": Timing(4000.0)},
            parts={"all-to-all": Timing(67.0), "pack": Timing(20.0), "unpack": Timing(20.0)},
            peers={"per table+nccl": Timing(5100.0, error=2e-3), "merged+nccl": Timing(4100.0, error=2e-3)},
            ours=Timing(2050.0, error=1e-3),
            way="strips",
            ways={"strips": Timing(2050.0)},
        )
        for op in (OP, BACKWARD)
    ]
    text = report(data_of("embedding", [json.loads(json.dumps(row.to_json())) for row in rows]))
    assert text.index(f"### {OP}, 2 GPUs") < text.index(f"### {BACKWARD}, 2 GPUs")
    lines = text[text.index(f"### {BACKWARD}") :].splitlines()[1:]
    table = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[0:1] == "|"]
    named = dict(zip(table[0], table[2], strict=True))
    assert (named["merged alone"], named["unpack alone"], named["way"]) == ("4000.0", "20.0", "strips")
    assert (named["speed-up"], named["limit"], named["share of limit"]) == ("2.00", "1073.9", "52%")


def test_cells_written_before_there_was_a_backward() -> None:
    nothing: dict[str, Timing] = {}
    row = Row(
        cell=Cell(512, 64, 70, 4),
        rates=RATES,
        compute=nothing,
        parts=nothing,
        peers=nothing,
        ours=Timing(1.0),
        way="bags",
        ways=nothing,
    )
    data = json.loads(json.dumps(row.to_json()))
    del data["cell"]["op"]
    assert Row.from_json(data, Cell) == row
    assert WORK[row.cell.op] is embedding_work.work
