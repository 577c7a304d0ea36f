"""The workspaces of process groups: made by all ranks of a group together, at its first call."""

import os
import threading
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from autofuse.lowering import notes
from autofuse.lowering.cpu.rendezvous import Declined, NotShared
from autofuse.lowering.cpu.workspace import Workspace
from autofuse.lowering.torch_internals import group_store, is_destroyed, resolve_group
from autofuse.native_kernels import cpu

_workspaces: "WeakKeyDictionary[ProcessGroup, Workspace | Exception]" = WeakKeyDictionary()
_locks: "WeakKeyDictionary[ProcessGroup, threading.RLock]" = WeakKeyDictionary()
_making = threading.Lock()


def workspace_for(group: str | ProcessGroup) -> Workspace:
    """The workspace of a process group or of the one with this name; made on first use, by all its ranks
    together.

    Raises NotShared on all ranks when they share no memory or one of them declines, RuntimeError when the
    group does not exist, or when a rank does not come or fails; the same at every later try.
    """
    try:
        group = resolve_group(group)
    except RuntimeError as error:
        raise RuntimeError(
            f"process group {group} is gone: it was destroyed after compile, or never made; recompile "
            f"the model with a group that exists (torch.compiler.reset() forgets the old code)"
        ) from error
    found = _workspaces.get(group)
    if found is None:
        with _lock_of(group):
            found = _workspaces.get(group) or _make(group, group.group_name)
    if isinstance(found, Exception):
        raise found
    return found


def decline(group: str | ProcessGroup, why: str, device: str = "cpu") -> None:
    """Never share memory of such devices with this group, and tell the other ranks: they then leave their
    fused ops unfused and do not wait for this rank. Without effect once the ranks have met."""
    group, mine = resolve_group(group), Declined(why)
    if device != "cpu" or _workspaces.setdefault(group, mine) is mine:
        notes.decline(group, why, device)


def give_up(group: ProcessGroup, why: str) -> None:
    """Between calls: the next calls raise, also on ranks that wait for this one, until the group has met
    again."""
    made = _workspaces.get(group)
    if isinstance(made, Workspace):
        made._fail(why, in_a_call=False)


def forget(group: ProcessGroup) -> None:
    """The ranks of the group meet again before its next call, unless they cannot share memory."""
    with _lock_of(group):
        if not isinstance(_workspaces.get(group), NotShared):
            _workspaces.pop(group, None)


def in_use() -> list[Workspace]:
    """The workspaces of this process, without those of destroyed groups."""
    forget_destroyed()
    return [made for made in list(_workspaces.values()) if isinstance(made, Workspace)]


def forget_destroyed() -> None:
    """Give back the memory of destroyed groups that something refers to, such as torch's compile caches."""
    for group in list(_workspaces):
        if is_destroyed(group):
            _workspaces.pop(group, None)


def _lock_of(group: ProcessGroup) -> "threading.RLock":
    """The lock that a thread holds while the ranks of this group meet. Threads of other ranks may let their
    groups meet in another order, so that one lock for all groups would make ranks wait for each other."""
    with _making:
        return _locks.setdefault(group, threading.RLock())


def _make(group: ProcessGroup, group_name: str) -> Workspace | Exception:
    if not cpu.available():
        decline(group_name, cpu.why_not())
        return _workspaces[group]
    if dist.get_backend(group) == "fake":
        return Declined("the group is fake")
    forget_destroyed()
    made: Workspace | Exception
    try:
        made = Workspace(group_name, group.rank(), group.size(), group_store(group))
    except RuntimeError as error:
        made = error.with_traceback(None)
    except OSError as error:
        made = RuntimeError(f"group {group_name} cannot share memory: {error}")
    except BaseException as error:  # the other ranks do not expect another visit
        _workspaces[group] = RuntimeError(f"group {group_name} did not meet: {type(error).__name__}")
        raise
    _workspaces[group] = made
    return made


def _after_fork() -> None:
    """Workspaces of a forked child are unusable: it maps the memory of its parent, but is not that rank."""
    global _making
    _making = threading.Lock()
    _locks.clear()
    for workspace in _workspaces.values():
        if isinstance(workspace, Workspace):
            workspace._lock = threading.Lock()
            workspace._fail(
                "this process is a fork of the rank; set up process groups in the child", tell=False
            )


os.register_at_fork(after_in_child=_after_fork)
