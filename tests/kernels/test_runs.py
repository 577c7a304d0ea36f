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

from autofuse.lowering import runs, torch_internals
from autofuse.lowering.gpu.choice import calls
from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL, Problem, Way, ways_of
from autofuse.lowering.gpu.choice.launcher import NOT_CAPTURED, Launcher
from autofuse.lowering.gpu.dense import call as dense
from autofuse.lowering.gpu.dense.ways import REDUCE, TWO_SHOT, DenseProblem
from autofuse.lowering.gpu.experts import call as expert_ops
from autofuse.lowering.gpu.experts.ways import COMBINE
from autofuse.lowering.gpu.memory.allocation import REGIONS
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.runs import MEASURED, PREDICTED, Ran, Timed
from tests.kernels.launched import peer_memory

WORLD, SITE = 4, ("group", "direct", "/home/me/model.py:3")
K, N = 64, 8192


def _bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


class Gpu:
    """Whether a graph is captured, what the choice knows, and which way it takes once a call is settled."""

    def __init__(self) -> None:
        self.capturing = False
        self.workspace = Mock(
            world=WORLD, rank=0, programs=132, group_name="group", device=torch.device("cpu"), serial=False,
            calls={},
        )  # fmt: skip
        memory = Mock(programs=132, rank=0)
        self.workspace.enter.return_value = memory, 0, False
        self.workspace.enter_again.return_value = memory
        self.times: list[Timed] = []
        self.settled = ""
        self.first = True

    def knows(self, *times: Timed, settled: str) -> None:
        """The fastest first, which the first call takes, and what is captured."""
        self.times, self.settled, self.first = list(times), settled, True
        self.workspace.calls.clear()

    def way_of(self, problem: Problem, workspace: Mock, variant: Any, capturing: bool) -> tuple[Way, bool]:
        name = self.times[0].name if self.times and (capturing or self.first) else self.settled
        first, self.first = self.first, False
        return ways_of(problem)[name], capturing or not first


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    found = Gpu()
    runs.forget()
    with ExitStack() as stack:
        for module in (dense, calls):
            stack.enter_context(patch.object(module, "current", lambda device: nullcontext()))
        stack.enter_context(patch.object(dense, "workspace_for", lambda *at: found.workspace))
        stack.enter_context(patch.object(expert_ops, "workspace_of", lambda *at: found.workspace))
        stack.enter_context(patch.object(calls, "way_of", found.way_of))
        stack.enter_context(patch.object(calls, "times_of", lambda *at: found.times))
        stack.enter_context(patch.object(Launcher, "launch", lambda self, *operands: None))
        stack.enter_context(patch.object(dist, "all_reduce"))
        stack.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: found.capturing))
        yield found


def _timed(name: str, us: float, known: str = MEASURED) -> Timed:
    return Timed(name, us, known)


def _reduce(m: int) -> Any:
    given = [_bf16(m, K)], [_bf16(K, N)], [], "mm", "sum", False, [], "", "", *SITE
    return dense.run_reduce(REDUCE, FUSED_OPS[REDUCE].parse(given))


def _told(op: str, *shapes: tuple[int, ...]) -> Ran:
    return runs.of_site(runs.SiteKey.of(op, "/elsewhere/model.py:3", "group", shapes))


def test_a_dense_call_notes_its_way_and_the_best_of_torch(gpu: Gpu) -> None:
    ours, shots, nccl = (
        _timed("clusters", 500.0),
        _timed(TWO_SHOT, 700.0, PREDICTED),
        _timed(CUBLAS_NCCL, 800.0),
    )
    gpu.knows(ours, shots, nccl, settled="clusters")
    for _ in range(3):
        _reduce(1024)
    (run,) = _told(REDUCE, (1024, K), (K, N)).runs
    assert (run.fused, run.captured, run.way, run.ours, run.torch) == (True, False, ours, ours, shots)
    assert _told(REDUCE, (2048, K), (K, N)) == Ran()


def test_torchs_way_is_noted_as_torchs(gpu: Gpu) -> None:
    ours, nccl, at = _timed("packets", 9.0), _timed(CUBLAS_NCCL, 24.0), ((8, K), (K, N))
    gpu.knows(ours, nccl, settled=CUBLAS_NCCL)
    _reduce(8)  # as if it were captured
    assert [run.fused for run in _told(REDUCE, *at).runs] == [True]
    _reduce(8)  # the host needs longer to launch packets
    gpu.capturing = True
    _reduce(8)
    eager, captured = _told(REDUCE, *at).runs
    assert (eager.fused, eager.way, eager.captured, eager.ours) == (False, nccl, False, ours)
    assert (captured.fused, captured.way, captured.captured) == (True, ours, True)
    gpu.knows(settled=CUBLAS_NCCL)
    gpu.capturing = False
    _reduce(64)
    (unknown,) = _told(REDUCE, (64, K), (K, N)).runs
    assert (unknown.fused, unknown.way, unknown.torch) == (False, Timed(CUBLAS_NCCL), None)


def test_a_dense_call_that_cannot_be_captured_fell_back(gpu: Gpu) -> None:
    gpu.knows(_timed("packets", 9.0), settled="packets")
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
    at, ours, nccl = ((2, WORLD * 8, K), (2, K, 128)), "clusters across=1", CUBLAS_NCCL
    reference, noted = Mock(return_value="torch's"), Mock(wraps=runs.ran)
    monkeypatch.setitem(FUSED_OPS, COMBINE, replace(FUSED_OPS[COMBINE], reference=reference))
    monkeypatch.setattr(runs, "ran", noted)
    gpu.knows(_timed(ours, 500.0), _timed(nccl, 700.0), settled=ours)
    for _ in range(4):
        _combine(8)
    assert noted.call_count == 1
    assert [(run.fused, run.way.us) for run in _told(COMBINE, *at).runs] == [(True, 500.0)]
    gpu.knows(_timed(nccl, 400.0), _timed(ours, 500.0), settled=nccl)
    assert _combine(8) == "torch's"
    assert [(run.fused, run.way.us) for run in _told(COMBINE, *at).runs] == [(False, 400.0)]
    gpu.knows(_timed(ours, 300.0), settled=ours)
    gpu.capturing, gpu.workspace.enter.return_value = True, None
    assert _combine(8) == "torch's"
    assert [each.why for each in _told(COMBINE, *at).fell_back] == [NOT_CAPTURED]
    assert not any(run.captured for run in _told(COMBINE, *at).runs)


def test_the_sum_of_torch_is_copied_from_memory_that_no_call_uses(gpu: Gpu) -> None:
    """Behind the last barrier of the reduction a peer may be in its next call, and store to this rank."""
    gpu.knows(_timed(TWO_SHOT, 700.0), settled=TWO_SHOT)
    shape = 8192, N
    need = ways_of(DenseProblem(REDUCE, shape[0], K, N, WORLD, torch.bfloat16, 132))[TWO_SHOT].need
    memory = peer_memory(WORLD, need)
    gpu.workspace.enter.return_value = memory, 0, False

    def reduced(x: Tensor, group_name: str, once: bool) -> Tensor:
        for name in REGIONS:
            if name != "products":
                getattr(memory, name).views[0].fill_(0xFF)
        return x

    with patch.object(torch_internals, "symmetric_all_reduce", reduced):
        (total,) = _reduce(shape[0])
    memory.products.views[0].fill_(0xFF)  # as the product of a later call does
    assert total.shape == shape
    assert not total.any()
