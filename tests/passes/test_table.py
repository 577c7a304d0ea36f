"""Tables: which one is asked, what a bad one says, and that a fit finds what times were made of."""

import dataclasses
import json
import math
import random
import re
from pathlib import Path

import pytest
import torch

from autofuse.fit import Sample, errors, fit
from autofuse.options import settings
from autofuse.passes.choice.cost_model import Model, Numbers, Task
from autofuse.passes.choice.device_table import DeviceTable, shipped, table_for, tables

CPU, H200 = shipped()


def test_shipped_tables_and_their_devices() -> None:
    assert (CPU.name, CPU.device, CPU.overlaps) == ("cpu", "cpu", False)
    assert (H200.name, H200.device, H200.overlaps) == ("h200", "cuda:H200", True)
    assert table_for(shipped(), torch.device("cpu")) is CPU
    assert table_for(shipped(), torch.device("cuda", 0)) is H200
    with pytest.raises(ValueError, match=r"no table of constants for mps.*autofuse.tune"):
        table_for(shipped(), torch.device("mps"))


@pytest.mark.parametrize("table", shipped(), ids=lambda table: table.name)
def test_a_table_survives_json(table: DeviceTable) -> None:
    again = DeviceTable.from_json(table.to_json(), "again")
    assert again.to_json() == table.to_json()
    assert again.digest == table.digest
    assert all(Task.parse(point.task).key == point.task for point in table.points)


def test_the_table_named_comes_before_the_machines_own_and_the_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tables() == shipped()
    (tmp_path / "cache" / "autofuse").mkdir(parents=True)
    for name, path in (("own", "cache/autofuse/cpu.json"), ("named", "named.json")):
        (tmp_path / path).write_text(dataclasses.replace(CPU, name=name).to_json())
    assert [table.name for table in tables()] == ["own", "cpu", "h200"]
    named = tables(str(tmp_path / "named.json"))
    assert [table.name for table in named] == ["named", "own", "cpu", "h200"]
    assert table_for(named, torch.device("cpu")).name == "named"
    assert table_for(named, torch.device("cuda")).name == "h200"
    assert settings(table=tmp_path / "named.json").tables == named


def changed(**constants: object) -> str:
    data = json.loads(CPU.to_json())
    for key, value in constants.items():
        name = key.replace("__", ".")
        if value is None:
            del data["constants"][name]
        else:
            data["constants"][name] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"no JSON.*autofuse tune"),
        ("[]", "expected a JSON object, got list"),
        ("{}", "cores is missing, expected a number of cores or null"),
        (CPU.to_json().replace('"cores": 2', '"cores": 0'), "cores is 0, expected at least 1"),
        (CPU.to_json().replace('"cores": 2', '"cores": true'), "cores is True, expected a number"),
        (CPU.to_json().replace('"name": "cpu"', '"name": "cpu", "colour": 1'), "unknown key colour"),
        (changed(memory__rate=-1), r"memory\.rate is -1, expected a positive number"),
        (changed(memory__rate="fast"), r"memory\.rate is 'fast', expected a positive number"),
        (changed(memory__speed=1), r"unknown key memory\.speed"),
        (changed(memory__rate=None), r"memory\.rate is missing"),
        (changed(all_reduce__2__rate=None), r"all_reduce\.2\.rate is missing"),
        (changed(matmul__float32__start_us=None), r"matmul\.float32\.start_us is missing"),
        (CPU.to_json().replace('"fused_us"', '"used_us"', 1), r"points\[0\]: fused_us is missing"),
    ],
)
def test_a_bad_table_says_where_and_what(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: .*{message}"):
        settings(table=str(path))


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.json: cannot be read .*check `table`"):
        settings(table=str(tmp_path / "nothing.json"))
    with pytest.raises(ValueError, match="table=3: expected the path"):
        settings(table=3)


def test_what_was_not_measured_comes_from_ranks_that_share_cores_alike() -> None:
    constants = {**CPU.constants, "all_reduce.8.start_us": 3.0, "all_reduce.8.rate": 1.0}
    table = dataclasses.replace(CPU, constants=constants)  # 2, 4 and 8 ranks on 2 cores
    two, four, eight = (constants[f"all_reduce.{ranks}.start_us"] for ranks in (2, 4, 8))

    def start(world: int, cores: int) -> float:
        return table.ranked("all_reduce", "start_us", world, cores)

    assert [start(world, 2) for world in (2, 3, 4, 16)] == [two, four, four, eight]
    assert start(4, cores=64) == two
    assert start(2, cores=1) == four


def _tasks() -> list[Task]:
    shapes = [(m, k, n) for m in (1, 16, 128, 2048) for k in (512, 4096) for n in (1024, 8192)]
    dense = [
        Task(op, 2, "float32", "direct", (m * k if op[:3] == "all" else m * n) * 4, ((m, k, n),))
        for op in ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")
        for m, k, n in shapes
    ]
    bags = [
        Task("embedding_bag_all_to_all", 2, "float32", "direct", b * 4, (), 8, b * 40)
        for b in (100, 10_000, 10**6)
    ]
    return dense + bags


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    """Times with errors of 5%, one of them ten times what it should be."""
    chance = random.Random(0)
    constants = {key: value * math.exp(chance.uniform(-1, 1)) for key, value in CPU.constants.items()}
    truth = Model(dataclasses.replace(CPU, constants=constants), 2)
    exact, noisy = [], []
    for task in _tasks():
        for part, time in (("fused", truth.fused(task, Numbers())), ("apart", truth.apart(task, Numbers()))):
            exact.append(Sample(part, (task,), time))  # type: ignore[arg-type]
            noisy.append(dataclasses.replace(exact[-1], us=time * math.exp(chance.gauss(0, 0.05))))
    noisy[7] = dataclasses.replace(noisy[7], us=10 * exact[7].us)
    before = [abs(math.log(e)) for e in errors(CPU, exact, 2)]
    after = [abs(math.log(e)) for e in errors(fit(CPU, noisy, 2), exact, 2)]
    assert sum(before) / len(before) > 0.3
    assert sum(after) / len(after) < 0.05
    assert max(after) < 0.3


def test_a_fit_leaves_alone_what_nothing_was_measured_of() -> None:
    task = _tasks()[0]
    fitted = fit(CPU, [Sample("apart", (task,), 2 * Model(CPU, 2).apart(task, Numbers()))], 2)
    assert fitted.constants["pooling.rate"] == pytest.approx(CPU.constants["pooling.rate"], rel=1e-3)
    assert fitted.constants["link.4.remote"] == pytest.approx(CPU.constants["link.4.remote"], rel=1e-3)
    assert errors(fitted, [Sample("apart", (task,), 2 * Model(CPU, 2).apart(task, Numbers()))], 2)[0] > 0.9
