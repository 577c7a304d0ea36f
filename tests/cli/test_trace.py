"""`autofuse trace` with a recorder that invents traces: what it is asked for, and what is made of it."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from autofuse.cli import trace as trace_command
from autofuse.cli.app import app
from autofuse.cli.gpu_ranks import OPS, extents
from autofuse.timeline import Kind
from tests.ranks import RankPool

Command = Callable[..., Result]
WORLD = 2


def invent(calls: list[tuple[Any, ...]], rank: int) -> Callable[..., Tensor]:
    """A `record` that notes its arguments: one program, one tile of rank 0, `2 + rank` microseconds."""

    def record(*arguments: Any) -> Tensor:
        calls.append(arguments)
        trace = torch.zeros(3, 8, 2, dtype=torch.int64)
        kinds = (Kind.BEGUN, Kind.COMPUTED, Kind.ENDED)
        for i, kind in enumerate(kinds):
            trace[0, i, 0] = 10**9 + i * 1000 * (2 + rank)
            trace[0, i, 1] = kind << 32 | i
        return trace

    return record


def _on_ranks(rank: int, world: int, out: str, op: str) -> tuple[str, list[tuple[Any, ...]]]:
    """The command on a rank of a gloo group, with what it printed and what it asked the recorder for."""
    calls: list[tuple[Any, ...]] = []
    recorder = ModuleType("autofuse.lowering.gpu.dense.trace")
    recorder.__dict__["record"] = invent(calls, rank)

    @contextmanager
    def group(command: str) -> Iterator[tuple[int, int]]:
        yield rank, world

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "autofuse.lowering.gpu", ModuleType("autofuse.lowering.gpu"))
        patch.setitem(sys.modules, "autofuse.lowering.gpu.dense.trace", recorder)
        patch.setattr(trace_command, "gpu_ranks", group)
        sizes = ("--tokens", "64", "--size", "256,64", "--dtype", "float16")
        result = CliRunner().invoke(app, ["trace", op, *sizes, "--out", out], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, calls


@pytest.mark.parametrize("op", OPS)
def test_files_and_table_of_all_ranks(op: str, tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    (shown, calls), (silent, _) = ranks(WORLD).run(_on_ranks, str(tmp_path / "a"), op)
    m, k, n = {"all_gather_matmul": (64, 64, 128), "matmul_all_gather": (64, 256, 32)}.get(op, (64, 128, 64))
    assert calls == [(op, m, k, n, torch.float16, "direct")]
    assert silent == ""
    assert f"{op}: [{m}, {k}] @ [{k}, {n}] on each of 2 ranks, float16, direct" in shown
    assert "rank 0: last tile computed at 2.0, kernel ended at 4.0" in shown
    assert "rank 1: last tile computed at 3.0, kernel ended at 6.0" in shown
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "a.svg"]
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert [e["dur"] for e in events if e["name"] == "COMPUTED"] == [2.0, 3.0]
    assert ElementTree.parse(tmp_path / "a.svg").getroot().get("aria-label", "").startswith(op)


def test_ranks_share_k_and_a_gather_goes_the_other_way() -> None:
    assert extents("matmul_all_reduce", 7, "28672,8192", 4) == (7, 7168, 8192)
    assert extents("matmul_reduce_scatter", 8, "28672, 8192", 4) == (8, 7168, 8192)
    assert extents("all_gather_matmul", 8, "28672,8192", 4) == (8, 8192, 7168)
    assert extents("matmul_all_gather", 7, "8192,128256", 4) == (7, 8192, 32064)


@pytest.mark.parametrize(
    ("op", "tokens", "size", "text"),
    [
        ("matmul_all_reduce", 8, "8192", "expected K,N such as 8192,8192"),
        ("matmul_all_reduce", 8, "8190,8192", "a multiple of 4 ranks"),
        ("matmul_all_reduce", 0, "8192,8192", "--tokens 0"),
        ("matmul_reduce_scatter", 7, "8192,8192", "--tokens 7: expected a positive multiple of 4"),
        ("matmul_all_gather", 7, "8192,8190", "the second a multiple of 4 ranks"),
        ("matmul_all_gather", 0, "8192,8192", "--tokens 0"),
    ],
)
def test_extents_that_cannot_be_cut(op: str, tokens: int, size: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        extents(op, tokens, size, 4)


MISTAKES = {
    "unknown op": (["matmul"], "expected one of matmul_all_reduce, matmul_reduce_scatter"),
    "unknown order": (["matmul_all_reduce", "--order", "random"], "expected one of ring, direct"),
    "order of a gather": (["all_gather_matmul", "--order", "ring"], "know direct only"),
    "bad dtype": (["matmul_all_reduce", "--dtype", "float32"], "expected one of bfloat16, float16"),
    "no such folder": (["matmul_all_reduce", "--out", "/no/such/folder/a"], "there is no folder"),
    "no torchrun": (["matmul_all_reduce"], "start `torchrun --nproc-per-node 4 -m autofuse trace`"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_a_line(name: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    arguments, text = MISTAKES[name]
    result = command("trace", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 4


@pytest.mark.parametrize("gpus", [0, 2])
def test_more_ranks_than_gpus(gpus: int, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", str(gpus))
    result = command("trace", "matmul_all_reduce")
    assert result.exit_code == 2
    assert f"local rank {gpus} has no GPU: torch finds {gpus}" in result.stderr
