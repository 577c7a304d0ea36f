"""`autofuse plan`: what is drawn is the plan of `make_plan`, and what is proved is what is drawn."""

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import Result

from autofuse.cli import plan as plan_command
from autofuse.cli.plan import make_plans
from autofuse.lowering.plan import FAMILIES, Order

Command = Callable[..., Result]


@pytest.mark.parametrize("op", FAMILIES)
@pytest.mark.parametrize("order", list(Order))
def test_every_op_in_every_order_is_drawn_and_proved(op: str, order: Order, command: Command) -> None:
    result = command("plan", op, "--world", 3, "--shape", "10x8", "--order", order.value, "--verify")
    assert result.exit_code == 0, result.output
    assert f"{op}: {order.value}, 3 ranks" in result.stdout
    assert f"proved: {op}, {order.value}, 3 ranks" in result.stdout


def test_rows_are_cut_evenly_and_tiles_by_the_block() -> None:
    plans = make_plans("matmul_reduce_scatter", "direct", 4, (10, 8), (2, 8))
    assert [plan.rank for plan in plans] == [0, 1, 2, 3]
    assert plans[0].chunks == ((2, 8), (3, 8), (2, 8), (3, 8))
    assert len(plans[0].tiles(1)) == 2


def test_a_second_order_beside_the_first(command: Command) -> None:
    lines = command("plan", "matmul_reduce_scatter", "--compare", "oblivious").stdout.splitlines()
    peers = [line.split()[1:] for line in lines if line.startswith("peers ")]
    assert peers == [["1", "1", "1", "0", "0"], ["3", "3", "3", "3", "0"]]


def test_the_table_of_one_rank(command: Command) -> None:
    result = command("plan", "matmul_all_reduce", "--one-shot", "--table", "--rank", 1, "--world", 2)
    assert str(make_plans("matmul_all_reduce", "direct", 2, (512, 512), None, True)[1]) in result.stdout
    assert "peers that meet at one rank's memory, by step: " in result.stdout


def test_drawings_in_files(tmp_path: Path, command: Command) -> None:
    command("plan", "all_gather_matmul", "--svg", tmp_path / "a.svg")
    command("plan", "all_gather_matmul", "--svg", tmp_path / "b.svg", "--compare", "ring")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.svg", "b-direct.svg", "b-ring.svg"]
    for file in tmp_path.iterdir():
        assert ElementTree.parse(file).getroot().tag.endswith("svg")


def test_a_plan_that_is_wrong_is_not_proved(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(plans: object) -> None:
        raise AssertionError("rank 0 in call 1: this wait never ends")

    monkeypatch.setattr(plan_command, "prove", fails)
    result = command("plan", "matmul_all_reduce", "--verify")
    assert result.exit_code == 1
    assert "not proved: rank 0 in call 1" in result.stderr
