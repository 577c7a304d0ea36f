"""Names of shared memory, which last from when a rank makes the memory until its peers have opened it.

A job that is killed in between leaves names behind, and with them the memory. So who makes a name locks its
file: the lock ends with the process. A file that somebody else can lock belongs to nobody, whatever
container its process was in, and the next process that meets removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache

FOLDER = "/dev/shm"
_OURS = re.compile(r"af-(board-)?\d+-[0-9a-f]{8}(-\d+)?")
_TRIES = 3


def locked(make: Callable[[], int]) -> int:
    """The descriptor of the new file that `make` opens, with a lock that lasts until the descriptor and every
    mapping of it are closed."""
    for _ in range(_TRIES):
        fd = make()
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
        except OSError:  # a system without such locks: nobody else gets one either
            break
        if os.fstat(fd).st_nlink:
            break
        os.close(fd)  # it was taken for one left behind, before it was locked
    return fd


@cache
def remove_left_behind() -> None:
    """Remove the names that processes have left behind that were killed. Once in a process."""
    with suppress(OSError):  # where shared memory has no folder, names cannot be found
        for name in filter(_OURS.fullmatch, os.listdir(FOLDER)):
            with suppress(OSError):  # of another user, locked, or removed meanwhile
                _remove_unlocked(f"{FOLDER}/{name}")


def _remove_unlocked(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:  # else the name may be that of a newer file
            os.unlink(path)
    finally:
        os.close(fd)
