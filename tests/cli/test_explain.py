"""`autofuse explain`: scripts for torchrun, scripts that spawn, scripts that fail; nothing runs for real."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import Result

from autofuse import Reason, Report
from tests.cli import scripts

Command = Callable[..., Result]


def test_a_script_for_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.TRAIN)
    (tmp_path / "helper.py").write_text("NAME = 'helper'")
    options = ("--world=4", "--rank=3", "--policy=always", f"--json={tmp_path / 'report.json'}")
    autofuse = (sys.executable, "-m", "autofuse")
    command = [*autofuse, "explain", *options, tmp_path / "train.py", "--hidden=16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "rank 3 of helper hidden 16\nautofuse: 1 fused (not yet run), 0 kept in 2 graphs\n"
    )
    assert done.stderr == ""
    report = Report.from_json((tmp_path / "report.json").read_text())
    assert [(site.pattern, site.world) for site in report.fused] == [("matmul_all_reduce", 2)]


def test_a_script_that_spawns_and_other_backends(tmp_path: Path, command: Command) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(scripts.SPAWN)
    result = command("explain", "--all", "--policy", "always", "--rank", 1, script)
    assert result.exit_code == 0, result.output
    assert "sums 0 0.0 torch.Size([8, 4])" in result.stdout
    assert "autofuse: 1 fused (not yet run), 0 kept in 1 graph" in result.stdout
    assert "the script exited with 7" in result.stderr


def test_without_all_other_backends_are_left_alone(tmp_path: Path, command: Command) -> None:
    script = tmp_path / "eager.py"
    script.write_text("import torch\nprint(torch.compile(torch.sin, backend='eager')(torch.zeros(1)))")
    result = command("explain", script)
    assert result.exit_code == 1
    assert "tensor([0.])" in result.stdout
    assert "nothing was compiled" in result.stderr
    assert "--all" in result.stderr
    assert command("explain", "--all", script).exit_code == 0


def test_the_backend_may_be_the_function(tmp_path: Path, command: Command) -> None:
    script = tmp_path / "function.py"
    named = "import autofuse.backend\n" + scripts.FAILS
    script.write_text(named.replace('backend="autofuse"', "backend=autofuse.backend.autofuse"))
    assert "autofuse: 0 fused, 1 kept in 1 graph" in command("explain", script).stdout


def test_a_script_that_fails_is_reported_up_to_there(tmp_path: Path, command: Command) -> None:
    script, page = tmp_path / "fails.py", tmp_path / "report.json"
    script.write_text(scripts.FAILS)
    result = command("explain", "--json", page, script)
    assert result.exit_code == 0
    assert f"the script ended with RuntimeError: expected 1, got 0.0 ({script}:11)" in result.stderr
    assert "Traceback" not in result.stderr
    (site,) = Report.from_json(page.read_text()).sites
    assert site.reason is Reason.POLICY_NEVER  # of the script's own options
    chosen = command("explain", "--policy", "always", "--world", 4, "--traceback", script)
    assert "autofuse: 1 fused" in chosen.stdout  # of the command line's, which win
    assert "Traceback" in chosen.stderr


def test_ranks_of_several_hosts(tmp_path: Path, command: Command) -> None:
    script = tmp_path / "fails.py"
    script.write_text(scripts.FAILS)
    result = command("explain", "--world", 4, "--ranks-per-host", 2, "--policy", "always", script)
    assert "group_spans_hosts" in result.stdout


def test_a_module(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_as_module.py").write_text(scripts.FAILS)
    monkeypatch.chdir(tmp_path)
    result = command("explain", "-m", "fails_as_module")
    assert result.exit_code == 0
    assert "autofuse: 0 fused, 1 kept in 1 graph" in result.stdout


def test_an_interrupted_script_is_reported(tmp_path: Path, command: Command) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(scripts.FAILS.replace("raise RuntimeError", "raise KeyboardInterrupt"))
    result = command("explain", script)
    assert result.exit_code == 0
    assert "autofuse: 0 fused, 1 kept" in result.stdout
    assert "the script was interrupted" in result.stderr


def test_everything_is_as_before_afterwards(tmp_path: Path, command: Command) -> None:
    def state() -> tuple:
        patched = (torch.compile, dist.init_process_group, dist.new_group, torch.multiprocessing.spawn)
        return (*patched, dict(os.environ), list(sys.argv), list(sys.path), dist.is_initialized())

    script = tmp_path / "fails.py"
    script.write_text(scripts.FAILS)
    before = state()
    assert command("explain", script).exit_code == 0
    assert state() == before


def test_the_page_is_written(tmp_path: Path, command: Command) -> None:
    script, page = tmp_path / "fails.py", tmp_path / "report.html"
    script.write_text(scripts.FAILS)
    assert command("explain", "--html", page, script).exit_code == 0
    assert "policy_never" in page.read_text()
