"""`autofuse simulate`, what it prints and writes; and that predictions stay near what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import expecttest
import pytest
from typer.testing import CliRunner, Result

from autofuse.cli.app import app
from autofuse.lowering.simulate.machine import Shape
from autofuse.lowering.simulate.machines import H200, nccl_us
from autofuse.lowering.simulate.problems import Problem, apart, on_gpus
from autofuse.passes.choice.cost_model import Task
from autofuse.simulate import h200_measured, layers
from autofuse.simulate.dlrm import Exchange, Pass
from autofuse.simulate.h200 import cells
from autofuse.simulate.script import problem_of
from autofuse.simulate.t3 import SMALL, run
from autofuse.simulate.t3_figures import time, traffic
from autofuse.simulate.tables import Row, beside


@pytest.fixture
def command() -> Callable[..., Result]:
    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, list(map(str, arguments)), prog_name="autofuse")

    return invoke


def test_one_sub_layer_of_t3(command: Callable[..., Result]) -> None:
    result = command("simulate", "t3", "--quick")
    assert result.exit_code == 0, result.output
    expecttest.assert_expected_inline(
        result.output,
        """\
sub-layer     matmul   RS   AG   T3  T3-MCA  ideal %  T3 %  T3-MCA %  threshold
T-NLG OP TP8     461  878  815  831     848     27.3  30.9      29.5         10
""",
    )


def test_pictures() -> None:
    times = [run(replace(SMALL[0], tokens=2048, hidden=512))]
    for svg in (time(times), traffic(times)):
        assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_a_script(command: Callable[..., Result], tmp_path: Path) -> None:
    """Its own graphs, for as many ranks as are asked for, on links of the rate that is asked for."""
    script, out = tmp_path / "layer.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    result = command("simulate", script, "--world", 16, "--link", 20, "--json", out)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())
    assert row["op"] == "matmul_reduce_scatter"
    problem = Problem("matmul_reduce_scatter", 16, 4096, 512, 4096)
    slow = replace(H200, network=replace(H200.network, rate=20e3))
    assert row["apart_us"] == pytest.approx(apart(problem, slow))
    assert row["orders_us"]["direct"] == pytest.approx(on_gpus(problem, slow))
    assert row["orders_us"]["direct"] < row["apart_us"]
    assert apart(problem, H200) < 0.3 * row["apart_us"]


SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
dist.init_process_group("gloo")
world = dist.get_world_size()

def layer(x, w):
    return funcol.reduce_scatter_tensor(x @ w, "sum", 0, dist.group.WORLD)

x = torch.empty(4096, 8192 // world, dtype=torch.bfloat16)
w = torch.empty(8192 // world, 4096, dtype=torch.bfloat16)
torch.compile(layer, backend="autofuse")(x, w)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "expected t3, dlrm, h200, speed, or a file"),
        (["t3", "--figures", "/no/such/folder"], "there is no folder"),
    ],
)
def test_mistakes(command: Callable[..., Result], arguments: list[str], message: str) -> None:
    result = command("simulate", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_held_out_cells_of_h200() -> None:
    """A small part of what `simulate h200` prints: shapes that no constant was fitted to."""
    chosen = [
        cell
        for cell in cells()
        if (cell.label, cell.world)
        in (("llama405b.down_proj", 4), ("llama13b.o_proj", 4), ("gpt3.down_proj", 4))
        and cell.tokens in (8, 16, 512)
    ]
    assert len(chosen) == 12
    assert all(map(h200_measured.held_out, chosen))
    found = [h200_measured.predict(cell) for cell in chosen]
    assert max(h200_measured.errors(found, "apart").whole) < 0.2
    assert max(h200_measured.errors(found, "fused").whole) < 0.2


def test_uneven_experts_and_gradients_of_h200() -> None:
    """As above, of cells whose routing is drawn, and of gradients and updates of embeddings."""
    chosen = [
        cell
        for cell in cells()
        if (cell.label == "gpt-oss-120b zipf" and cell.tokens == 128)
        or (cell.label == "512x64" and cell.op != "embedding_bag_all_to_all" and cell.k == 70)
    ]
    assert len(chosen) == 6
    assert all(map(h200_measured.held_out, chosen))
    found = [h200_measured.predict(cell) for cell in chosen]
    assert len(h200_measured.errors(found, "apart").whole) == 2
    assert max(h200_measured.errors(found, "apart").whole) < 0.2
    assert max(h200_measured.errors(found, "fused").whole) < 0.2


def test_problems_of_sites() -> None:
    """The sizes of a site, as the cost model names them, and as the simulation takes them."""
    task = Task("matmul_reduce_scatter", 4, "bfloat16", "direct", 2 * 512 * 1024, ((512, 256, 1024),))
    assert problem_of(task) == Problem("matmul_reduce_scatter", 4, 512, 256, 1024)
    experts = Task("expert_matmul_all_to_all", 4, "float32", "direct", 4, ((1024, 256, 512),), count=8)
    assert problem_of(experts) == Problem("expert_matmul_all_to_all", 4, 32, 256, 512, 8, 4)
    bags = problem_of(
        Task("embedding_bag_all_to_all", 2, "float32", "direct", 4 * 64 * 2 * 96, pooled=10 * 4 * 64 * 2 * 96)
    )
    assert bags is not None
    assert (bags.moved, bags.inner) == (4 * 64 * 2 * 96, 10)
    assert problem_of(Task("all_to_all_embedding_bag_backward", 2, "float32", "direct", 4)) is None


def test_nccl_beyond_what_was_measured() -> None:
    """More ranks never take less, slower links take longer, and NICs bound what hosts exchange."""
    times = [nccl_us("all_reduce", world, 1e8, H200.network) for world in (8, 16, 64, 1024)]
    assert times == sorted(times)
    slow = replace(H200.network, rate=100e3)
    hosts = replace(H200.network, shape=Shape.HOSTS, width=8, nic_rate=25e3, nic_latency=3.0)
    assert nccl_us("all_reduce", 64, 1e8, slow) > times[2]
    assert nccl_us("all_to_all", 64, 1e8, hosts) > 3 * nccl_us("reduce_scatter", 64, 1e8, hosts)


def test_a_timeline(tmp_path: Path) -> None:
    layers.write_trace(tmp_path / "rs", H200, world=4)
    events = json.loads((tmp_path / "rs.json").read_text())["traceEvents"]
    computed = [e for e in events if e["name"] == "COMPUTED"]
    assert {e["args"]["rank"] for e in computed} == {0, 1, 2, 3}
    assert ElementTree.fromstring((tmp_path / "rs.svg").read_text()).tag.endswith("svg")


def test_tables() -> None:
    rows = [Row("a", 35, 33.0, role="fitted"), Row("b", 20, 26.0), Row("c", 2.0, 2.05, "x")]
    expecttest.assert_expected_inline(
        beside(rows),
        """\
   published  simulated  difference    role
a        35%      33.0%        -2.0  fitted
b        20%      26.0%      +6.0 !  tested
c         2x      2.05x       +0.05  tested

1 fitted; 1 of 2 tested numbers within 5 points (factors: 5 %); 0 estimated""",
    )
    exchange = Exchange(30.0, 50.0, 50.0)
    assert Pass(1, 1, exchange, 100.0, 40.0).less == pytest.approx(20.0)
