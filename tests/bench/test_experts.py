"""`autofuse bench experts` where there is no GPU: cells, routes, limits, tables, errors on CPU ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from autofuse.bench.gpu import driver as gpu_run
from autofuse.bench.gpu import named_ways
from autofuse.bench.gpu.exchange.rows import Rates, Row
from autofuse.bench.gpu.exchange.run import Options, measure
from autofuse.bench.gpu.exchange.table import report
from autofuse.bench.gpu.exchange.work import Variant, Work
from autofuse.bench.gpu.experts import peers as expert_work
from autofuse.bench.gpu.experts import vdev as expert_vdev
from autofuse.bench.gpu.experts.cells import COMBINE, DISPATCH, MODELS, ROUTINGS, Cell, Model, cells
from autofuse.bench.gpu.experts.routes import Route
from autofuse.bench.gpu.named_ways import Fused
from autofuse.lowering.gpu.choice.timing import Timing
from autofuse.lowering.ops.library import FUSED_OPS
from tests.bench.exchange import RATES, data_of, measured
from tests.ranks import RankPool

TINY = [
    Cell(op, "tiny", tokens, 2, r) for op in (COMBINE, DISPATCH) for r in ROUTINGS for tokens in (16, 128)
] + [Cell(DISPATCH, "tiny", 16, 2, routing, weights=2) for routing in ROUTINGS]
TIERS = [
    pytest.param(cell, marks=[] if cell.tokens == 16 else pytest.mark.full, id=cell.name) for cell in TINY
]


def test_sizes_of_the_matmul_on_a_rank() -> None:
    combine = Cell(COMBINE, "mixtral-8x7b", 1024, 4, "even")
    dispatch = Cell(DISPATCH, "mixtral-8x7b", 1024, 4, "even")
    assert (combine.most_rows, combine.k, combine.n, combine.width) == (2048, 14336, 4096, 4096)
    assert (dispatch.most_rows, dispatch.k, dispatch.n, dispatch.width) == (2048, 4096, 28672, 4096)
    assert (combine.experts, combine.counts[0][0]) == (2, (256, 256))


def test_limit() -> None:
    """Of the matmul or of the busiest rank's link."""
    cell = Cell(COMBINE, "deepseek-v3", 1024, 4, "even")
    assert cell.most_moved == 1024 * 8 * 3 // 4
    assert cell.limit(501.0, Rates(356.0, 4150.0)) == pytest.approx(502.3)
    assert cell.limit(100.0, Rates(356.0, 4150.0)) == pytest.approx(6144 * 7168 * 2 / 356e3 + 1.3)
    assert cell.limit(None, Rates(356.0, 4150.0)) is None


@pytest.mark.parametrize("model", MODELS)
def test_skewed_routing(model: str) -> None:
    even, skewed = (Cell(COMBINE, model, 1024, 4, routing) for routing in ROUTINGS)
    counts = torch.tensor(skewed.counts)
    assert counts.shape == (4, 4, MODELS[model].experts // 4)
    assert counts.sum((1, 2)).tolist() == [skewed.sent] * 4
    assert int(counts.max()) <= 1024  # no token has an expert twice
    assert skewed.counts == Cell(COMBINE, model, 1024, 4, "zipf").counts
    assert skewed.most_rows > 1.2 * even.most_rows
    assert skewed.most_moved > even.most_moved


def test_the_cells() -> None:
    every = cells(4, quick=False)
    apart = [cell for cell in every if cell.weights == 2]
    assert len(every) == len({cell.name for cell in every}) == 2 * 3 * 4 * 2 + len(apart)
    assert {(cell.op, cell.columns) for cell in apart} == {
        (DISPATCH, m.intermediate) for m in MODELS.values()
    }
    assert all(cell.sent % MODELS[cell.model].experts == 0 for cell in every if cell.even)
    with pytest.raises(ValueError, match="mixtral-8x7b: 3 ranks cannot share out 8 experts"):
        cells(3, quick=True)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_orders_of_rows(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row says for which expert it is and from which rank: that gives both orders."""
    monkeypatch.setitem(MODELS, "tiny", Model(32, 48, 16, 3))
    cell = Cell(DISPATCH, "tiny", 16, 2, routing)
    route = Route(cell, 1, torch.device("cpu"))
    rows = [[s, e] for s in range(2) for e in range(8) for _ in range(cell.counts[s][1][e])]
    exchanged = torch.tensor(rows)
    ordered = route.to_experts(exchanged, torch.empty_like(exchanged))
    assert ordered.tolist() == sorted(rows, key=lambda row: (row[1], row[0]))
    assert torch.equal(ordered, exchanged[route.positions])
    assert torch.equal(ordered[:, 1], route.expert)
    assert torch.equal(route.to_exchange(ordered, torch.empty_like(ordered)), exchanged)
    assert route.held == [sum(row[0] == s for row in rows) for s in range(2)]
    assert route.ends.tolist() == torch.tensor(route.per_expert).cumsum(0).tolist()


def _prepare() -> None:
    MODELS["tiny"] = Model(32, 48, 16, 3)
    expert_work.copies_of = lambda nbytes: 2  # enough weights to be read from memory would take seconds


def _work(cell: Cell) -> expert_work.Work:
    _prepare()
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(dist.get_rank())
    return expert_work.work(cell, torch.device("cpu"), group.group_name)


def _measured(rank: int, world: int, cell: Cell) -> tuple[dict[str, Any], float]:
    _prepare()
    row = measured(cell, expert_work.work)
    auto = _work(cell).variants["ours"]["auto"]
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(rank)  # the same operands again
    given = expert_work.operands(cell, torch.device("cpu"), group.group_name)
    op = FUSED_OPS[cell.op]
    of_reference = op.reference(op.parse(expert_work.arguments(given, given.weights[0])))
    return row, auto.error(of_reference)


@pytest.mark.parametrize("cell", TIERS)
def test_all_variants_are_right(ranks: Callable[[int], RankPool], cell: Cell) -> None:
    """Ours, its reference, and all that torch has; ours exchanges rows by other means than its peers."""
    (row, of_reference), _ = ranks(2).run(_measured, cell)
    matmul = "bmm" if cell.even else "mm"
    assert list(row["compute"]) == [matmul, "grouped"]
    assert list(row["parts"]) == ["all-to-all", "pack" if cell.combines else "unpack"]
    assert list(row["peers"]) == [f"{matmul}+nccl", "grouped+nccl"]
    computed = [*row["compute"].values(), *row["peers"].values(), row["ours"]]
    errors = [of_reference, *(timing["error"] for timing in computed)]
    assert all(0 < error < 4e-3 for error in errors), row
    assert all(timing["error"] < 4e-3 for timing in row["parts"].values())
    assert (row["way"], row["ways"]) == ("reference", {})
    assert row["ours"]["eager"] == (not cell.even)


def _wrong(rank: int, world: int, cell: Cell) -> float:
    auto = _work(cell).variants["ours"]["auto"]
    return auto.error([y.flatten(0, -2).roll(1, 0) for y in auto.call(0)])


@pytest.mark.parametrize("cell", TIERS)
def test_wrong_results_are_noticed(ranks: Callable[[int], RankPool], cell: Cell) -> None:
    assert min(ranks(2).run(_wrong, cell)) > 1


class Ways:
    """A room's ways by name, as a module would have them."""

    kept: ClassVar[dict[str, float]] = {}

    @staticmethod
    def names(op: str, arguments: tuple[torch.Tensor], unfused: bool) -> list[str]:
        return ["rows", "bags", *["torch+nccl"] * unfused]

    @staticmethod
    def run(name: str, op: str, arguments: tuple[torch.Tensor]) -> list[torch.Tensor]:
        return [arguments[0] + len(name), arguments[0]]

    @staticmethod
    def chosen(op: str, arguments: tuple[torch.Tensor]) -> str:
        return min(Ways.kept, key=Ways.kept.__getitem__, default="bags")

    @staticmethod
    def keep(op: str, arguments: tuple[torch.Tensor], times: dict[str, float]) -> None:
        Ways.kept.update(times)


def test_ways_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = Fused(COMBINE, [(torch.zeros(1),), (torch.ones(1),)])
    monkeypatch.setattr(named_ways, "ways", lambda: None)
    assert (fused.names(unfused=True), fused.chosen()) == ([], "kernel")
    monkeypatch.setattr(named_ways, "ways", lambda: Ways)
    assert fused.names() == ["rows", "bags"]
    assert [float(fused.call("rows")(i)) for i in range(3)] == [4, 5, 4]
    assert replace(fused, whole=True).call("bags")(1) == [torch.tensor([5.0]), torch.tensor([1.0])]
    assert fused.chosen() == "bags"


def test_an_op_with_a_kernel_but_without_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernel = replace(FUSED_OPS[COMBINE], cuda=lambda *arguments: NotImplemented)
    monkeypatch.setitem(named_ways.FUSED_OPS, COMBINE, with_kernel)
    monkeypatch.setattr(named_ways, "ways", lambda: None)
    assert Fused(COMBINE, [()]).chosen() == "kernel"


def test_tuning_settles_what_auto_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is compared with its peers; what cannot be captured is no choice."""
    steps: list[list[str]] = []
    took = {"rows": Timing(3.0), "bags": Timing(2.0, eager=True), "torch+nccl": Timing(4.0)}

    def time_all(variants: dict[tuple[str, str], Any], *rest: Any, **more: Any) -> dict[Any, Timing]:
        steps.append([f"{kind} {name}" for kind, name in variants])
        return {key: took.get(key[1], Timing(5.0)) for key in variants}

    monkeypatch.setattr(named_ways, "ways", lambda: Ways)
    monkeypatch.setattr(Ways, "kept", {})
    monkeypatch.setattr(gpu_run, "time_all", time_all)
    monkeypatch.setattr(gpu_run, "together", lambda what: what())
    nothing = Variant(lambda i: None, lambda result: 0.0)
    work = Work(
        {"compute": {}, "parts": {}, "peers": {"nccl": nothing}, "ours": {"auto": nothing}},
        Fused(COMBINE, [(torch.zeros(1),)]),
    )
    cell = Cell(COMBINE, "deepseek-v3", 128, 4, "even")
    row = measure(cell, work, RATES, Options("experts", (), tune=True))
    assert steps == [["ways rows", "ways bags", "ways torch+nccl"], ["peers nccl", "ours auto"]]
    assert Ways.kept == {"rows": 3.0, "torch+nccl": 4.0}
    assert (row.way, row.ways) == ("rows", took)


def test_the_peer_that_needs_nvshmem_is_left_out_here() -> None:
    assert "TORCH_SYMMMEM=NVSHMEM" in (expert_vdev.missing() or "")


def _row(cell: Cell, peer: str, us: float) -> Row:
    return Row(
        cell=cell,
        rates=RATES,
        compute={peer: Timing(501.0), "grouped": Timing(622.0)},
        parts={"all-to-all": Timing(354.0), "pack": Timing(50.0)},
        peers={f"{peer}+nccl": Timing(us, error=2e-3), "grouped+nccl": Timing(failed="RuntimeError: no")},
        ours=Timing(900.0, eager=not cell.even, error=1e-3),
        way="reference",
        ways={},
    )


def test_the_table() -> None:
    even, skewed = (Cell(COMBINE, "deepseek-v3", 128, 4, routing) for routing in ROUTINGS)
    rows = [_row(even, "bmm", 825.0), _row(skewed, "mm", 1800.0)]
    text = report(data_of("experts", [json.loads(json.dumps(row.to_json())) for row in rows]))
    lines = [
        [c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line[0:1] == "|"
    ]
    first, second = (dict(zip(lines[0], line, strict=True)) for line in lines[2:])
    assert (first["routing"], first["bmm alone"], first["mm alone"]) == ("even", "501.0", "-")
    assert (first["best peer"], first["ours"], first["speed-up"]) == ("825.0", "900.0", "0.92")
    assert (first["grouped+nccl"], first["error grouped+nccl"]) == ("failed", "-")
    assert (second["mm+nccl"], second["ours"], second["speed-up"]) == ("1800.0", "900.0*", "2.00")
    assert (
        "- even: 1 of 1 cells, worst 0.92x (model deepseek-v3, tokens a rank 128, routing even, weights 1)"
        in text
    )
    assert "- zipf: 1 of 1 cells, worst 2.00x" in text
    assert f"{even.name}, peers grouped+nccl and 1 more: RuntimeError: no" in text
