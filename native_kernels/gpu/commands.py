"""What streams do beside the kernels of a call, as data: `carry_out` does it through the driver's bindings.

`prepared.py` does the same again in one call of C, together with the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

from .prepared import record

OF_CALL = 0
"""In place of a stream: that of the call."""


class Do(IntEnum):
    """launch.cpp has the same numbers."""

    RECORD = 0
    """Record the event `at`."""
    AWAIT = 1
    """Later work of the stream waits for the event `at`."""
    TAKE = 2
    """Wait until the word `at` is at least 1 (more after a wait of a kernel has given up), and clear it."""
    COPY = 3
    """Copy `nbytes` from `source` to `at`."""


class Command(NamedTuple):
    """at, source: addresses; of an event its handle."""

    do: Do
    stream: int
    at: int
    source: int = 0
    nbytes: int = 0


def carry_out(commands: Sequence[Command], stream: int) -> None:
    """The commands in their order; stream: that of the call. RuntimeError if the driver refuses one."""
    driver = _bindings()
    for do, on, at, source, nbytes in commands:
        on = on or stream
        if do is Do.RECORD:
            _call(driver.cuEventRecord, at, on)
        elif do is Do.AWAIT:
            _call(driver.cuStreamWaitEvent, on, at, 0)
        elif do is Do.TAKE:
            least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
            _call(driver.cuStreamWaitValue32, on, at, 1, least)
            _call(driver.cuStreamWriteValue32, on, at, 0, 0)
        else:
            _call(driver.cuMemcpyDtoDAsync, at, source, nbytes, on)
    record(lambda: tuple(commands))


def new_stream() -> int:
    """A stream that is not torch's, and does not wait for the default stream."""
    driver = _bindings()
    return int(_call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value))


def new_event() -> int:
    driver = _bindings()
    return int(_call(driver.cuEventCreate, driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))


@cache
def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError(
            "copy engines need the package cuda-bindings, which CUDA builds of torch bring"
        ) from error
    return driver


def _call(function: Any, *args: Any) -> Any:
    error, *results = function(*args)
    if error != _bindings().CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a copy engine could not be set going: {function.__name__}: {error}")
    return results[0] if results else None
