"""`autofuse doctor`: what it finds here, and what it says where something is missing."""

import json
from collections import namedtuple
from collections.abc import Callable, Iterator

import pytest
import torch
from typer.testing import Result

from autofuse.cli import checks
from autofuse.cli.checks import Check

Command = Callable[..., Result]
Usage = namedtuple("Usage", "total used free")


def only(part: Callable[[], Iterator[Check]]) -> dict[str, Check]:
    return {check.name: check for check in part()}


def test_this_machine_is_usable(command: Command) -> None:
    result = command("doctor", "--json")
    found = json.loads(result.stdout)
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert found["usable"], found
    assert result.exit_code == 0
    assert states["torch"] == states["native kernels"] == states["inductor"] == states["fusion"] == "ok"


def test_what_is_broken_is_told_with_what_to_do(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [Check("torch", "ok", "2.13"), Check("native kernels", "broken", "none", "install a compiler")]
    monkeypatch.setattr(checks, "all_checks", lambda: broken)
    result = command("doctor")
    assert result.exit_code == 1
    assert "BROKEN  native kernels   none" in result.stdout
    assert "install a compiler" in result.stdout
    assert result.stdout.endswith("not usable: mend what is broken above\n")


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.10.1", "broken"),
        ("2.11.0+cu128", "ok"),
        ("2.15.0.dev1", "ok"),
        ("2.16.0", "limited"),
        ("3.0", "limited"),
    ],
)
def test_versions_of_torch(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert only(checks._versions)["torch"].state == state


@pytest.mark.parametrize(("free", "state"), [(1 << 20, "broken"), (64 << 20, "limited"), (8 << 30, "ok")])
def test_shared_memory(free: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: Usage(16 << 30, 0, free))
    check = only(checks._shared_memory)["shared memory"]
    assert check.state == state
    assert ("--shm-size" in check.advice) == (state != "ok")


def test_a_launcher_that_does_not_tell_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    check = only(checks._launcher)["launcher"]
    assert (check.state, check.found) == ("limited", "WORLD_SIZE=8")
    assert "LOCAL_WORLD_SIZE" in check.advice


def test_missing_kernels_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.cpu, "available", lambda: False)
    monkeypatch.setattr(checks.cpu, "why_not", lambda: "reinstall")
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    assert only(checks._native_kernels)["native kernels"] == Check(
        "native kernels", "broken", "none", "reinstall"
    )
    assert only(checks._compiler)["C++ compiler"].state == "limited"


TOPOLOGY = """\
\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tPXB\t0-15
GPU1\tNV18\t X \tPXB\t0-15
NIC0\tPXB\tPXB\t X
"""


def test_gpus_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA H200" if i < 2 else "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    monkeypatch.setattr(checks, "why_not", lambda device: None)
    found = "3 x NVIDIA H200, NVIDIA L4"
    assert only(checks._gpus)["gpus"] == Check("gpus", "ok", found)
    monkeypatch.setattr(checks, "why_not", lambda device: "it is no Hopper" if device.index == 2 else None)
    advice = "collectives on GPU 2 are kept: it is no Hopper"
    assert only(checks._gpus)["gpus"] == Check("gpus", "limited", found, advice)
    monkeypatch.setattr(checks, "why_not", lambda device: "no Triton")
    assert only(checks._gpus)["gpus"].advice == "collectives on GPU 0, 1, 2 are kept: no Triton"
    for built, state in ((None, "limited"), (object(), "ok")):
        monkeypatch.setattr(checks.prepared, "library", lambda built=built: built)
        assert only(checks._gpus)["launches"].state == state


def test_links_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    Done = namedtuple("Done", "stdout")
    monkeypatch.setattr(checks.shutil, "which", lambda name: name)
    monkeypatch.setattr(checks.subprocess, "run", lambda *a, **k: Done(TOPOLOGY))
    assert checks._link_kinds(2) == "NVLink (NV18)"
    monkeypatch.setattr(checks.subprocess, "run", lambda *a, **k: Done(TOPOLOGY.replace("NV18", "SYS")))
    assert checks._link_kinds(2) == "not all NVLink (SYS)"


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(checks._backend)["backend"].state == "ok"
    monkeypatch.setattr(torch.compiler, "list_backends", lambda: ["inductor"])
    check = only(checks._backend)["backend"]
    assert (check.state, "pip install" in check.advice) == ("limited", True)


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _compiler() -> Iterator[Check]:
        raise RuntimeError("first\nlast line")

    for name in ("_inductor", "_fusion", "_gpus"):
        monkeypatch.setattr(checks, name, lambda: iter(()))
    monkeypatch.setattr(checks, "_compiler", _compiler)
    assert Check("compiler", "broken", "last line") in checks.all_checks()
