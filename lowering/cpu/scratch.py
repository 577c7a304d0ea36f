"""Private float32 memory that ops of a group use one after another.

The system hands out new memory page by page. That takes longer than the work of an optimizer's step on the
memory: 27 ms for 32 MiB that are written in 3 ms. So the memory is kept until the group is destroyed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autofuse.lowering.cpu.workspace import Workspace

_kept: WeakKeyDictionary[Workspace, Tensor] = WeakKeyDictionary()


@contextmanager
def scratch(workspace: Workspace, count: int) -> Iterator[Tensor]:
    """Memory of at least `count` elements of any values. Calls of other threads get memory of their own
    meanwhile."""
    found = _kept.pop(workspace, None)
    if found is None or len(found) < count:
        found = torch.empty(count, dtype=torch.float32, device="cpu")
    try:
        yield found
    finally:
        _kept[workspace] = found


def scratch_bytes(workspace: Workspace) -> int:
    """Bytes that are kept between calls."""
    found = _kept.get(workspace)
    return 0 if found is None else found.nbytes
