"""A thread that looks for failures of fused ops which nobody is waiting for, and what it has found.

A captured CUDA graph is replayed without a host that could raise. So each `Watched` is asked some times a
second, and its group is in `failed` once it has failed: compiled functions look there before they run.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol
from weakref import ref

log = logging.getLogger(__name__)

PERIOD_S = 0.1
"""Seconds between two looks."""

failed: set[str] = set()
"""Names of groups of which a fused op has failed; a name may be that of an earlier group."""


class Watched(Protocol):
    """What the ranks of one group share."""

    group_name: str

    def look(self) -> None:
        """Asked by the thread; quick, without CUDA. Logs a failure once; the group enters `failed` then."""

    def check(self) -> None:
        """Raises RuntimeError if a call has failed."""


def watch(watched: Watched) -> None:
    """Lets the thread look at `watched` from now on, as long as that object lives."""
    global _thread
    with _lock:
        _all[:] = [*_living(), ref(watched)]
        if _thread is None:
            _thread = threading.Thread(target=_run, name="autofuse watcher", daemon=True)
            _thread.start()


def check(groups: Iterable[str] | None = None) -> None:
    """Raises RuntimeError if a call of one of the groups (of any group) has failed. Synchronises nothing."""
    with _lock:
        found = [each for at in _living() if (each := at())]
    for each in found:
        if groups is None or each.group_name in groups:
            each.check()
    if groups is not None:
        failed.difference_update(groups)  # they were groups that no longer exist, or were reset


def _run() -> None:
    global _thread
    while not _ended.wait(PERIOD_S):
        with _lock:
            _all[:] = living = _living()
            if not living:
                _thread = None
                return
        for at in living:
            each = at()
            if each is not None:
                try:
                    each.look()
                except Exception:
                    log.exception("cannot tell whether fused ops of group %s fail", each.group_name)
            del each


def _living() -> list[ref[Watched]]:
    return [at for at in _all if at() is not None]


def _end() -> None:
    """Ends the thread before the interpreter frees the modules that it uses."""
    thread = _thread
    _ended.set()
    if thread is not None:
        with suppress(RuntimeError):
            thread.join(1.0)


def _after_fork() -> None:
    """A forked child has no such thread, and is not the rank."""
    global _thread, _lock, _ended
    _thread, _lock, _ended = None, threading.Lock(), threading.Event()
    _all.clear()
    failed.clear()


_all: list[ref[Watched]] = []
_thread: threading.Thread | None = None
_lock = threading.Lock()
_ended = threading.Event()
atexit.register(_end)
os.register_at_fork(after_in_child=_after_fork)
