"""Names of shared memory, which last from when a rank makes the memory until its peers have opened it.

A job that is killed in between leaves the files, and their memory, behind. Therefore a process that makes a
file locks it (`flock`). The lock ends with the process, in whatever container that runs. A process that meets
its peers for the first time removes the files that it can lock.
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


def locked(make: Callable[[], int]) -> int:
    """The descriptor of the new file that `make` opens, with a lock that lasts until the descriptor and every
    mapping of it are closed."""
    while True:
        fd = make()
        with suppress(OSError):  # on a system without such locks no process removes files
            fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # another process has removed the file, which was not locked yet


@cache
def remove_left_behind() -> None:
    """Remove the files of processes that were killed. Once in a process."""
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
