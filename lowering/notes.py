"""What a rank tells its group without waiting for anybody: which sites it kept, and that it shares no memory.

A rank that kept a site runs the plain collective and comes to no meeting, so that a rank that fused the site
waits in vain. It cannot be asked; but it can have left a note, which the error of the waiting rank repeats.
A rank that will never share memory (no kernels, ranks on several hosts) says so: then all take the reference.
"""

import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup, Store

from autofuse.lowering.torch_internals import group_store, resolve_group

_MOST_NOTES = 64
_kept: "WeakKeyDictionary[ProcessGroup, deque[str]]" = WeakKeyDictionary()


def tell_kept(group: str | ProcessGroup, notes: Iterable[str]) -> None:
    """Note which sites of a group this rank has kept, `collective at file:line (reason)` each."""
    group = resolve_group(group)
    known = _kept.setdefault(group, deque(maxlen=_MOST_NOTES))
    new = [note for note in notes if note not in known]
    if new:
        known.extend(new)
        _write(group, f"autofuse/kept/{group.rank()}", "\n".join(known))


def kept_by(store: Store, rank: int, site: str = "") -> str:
    """A sentence about the sites that `rank` has kept: those at `site`, or else the latest."""
    notes = _read(store, f"autofuse/kept/{rank}").splitlines()
    here = [note for note in notes if site and f"{place(site)} " in note]
    told = here or ([] if site else notes[-3:])
    if told:
        return f"rank {rank} kept {'; '.join(told)}: all ranks must decide alike (docs/guide.md)"
    return f"if rank {rank} kept this site, its report says why: compare the reports of both ranks"


def decline(group: ProcessGroup, why: str, device: str) -> None:
    """Tell the group that this rank will never share memory of such devices with it."""
    _write(group, f"autofuse/declined/{device}/{group.rank()}", why)


def declined(store: Store, rank: int, device: str) -> str:
    """Why `rank` will never share memory of such devices; empty as long as it has not said so."""
    return _read(store, f"autofuse/declined/{device}/{rank}")


def place(site: str) -> str:
    """A site without folders: ranks may have the same sources in different places."""
    return os.path.basename(site)


def _write(group: ProcessGroup, key: str, text: str) -> None:
    with suppress(RuntimeError):  # a fake group has no store, and a note is only a help
        group_store(group).set(key, text)


def _read(store: Store, key: str) -> str:
    with suppress(RuntimeError):  # the host of the store may be gone
        if store.check([key]):
            return str(store.get(key).decode())
    return ""
