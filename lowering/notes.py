"""Notes of a rank to its group, in the group's store: the sites that it kept, and that it shares no memory.

A rank that keeps a site runs the plain collective. A rank that fuses the same site then waits until its
timeout; its error repeats the note of the rank that kept the site. A rank that will never share memory (no
kernels, ranks on several hosts) leaves a note, too, and all ranks of the group then run the reference.
"""

import os
import re
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup, Store

from autofuse.lowering.torch_internals import group_store, resolve_group

_MOST_NOTES = 64
_MERGED = re.compile(r"(:\d+)\+")
_kept: "WeakKeyDictionary[ProcessGroup, deque[str]]" = WeakKeyDictionary()


def tell_kept(group: str | ProcessGroup, notes: Iterable[str]) -> None:
    """Leave a note of the kept sites of a group, each `collective at file:line (reason)`."""
    group = resolve_group(group)
    known = _kept.setdefault(group, deque(maxlen=_MOST_NOTES))
    new = [note for note in notes if note not in known]
    if new:
        known.extend(new)
        _write(group, f"autofuse/kept/{group.rank()}", "\n".join(known))


def kept_by(store: Store, rank: int, site: str = "") -> str:
    """A sentence about the sites that `rank` has kept: the sites at `site`, else the latest ones."""
    notes = _read(store, f"autofuse/kept/{rank}").splitlines()
    here = [note for note in notes if site and any(f"{at} " in note for at in _places(site))]
    told = here or ([] if site else notes[-3:])
    if told:
        return f"rank {rank} kept {'; '.join(told)}: all ranks must decide alike (docs/guide.md)"
    return f"if rank {rank} kept this site, its report says why: compare the reports of both ranks"


def decline(group: ProcessGroup, why: str, device: str) -> None:
    """Leave a note that this rank will never share memory of such devices with the group."""
    _write(group, f"autofuse/declined/{device}/{group.rank()}", why)


def declined(store: Store, rank: int, device: str) -> str:
    """Why `rank` will never share memory of such devices; empty without a note of `rank`."""
    return _read(store, f"autofuse/declined/{device}/{rank}")


def place(site: str) -> str:
    """A site without its folder, since ranks may have the sources in different folders; of merged sites,
    which have `+` between them, all of them."""
    return "+".join(_places(site))


def _places(site: str) -> list[str]:
    return [os.path.basename(each) for each in _MERGED.sub("\\1\n", site).split("\n")]


def _write(group: ProcessGroup, key: str, text: str) -> None:
    with suppress(RuntimeError):  # a fake group has no store; a note is not required
        group_store(group).set(key, text)


def _read(store: Store, key: str) -> str:
    with suppress(RuntimeError):  # the process that hosts the store may have ended
        if store.check([key]):
            return str(store.get(key).decode())
    return ""
