"""Turns `torch.compile(..., mode=, options=)` and `autofuse.config` into settings of autofuse and of
Inductor."""

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from autofuse import config
from autofuse.lowering import limits, torch_internals
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.passes import Settings
from autofuse.passes.choice.device_table import tables
from autofuse.passes.schedules.schedule import AUTO, SCHEDULES, SPLIT

POLICIES = ("auto", "always", "never")
ORDERS = ("direct", "ring", "oblivious")
TIME, MEMORY = "time", "memory"
OWN_OPTIONS = ("policy", "patterns", "order", "schedule", "prefer", "table", "timeout_s")

_CUDAGRAPHS = "triton.cudagraphs"


def settings(**changes: Any) -> Settings:
    """The settings of `autofuse.config`, changed by `policy`, `patterns`, `order`, `schedule`, `prefer` and
    `table`.

    Raises ValueError for a value that is not allowed, and for a bad table.
    """
    policy = changes.get("policy", config.policy)
    order = changes.get("order", config.order)
    _check("policy", policy, POLICIES)
    _check("order", order, ORDERS)
    patterns = _patterns(changes.get("patterns", config.patterns))
    table = changes.get("table", config.table)
    if not isinstance(table, (str, os.PathLike)):
        raise ValueError(f"table={table!r}: expected the path of a file")
    schedule = changes.get("schedule", config.schedule)
    _check("schedule", schedule, SCHEDULES)
    prefer = changes.get("prefer", config.prefer)
    _check("prefer", prefer, (TIME, MEMORY))
    if schedule == AUTO and prefer == MEMORY:
        schedule = SPLIT  # what it saves is a slice of what any other schedule saves
    return Settings(policy, patterns, order, tables(os.fspath(table)), schedule)


def resolve(mode: str | None, options: Mapping[str, Any] | None) -> tuple[Settings, dict[str, Any]]:
    """The settings of autofuse, and the changes of Inductor's configuration by `mode`, then by `options`.

    Raises ValueError for an unknown mode or option, with similar names, and for a value that is not allowed.
    """
    own, inductor = _split(options)
    if mode is not None:
        modes = torch_internals.inductor_mode_options()
        _check("mode", mode, modes)
        inductor = {**modes[mode], **inductor}
    return settings(**own), inductor


def measure_if_tuned(inductor: Mapping[str, Any]) -> None:
    """Where Inductor is asked for `max_autotune`, this process measures ways from now on."""
    # Where Inductor captures CUDA graphs, first calls allocate from the memory pool of its warm-up, in
    # which no measurement has been tried.
    if inductor.get("max_autotune") and not _cudagraphs(inductor):
        config.measure = True


def _cudagraphs(inductor: Mapping[str, Any]) -> bool:
    """Whether Inductor captures CUDA graphs, with these changes to its settings."""
    return bool(inductor.get(_CUDAGRAPHS, torch_internals.inductor_option(_CUDAGRAPHS)))


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Checked options of autofuse, to be given to `settings`. ValueError for others and bad values."""
    own, inductor = _split(options)
    for name in inductor:
        raise ValueError(f"{name!r} is an option of Inductor: give it to torch.compile(..., options=...)")
    settings(**own)
    return own


def _split(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of autofuse without `timeout_s`, which is set, and options of Inductor."""
    own: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    known = torch_internals.inductor_options()
    for key, value in (options or {}).items():
        name = key.replace("-", "_")
        if name in OWN_OPTIONS:
            own[name] = value
        elif name in known:
            inductor[name] = value
        else:
            raise ValueError(f"unknown option {key!r}{_near(name, [*OWN_OPTIONS, *known])}")
    if "timeout_s" in own:
        # It bounds every wait of this process, of all graphs and on all threads.
        config.timeout_s = limits.seconds(own.pop("timeout_s"))
    return own, inductor


def _patterns(value: Any) -> frozenset[str] | None:
    """The patterns in a list of names, or in names separated by commas; None for all patterns."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set, frozenset)):
        raise ValueError(f"patterns={value!r}: expected 'all' or a list of {', '.join(map(repr, FUSED_OPS))}")
    if list(names) == ["all"]:
        return None
    for name in names:
        _check("patterns", name, ("all", *FUSED_OPS))
    return frozenset(names)


def _check(name: str, value: Any, allowed: Iterable[Any]) -> None:
    names = list(allowed)
    if value not in names:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, names))}")


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    own = f"autofuse knows {', '.join(OWN_OPTIONS)} and every name in torch._inductor.config"
    return f"; did you mean {' or '.join(map(repr, near))}? ({own})" if near else f"; {own}"
