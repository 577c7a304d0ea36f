"""What policy `auto` does with what the cost model says, and what the report says of it."""

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import autofuse
from autofuse.backend import fusion_pass
from autofuse.options import settings
from autofuse.passes.choice.cost_model import Task
from autofuse.passes.choice.device_table import DeviceTable, shipped
from tests.passes.harness import fake_group
from tests.ranks import RankPool

CPU = next(table for table in shipped() if table.device == "cpu")


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks share them: the tables of this file reckon with it."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def linear(x: Tensor, w: Tensor) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    return funcol.all_reduce(x @ w, "sum", group)


def report_of(
    table: DeviceTable, path: Path, rows: int, dynamic: bool, policy: str = "auto", **limits: int
) -> autofuse.Report:
    path.write_text(table.to_json())
    x, w = torch.zeros(rows, 64), torch.zeros(64, 128)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0, **limits)
    with fake_group(4), autofuse.config.patch(policy=policy, table=str(path)):
        return autofuse.explain(linear)(x, w)


def losing_from(rows: int, world: int = 4) -> DeviceTable:
    """Fusing loses from about so many rows on: it saves time a call, and a row of 128 columns costs more."""
    moved = (world - 1 + 2) * 128 * 4 / 5e2  # microseconds a row, in one shot
    saved = {f"all_reduce.{world}.start_us": 10.0 + CPU.constants["fused.signal_us"] + rows * moved}
    slow = {f"all_reduce.{world}.rate": 1e6, f"link.{world}.remote": 5e2}
    start = {f"fused.all_reduce.{world}.start_us": 10.0}
    return dataclasses.replace(CPU, name="losing", constants={**CPU.constants, **saved, **slow, **start})


def test_static_sizes_decide_by_their_times(tmp_path: Path) -> None:
    table = losing_from(500)
    for rows, expected in ((8, True), (3000, False)):
        (site,) = report_of(table, tmp_path / "t.json", rows, dynamic=False).sites
        assert site.fused is expected
        assert site.prediction is not None
        assert site.prediction.wins == ("always" if expected else "never")
        assert float(site.prediction.fused) == site.prediction.fused_us
        assert (site.prediction.table, site.prediction.measured_us) == ("losing", None)


def test_a_dynamic_size_is_kept_where_a_part_of_its_range_loses(tmp_path: Path) -> None:
    (site,) = report_of(losing_from(500), tmp_path / "t.json", 8, dynamic=True).sites
    assert not site.fused
    assert site.prediction is not None
    assert re.fullmatch(r"s\d+ <= \d+", site.prediction.wins)
    assert site.detail == f"gains only for {site.prediction.wins}"
    (site,) = report_of(losing_from(500), tmp_path / "t.json", 8, dynamic=True, min=2, max=100).sites
    assert site.fused
    assert site.prediction is not None
    assert site.prediction.wins == "always"


@pytest.mark.parametrize("other", [8, 1500])
def test_hints_decide_nothing(tmp_path: Path, other: int) -> None:
    """What was traced differs, and with it the times; what is done and the condition do not."""
    choices = []
    for rows in (8, other):
        (site,) = report_of(losing_from(500), tmp_path / "t.json", rows, dynamic=True).sites
        assert site.prediction is not None
        condition = re.sub(r"s\d+", "s", site.prediction.wins)
        choices.append((site.fused, condition, re.sub(r"s\d+", "s", site.prediction.fused)))
    assert choices[0] == choices[1]


def test_sizes_that_depend_on_data_are_fused(tmp_path: Path) -> None:
    def program(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return linear(x[mask.nonzero().flatten()], w)

    path = tmp_path / "t.json"
    path.write_text(losing_from(500).to_json())
    args = torch.zeros(8, 64), torch.zeros(64, 128), torch.ones(8, dtype=torch.bool)
    dynamic = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with fake_group(4), autofuse.config.patch(policy="auto", table=str(path)), dynamic:
        (site,) = autofuse.explain(program)(*args).sites
    assert site.fused
    assert site.prediction is not None
    assert (site.prediction.wins, site.prediction.fused_us) == ("not known", None)
    assert "u0" in site.prediction.fused


def test_a_measured_point_is_reported(tmp_path: Path) -> None:
    point = CPU.points[0]
    task = Task.parse(point.task)
    (m, k, n), world = task.matmuls[0], task.world
    with fake_group(world), autofuse.config.patch(policy="auto"):
        report = autofuse.explain(linear)(torch.zeros(int(m), int(k)), torch.zeros(int(k), int(n)))
    (site,) = report.sites
    assert site.prediction is not None
    assert (site.prediction.measured_us, site.prediction.measured_unfused_us) == (
        point.fused_us,
        point.unfused_us,
    )
    assert f"(measured {point.fused_us:.1f}, " in str(report)
    assert autofuse.Report.from_json(report.to_json()) == report


def _differ(rank: int, world: int, path: str) -> tuple[bool, str, str]:
    """Every rank traces a number of rows of its own, as a first call with a ragged batch may."""
    torch._dynamo.reset()
    x, w = torch.zeros(8 + 1500 * rank, 64), torch.zeros(64, 128)
    torch._dynamo.mark_dynamic(x, 0)
    with autofuse.config.patch(policy="auto", table=path):
        (site,) = autofuse.explain(linear)(x, w).sites
        uuid = fusion_pass(0, settings())[0].uuid()
    assert site.prediction is not None, site
    assert uuid is not None
    return site.fused, site.detail, uuid


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankPool]:
    """Ranks that have compiled nothing before."""
    pool = RankPool(2)
    yield pool
    if pool.alive:
        pool.close()


@pytest.mark.parametrize("rows", [500, 1 << 30])
def test_ranks_with_other_hints_decide_alike(own_ranks: RankPool, tmp_path: Path, rows: int) -> None:
    path = tmp_path / "t.json"
    path.write_text(losing_from(rows, 2).to_json())
    choices = own_ranks.run(_differ, str(path))
    assert choices[0] == choices[1]
    assert choices[0][0] is (rows > 500)


def test_compiled_graphs_are_cached_under_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def uuid(**options: Any) -> str | None:
        return fusion_pass(0, settings(**options))[0].uuid()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "table.json"
    path.write_text(CPU.to_json())
    first = uuid(table=str(path))
    assert uuid(table=str(path)) == first
    changed = dataclasses.replace(CPU, constants={**CPU.constants, "memory.rate": 1.0})
    path.write_text(changed.to_json())
    assert uuid(table=str(path)) != first
    plain = uuid()
    (tmp_path / "autofuse").mkdir()
    (tmp_path / "autofuse" / "cpu.json").write_text(changed.to_json())
    assert uuid() not in (plain, first)
