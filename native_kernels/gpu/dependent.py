"""Programmatic dependent launch: the second kernel of a call is placed while the first one ends.

    first    grid_wait   multiply, send   peers are here: launch_dependents   add up, end
    second                                    placed as blocks end, load operands   grid_wait   read the sums

`grid_wait` (PTX: griddepcontrol.wait) returns once the kernels before have ended and their stores can be
read. Every kernel that is launched in this manner calls `grid_wait`. Before that call, the second kernel may
read only memory that the first kernel does not write.

The second kernel holds multiprocessors while it waits. So the first kernel calls `launch_dependents` only
when all its peers have started the call: from then on it waits for no other kernel. If the first kernel does
not call `launch_dependents`, the second one is placed when all blocks of the first one have ended.

CUDA programming guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

IN_GRAPHS_SINCE = 12030
"""The first driver that captures such launches in CUDA graphs."""

_local = threading.local()


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Within it, this thread launches the kernels of one call, all of which call `grid_wait`."""
    before = getattr(_local, "inside", False)
    _local.inside = True
    try:
        yield
    finally:
        _local.inside = before


def is_dependent() -> bool:
    """Whether a launch of this thread may begin before the kernels in front of it have ended."""
    return getattr(_local, "inside", False) and _is_known()


@cache
def _is_known() -> bool:
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return False
    return not failed and version.value >= IN_GRAPHS_SINCE
