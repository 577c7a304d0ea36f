"""Which GPUs are fused over, by what the driver, NVML and torch answer; here all of these are faked."""

import ctypes
import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor

from autofuse.lowering import torch_internals
from autofuse.lowering.cpu.rendezvous import NotShared
from autofuse.lowering.gpu import links, support
from autofuse.lowering.gpu.choice.choose import choose, predictor_of
from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.choice.launcher import Launcher
from autofuse.lowering.gpu.choice.points import Point
from autofuse.lowering.gpu.dense.ways import DenseProblem
from autofuse.lowering.gpu.memory.workspace import workspace_for
from tests.ranks import RankPool, fresh_group
from tests.workspace.gpu_memory import CPU, gpus

Ranks = Callable[[int], RankPool]
OVERLAPPING = "detected allocations from overlapping devices from different ranks."


class Nvml:
    """Two GPUs; `missing` is what their link has not."""

    def __init__(self, missing: int = -1, seen: tuple[str, ...] = ("0-abc", "1-abc")) -> None:
        self.missing, self.seen = missing, seen

    def nvmlInit_v2(self) -> int:
        return 0

    nvmlShutdown = nvmlInit_v2

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return 0 if uuid.decode().removeprefix("GPU-") in self.seen else 6

    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, asked: int, status: Any) -> int:
        status._obj.value = 3 if asked == self.missing else 0
        return 0


def _masked(rank: int, world: int, nvml: Any, torch_can: bool, shared: bool) -> str:
    """Of a rank that sees one GPU, number 0: empty if its group has memory, or why not."""

    def rendezvous(own: Tensor, group: str) -> Any:
        if os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") != "1" or not torch_can:
            raise RuntimeError(f"CUDASymmetricMemoryAllocator::rendezvous: {OVERLAPPING}")
        return SimpleNamespace(get_buffer=lambda r, shape, dtype: own)

    from torch.distributed import _symmetric_memory

    mapping = torch_internals.symmetric_views
    with gpus() as gpu, patch.object(_symmetric_memory, "rendezvous", rendezvous):
        gpu.uuid = "0-abc" if shared else gpu.uuid
        torch_internals.symmetric_views = mapping
        side = MagicMock(return_value=nvml, side_effect=None if nvml else OSError("no such library"))
        with patch.object(torch.cuda, "device_count", lambda: 1), patch.object(ctypes, "CDLL", side):
            try:
                workspace_for(fresh_group(), CPU)
            except NotShared as error:
                return str(error)
            assert "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" not in os.environ
    return ""


@pytest.mark.parametrize(
    ("nvml", "torch_can", "shared", "says"),
    [
        (Nvml(), True, False, ""),
        (Nvml(), False, False, f"rank 0: torch's symmetric memory cannot map .*{OVERLAPPING}"),
        (Nvml(), True, True, "ranks 0 and 1 use one GPU"),
        (Nvml(missing=links.NVLINK), True, False, "rank 0: there is no NVLink between GPUs 0-abc and 1-abc"),
        (Nvml(missing=links.ATOMICS), True, False, "there is no native atomics between"),
        (Nvml(seen=("0-abc",)), True, False, "NVML does not see GPU 1-abc"),
        (None, True, False, "NVML is missing"),
    ],
)  # fmt: skip
def test_one_visible_gpu_a_rank(ranks: Ranks, nvml: Any, torch_can: bool, shared: bool, says: str) -> None:
    """Fused where torch can, else kept with one reason on all ranks, and never an exception."""
    found = ranks(2).run(_masked, nvml, torch_can, shared)
    assert found[0] == found[1]
    assert re.search(says, found[0]), found
    assert bool(says) == bool(found[0])


@pytest.mark.parametrize(
    ("access", "atomics", "error", "says"),
    [
        (True, 1, 0, None),
        (False, 1, 0, "cannot access all others"),
        (True, 0, 0, "without native atomics, so not over NVLink"),
        (True, 1, 101, "without native atomics, so not over NVLink"),
    ],
)
def test_links_between_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, access: bool, atomics: int, error: int, says: str | None
) -> None:
    bindings = pytest.importorskip("cuda.bindings")
    driver = MagicMock()
    driver.cuInit.return_value = (0,)
    driver.cuDeviceGet.side_effect = lambda index: (0, index)
    driver.cuDeviceGetP2PAttribute.return_value = error, atomics
    monkeypatch.setattr(bindings, "driver", driver)
    links.without_atomics.cache_clear()
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "get_device_capability": lambda index: (9, 0),
        "device_count": lambda: 2,
        "can_device_access_peer": lambda i, j: access,
    }
    with (
        patch.multiple(torch.cuda, **answers),
        patch.object(support.compiler, "why_not", lambda: None),
        patch.object(support, "has_triton", lambda: True),
    ):
        found = support.why_not.__wrapped__(torch.device("cuda", 0))
    links.without_atomics.cache_clear()
    assert (found is None) == (says is None)
    assert says is None or says in str(found)


@pytest.mark.parametrize(("blocking", "queries", "serial"), [
    ("0", [False], False),
    ("", [True, True, False], False),  # this thread was late
    ("0", [True, True, True], True),
    ("1", [], True),
])  # fmt: skip
def test_launches_that_return_late(
    monkeypatch: pytest.MonkeyPatch, blocking: str, queries: list[bool], serial: bool
) -> None:
    """By its name, or by asking a GPU that sleeps whether it is still at it."""
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    event = MagicMock()
    event.query.side_effect = queries
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    slept = MagicMock()
    monkeypatch.setattr(torch_internals, "gpu_sleep", slept)
    assert support.is_serial(CPU) == serial
    assert slept.call_count == len(queries)


def _serial(rank: int, world: int) -> bool:
    with gpus() as gpu:
        gpu.serial = rank == 1
        return workspace_for(fresh_group(), CPU).serial


def test_one_rank_that_is_serial(ranks: Ranks) -> None:
    """All ranks choose alike."""
    assert ranks(2).run(_serial) == [True, True]


@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"])
def test_ways_of_copy_engines(op: str) -> None:
    """They are not taken, however fast, where the host cannot work beside a kernel."""
    problem = DenseProblem(op, 4096, 4096, 4096, 4, torch.bfloat16)
    ways = ways_of(problem)
    copied = [name for name, way in ways.items() if way.is_copied]
    assert copied
    assert {"parts", "clusters copied=1"} & set(copied)
    times = {name: 1.0 + i for i, name in enumerate([*copied, *(w for w in ways if w not in copied)])}
    predictor = predictor_of((Point.of(problem, times),))
    for launched in (False, True):
        assert ways[choose(problem, predictor, launched=launched).way].is_copied != launched
        assert not ways[choose(problem, predictor, serial=True, launched=launched).way].is_copied
    with pytest.raises(RuntimeError, match="CUDA_LAUNCH_BLOCKING"):
        Launcher(MagicMock(serial=True), ways[copied[0]], op, "here", problem, ())
