"""What calls on GPUs note for reports: the way that runs, its time, and what fell back; without a GPU."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering import runs
from autofuse.lowering.gpu.choice import calls, choose
from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL
from autofuse.lowering.gpu.choice.launcher import NOT_CAPTURED, Launcher
from autofuse.lowering.gpu.choice.points import Point
from autofuse.lowering.gpu.dense import call as dense
from autofuse.lowering.gpu.dense.ways import REDUCE, TWO_SHOT
from autofuse.lowering.gpu.experts import call as expert_ops
from autofuse.lowering.gpu.experts.ways import COMBINE
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.runs import MEASURED, PREDICTED, Ran, Timed

WORLD, SITE = 4, ("group", "direct", "/home/me/model.py:3")
K, N = 64, 8192


def _bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


class Gpu:
    """Whether a graph is captured, and what the choice knows."""

    def __init__(self) -> None:
        self.capturing = False
        self.memory = Mock(programs=132, rank=0)
        self.workspace = Mock(
            world=WORLD, rank=0, programs=132, group_name="group", device=torch.device("cpu"), serial=False,
            calls={},
        )  # fmt: skip
        self.workspace.enter.return_value = self.memory, 0, False
        self.workspace.enter_again.return_value = self.memory
        self.agreed = choose._Agreement(())

    def knows(self, op: str, m: int, k: int, n: int, **times: float) -> None:
        ways = tuple(sorted(((WAYS[name], us) for name, us in times.items()), key=lambda way: way[1]))
        self.agreed = choose._Agreement((Point(op, m, k, n, WORLD, ways),))
        self.workspace.calls.clear()


WAYS = {
    "clusters": "clusters",
    "rows": "clusters across=1",
    "packets": "packets",
    "nccl": CUBLAS_NCCL,
    "two_shot": TWO_SHOT,
}


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    found = Gpu()
    runs.forget()
    with ExitStack() as stack:
        for module in (dense, calls):
            stack.enter_context(patch.object(module, "current", lambda device: nullcontext()))
        stack.enter_context(patch.object(dense, "workspace_for", lambda *at: found.workspace))
        stack.enter_context(patch.object(expert_ops, "workspace_of", lambda *at: found.workspace))
        stack.enter_context(patch.object(choose, "_agreement", lambda workspace: found.agreed))
        stack.enter_context(patch.object(Launcher, "launch", lambda self, *operands: None))
        stack.enter_context(patch.object(dist, "all_reduce"))
        stack.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: found.capturing))
        yield found


def _reduce(m: int) -> Any:
    given = [_bf16(m, K)], [_bf16(K, N)], [], "mm", "sum", False, *SITE
    return dense.run_reduce(REDUCE, FUSED_OPS[REDUCE].parse(given))


def _told(op: str, *shapes: tuple[int, ...]) -> Ran:
    return runs.of_site(runs.SiteKey.of(op, "/elsewhere/model.py:3", "group", shapes))


def test_a_dense_call_notes_its_way_and_the_best_of_torch(gpu: Gpu) -> None:
    gpu.knows(REDUCE, 1024, K, N, clusters=500.0, two_shot=700.0, nccl=800.0)
    for _ in range(3):
        _reduce(1024)
    _reduce(2048)
    expected = Timed("clusters", 500.0, MEASURED)
    (run,) = _told(REDUCE, (1024, K), (K, N)).runs
    assert (run.fused, run.captured, run.way, run.ours) == (True, False, expected, expected)
    assert run.torch == Timed(TWO_SHOT, 700.0, MEASURED)
    (far,) = _told(REDUCE, (2048, K), (K, N)).runs
    assert far.way == replace(expected, known=PREDICTED)


def test_torchs_way_is_noted_as_torchs(gpu: Gpu) -> None:
    gpu.knows(REDUCE, 8, K, N, packets=9.0, two_shot=20.0, nccl=24.0)
    _reduce(8)  # as if it were captured
    at = (8, K), (K, N)
    assert [run.fused for run in _told(REDUCE, *at).runs] == [True]
    _reduce(8)  # the host needs longer to launch packets
    gpu.capturing = True
    _reduce(8)
    eager, captured = _told(REDUCE, *at).runs
    assert (eager.fused, eager.way.name, eager.captured) == (False, CUBLAS_NCCL, False)
    assert (captured.fused, captured.way.name, captured.captured) == (True, "packets", True)
    assert eager.ours is not None
    assert eager.ours.name == "packets"
    gpu.knows(REDUCE, 64, K, N)
    _reduce(64)
    (unknown,) = _told(REDUCE, (64, K), (K, N)).runs
    assert (unknown.fused, unknown.way, unknown.torch) == (False, Timed(CUBLAS_NCCL), None)


def test_a_dense_call_that_cannot_be_captured_fell_back(gpu: Gpu) -> None:
    gpu.knows(REDUCE, 8, K, N, packets=9.0, nccl=24.0)
    gpu.capturing, gpu.workspace.enter.return_value = True, None
    for _ in range(2):
        (y,) = _reduce(8)
        assert y.shape == (8, N)
    told = _told(REDUCE, (8, K), (K, N))
    assert told.runs == ()
    assert [(each.why, each.count) for each in told.fell_back] == [(NOT_CAPTURED, 2)]


def _combine(rows: int) -> Any:
    args = [_bf16(2, WORLD * rows, K)], [_bf16(2, K, 128)]
    given = *args, [], [], "mm", 0, None, None, [], [], 1, 1, False, *SITE
    return expert_ops.run_combine(FUSED_OPS[COMBINE].parse(given))


def test_calls_of_experts_note_theirs_once(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, at = WORLD * 8, 2 * 128, ((2, WORLD * 8, K), (2, K, 128))
    gpu.knows(COMBINE, m, K, n, rows=500.0, nccl=700.0)
    reference, noted = Mock(return_value="torch's"), Mock(wraps=runs.ran)
    monkeypatch.setitem(FUSED_OPS, COMBINE, replace(FUSED_OPS[COMBINE], reference=reference))
    monkeypatch.setattr(runs, "ran", noted)
    for _ in range(4):
        _combine(8)
    assert noted.call_count == 1
    assert [(run.fused, run.way.us) for run in _told(COMBINE, *at).runs] == [(True, 500.0)]
    gpu.knows(COMBINE, m, K, n, rows=500.0, nccl=400.0)
    assert _combine(8) == "torch's"
    assert [(run.fused, run.way.us) for run in _told(COMBINE, *at).runs] == [(False, 400.0)]
    gpu.knows(COMBINE, m, K, n, rows=300.0, nccl=400.0)
    gpu.capturing, gpu.workspace.enter.return_value = True, None
    assert _combine(8) == "torch's"
    assert [each.why for each in _told(COMBINE, *at).fell_back] == [NOT_CAPTURED]
    assert not any(run.captured for run in _told(COMBINE, *at).runs)
