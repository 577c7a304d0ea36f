"""The workspace of GPUs on CPU ranks: their memory is plain, and CUDA answers at once."""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.lowering import torch_internals
from autofuse.lowering.gpu.memory import graphs, workspace
from autofuse.native_kernels.gpu.memory import Need

CPU = torch.device("cpu", 0)


class Driver:
    """As `cuda.bindings.driver`, of one capture after another; a graph calls its destructor when it ends."""

    def __init__(self) -> None:
        self.capture: int | None = None
        self.held: dict[int, list[Any]] = {}
        for name in ("CUstreamCaptureStatus", "CUuserObject_flags", "CUuserObjectRetain_flags"):
            setattr(self, name, MagicMock())

    def CUhostFn(self, address: int) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        active = self.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return 0, active, self.capture, self.capture, (), 0

    def cuUserObjectCreate(self, at: int, destroy: Any, count: int, flags: Any) -> tuple[Any, ...]:
        return 0, lambda: destroy(at)

    def cuGraphRetainUserObject(self, graph: int, held: Any, count: int, flags: Any) -> tuple[int]:
        self.held.setdefault(graph, []).append(held)
        return (0,)

    def end(self, graph: int) -> None:
        for destroy in self.held.pop(graph):
            destroy()


class Gpu:
    """What a rank's GPU has room for."""

    def __init__(self) -> None:
        self.room, self.driver, self.asked = 1 << 40, Driver(), 0
        self.serial = False
        self.uuid = f"{dist.get_rank()}-abc"

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.asked += 1
        if size > self.room:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes: {self.asked}")
        return torch.empty(size, dtype=dtype)

    @contextmanager
    def capturing(self, graph: int) -> Iterator[None]:
        self.driver.capture = graph
        yield
        self.driver.capture = None


def needing(inbox: int) -> Any:
    return lambda: Need(inbox=inbox)


@contextmanager
def gpus() -> Iterator[Gpu]:
    gpu = Gpu()
    cuda = {
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "device": lambda device: nullcontext(),
        "Event": MagicMock(),
        "current_stream": MagicMock(),
        "is_current_stream_capturing": lambda: gpu.driver.capture is not None,
        "device_count": lambda: 2,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132, uuid=gpu.uuid),
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **cuda))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda t: t))
        stack.enter_context(patch.object(graphs, "_driver", lambda: gpu.driver))
        stack.enter_context(
            patch.multiple(
                torch_internals,
                symmetric_empty=gpu.empty,
                symmetric_views=lambda own, group: [own] * group.size(),
                current_raw_stream=lambda device: 1,
            )
        )
        stack.enter_context(
            patch.multiple(
                workspace,
                why_not=lambda device: None,
                is_serial=lambda device: gpu.serial,
                clusters_at_once=lambda device: (132, 66, 33, 16),
                CopyEngine=lambda memory: SimpleNamespace(memory=memory),
            )
        )
        yield gpu
