"""Settings of autofuse: `autofuse.config.policy = "always"`, `with autofuse.config.patch(order="ring")`,
`AUTOFUSE_TIMEOUT_S=30 python train.py`, or `torch.compile(..., options={"policy": "always"})`."""

import contextvars
import os
import sys
from typing import TYPE_CHECKING

from torch.utils._config_module import Config, install_config_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")


def _number(variable: str, default: "T", kind: "Callable[[str], T]") -> "T":
    """The number in a variable of the environment. ValueError that names the variable if it is none."""
    text = os.environ.get(variable)
    try:
        return default if text is None else kind(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r}: expected a number") from None


policy: str = Config(default="auto", env_name_default="AUTOFUSE_POLICY")
"""`auto`: fuse where the cost model predicts a gain; `always`: wherever it is legal; `never`: report only."""

patterns: str = Config(default="all", env_name_default="AUTOFUSE_PATTERNS")
"""Names of the fused ops that may be used, separated by commas, or `all`. `options` also takes a list."""

order: str = Config(default="direct", env_name_default="AUTOFUSE_ORDER")
"""Order of the tiles of a plan: `direct`, `ring`, or `oblivious` (the control of every measurement)."""

schedule: str = Config(default="auto", env_name_default="AUTOFUSE_SCHEDULE")
"""Who computes what lies behind a reduction (docs/schedules.md): `unchanged`: Inductor's code; `every`: the
fused op, on all ranks; `owner`: the owner of each row, where that is proven to be the same
(`autofuse.replicated`); `split`: each rank its slice, up to the next matmul, where that is proven. Equal on
all ranks."""

prefer: str = Config(default="time", env_name_default="AUTOFUSE_PREFER")
"""What the schedule `auto` prefers: `time`, or `memory`: the schedule that saves least for the backward.
Equal on all ranks."""

table: str = Config(default="", env_name_default="AUTOFUSE_TABLE")
"""File with constants for the cost model, as `autofuse tune` writes it; equal on all ranks. It wins over the
tables in the cache folder (`~/.cache/autofuse`), which win over those that come with autofuse."""

measure: bool = Config(default=False, env_name_force="AUTOFUSE_MEASURE")
"""On GPUs: before the first call of a size that has not been measured, time the ways that may be the fastest,
outside of captured graphs, and write the result to `~/.cache/autofuse`. Otherwise predictions decide.
`mode="max-autotune-no-cudagraphs"` turns it on. Equal on all ranks."""

measure_s: float = _number("AUTOFUSE_MEASURE_S", 120.0, float)
"""On GPUs: seconds that a group measures for `measure`; from then on predictions decide. Equal on all ranks.
`AUTOFUSE_MEASURE_S`."""

update: bool = Config(default=False, env_name_default="AUTOFUSE_UPDATE")
"""On GPUs: matmul_reduce_scatter of many tokens adds tiles at their owner in the order of their arrival
(`update` of a plan). Each sum is rounded, so two runs may give different bits. Equal on all ranks."""

equal_rows: bool = Config(default=False, env_name_default="AUTOFUSE_EQUAL_ROWS")
"""On GPUs: every rank brings as many rows to an exchange of dropless experts, such as its tokens times the
experts of a token. There is then room for the worst case, in which one rank gets all rows, and the hosts do
not tell each other before each call how many rows they have. Equal on all ranks."""

timeout_s: float | None = _number("AUTOFUSE_TIMEOUT_S", None, float)
"""Seconds that a fused op waits for a peer before it raises RuntimeError. `AUTOFUSE_TIMEOUT_S`. None: 30 less
than the timeout of the process group, or half of that timeout where it is shorter than a minute."""

margin: int = _number("AUTOFUSE_MARGIN", 32, int)
"""On GPUs: multiprocessors that a fused op leaves to other kernels while a peer has not started it, so that
what the peer waits for can run; as many as NCCL uses at a time on one host. `AUTOFUSE_MARGIN`."""

if TYPE_CHECKING:
    from torch.utils._config_typing import *  # noqa: F403


install_config_module(sys.modules[__name__])


class _OfAllThreads:
    """In place of the `ContextVar` that holds a changed value: torch 2.13 and later keep one for each thread,
    but autograd runs backward graphs on threads of its own."""

    def __init__(self, value: object) -> None:
        self._value = value

    def get(self) -> object:
        return self._value

    def set(self, value: object) -> None:
        self._value = value


for _entry in vars(sys.modules[__name__])["_config"].values():
    if isinstance(_entry.user_override, contextvars.ContextVar):
        _entry.user_override = _OfAllThreads(_entry.user_override.get())
