"""The commands of copy streams beside the kernels of a call, as data: events, waits and copies.

`carry_out` carries out the commands through the driver's bindings. `prepared.py` repeats them in one call of
C, together with the launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from . import driver
from .prepared import record

OF_CALL = 0
"""Stands for the stream of the call."""


class Do(IntEnum):
    """Kinds of commands. launch.cpp has the same numbers."""

    RECORD = 0
    """Record the event `at`."""
    AWAIT = 1
    """Later work of the stream waits for the event `at`."""
    TAKE = 2
    """Wait until the word `at` is at least 1, and clear it. After a wait of a kernel has given up, the word
    may be larger."""
    COPY = 3
    """Copy `nbytes` from `source` to `at`."""


class Command(NamedTuple):
    """One command. at, source: addresses; for events, `at` is the handle of the event."""

    do: Do
    stream: int
    at: int
    source: int = 0
    nbytes: int = 0


def carry_out(commands: Sequence[Command], stream: int) -> None:
    """The commands in their order; stream: that of the call. RuntimeError if the driver refuses one."""
    functions = driver.bindings()
    for do, on, at, source, nbytes in commands:
        on = on or stream
        if do is Do.RECORD:
            driver.call(functions.cuEventRecord, at, on)
        elif do is Do.AWAIT:
            driver.call(functions.cuStreamWaitEvent, on, at, 0)
        elif do is Do.TAKE:
            least = functions.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
            driver.call(functions.cuStreamWaitValue32, on, at, 1, least)
            driver.call(functions.cuStreamWriteValue32, on, at, 0, 0)
        else:
            driver.call(functions.cuMemcpyDtoDAsync, at, source, nbytes, on)
    record(lambda: tuple(commands))


def new_stream() -> int:
    """A stream that is not torch's, and does not wait for the default stream."""
    functions = driver.bindings()
    return int(driver.call(functions.cuStreamCreate, functions.CUstream_flags.CU_STREAM_NON_BLOCKING.value))


def new_event() -> int:
    functions = driver.bindings()
    return int(driver.call(functions.cuEventCreate, functions.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))
