"""Tells whether CUDA graphs that use some memory still exist. Only the driver knows when one is destroyed."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from autofuse.lowering import torch_internals

_SEMAPHORE_BYTES = 64


class Graphs:
    """The CUDA graphs that launches on some memory were captured into, and whether one of them still lives.

    Each graph gets an object that the driver destroys with the last copy of the graph. Its destructor is
    `sem_post`, which needs neither Python nor CUDA, and the semaphore is never freed: the driver may call it
    while the process ends.
    """

    def __init__(self) -> None:
        self._captures: set[int] = set()
        self._ended = 0  # address of the semaphore, once there is one
        self._forever = False

    def note(self, device: int) -> None:
        """Adds the graph that the current stream of the device is captured into. Called before a launch."""
        try:
            driver = _driver()
            stream = torch_internals.current_raw_stream(device)
            status, capture, graph, *_ = _results(driver.cuStreamGetCaptureInfo(stream))
            if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
                raise RuntimeError("the stream is not captured")
            if int(capture) in self._captures:
                return
            self._ended = self._ended or _new_semaphore()
            flags = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
            post = driver.CUhostFn(ctypes.cast(_libc().sem_post, ctypes.c_void_p).value)
            (held,) = _results(driver.cuUserObjectCreate(self._ended, post, 1, flags.value))
            move = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
            _results(driver.cuGraphRetainUserObject(graph, held, 1, move.value))
            self._captures.add(int(capture))
        except (ImportError, AttributeError, RuntimeError, TypeError, ValueError):
            self._forever = True  # nobody will tell when the graph ends

    @property
    def any(self) -> bool:
        """Whether a graph may still be replayed."""
        return self._forever or len(self._captures) > self._count_ended()

    def _count_ended(self) -> int:
        if not self._ended:
            return 0
        found = ctypes.c_int()
        _libc().sem_getvalue(ctypes.c_void_p(self._ended), ctypes.byref(found))
        return found.value


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _results(found: tuple[Any, ...]) -> list[Any]:
    error, *results = found
    if int(error):
        raise RuntimeError(f"the driver answers {error}")
    return results


def _new_semaphore() -> int:
    allocate = _libc().calloc
    allocate.restype = ctypes.c_void_p
    address: int = allocate(ctypes.c_size_t(1), ctypes.c_size_t(_SEMAPHORE_BYTES))
    if not address or _libc().sem_init(ctypes.c_void_p(address), 0, 0):
        raise RuntimeError("no semaphore")
    return address


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
