"""How long fused ops wait for a peer: `config.timeout_s`, else less than the group's collectives do."""

import math
from typing import Any

import torch
from torch.distributed import ProcessGroup

from autofuse import config
from autofuse.lowering.torch_internals import group_timeout_s, setting_of
from autofuse.native_kernels.gpu.state import SLOW_NS

EARLIER_S = 30.0
"""A wait ends so long before the group's timeout. The error is then raised before the watchdog of NCCL ends
the process."""
UNKNOWN_S = 300.0
"""The limit if the group's timeout is not known."""


def default_limit_s(group: ProcessGroup, device: torch.device) -> float:
    """The limit of a wait if `config.timeout_s` is None. For a short timeout of the group it is half of
    that."""
    timeout = group_timeout_s(group, device)
    return UNKNOWN_S if timeout is None else max(timeout - EARLIER_S, timeout / 2)


_timeout_s = setting_of(config, "timeout_s")


def limit_s(default: float) -> float:
    """The limit of a wait that begins now. default: that of the group."""
    timeout_s = _timeout_s()
    return default if timeout_s is None else seconds(timeout_s)


def seconds(value: Any) -> float:
    """`value` as `timeout_s`. ValueError unless it is a positive number: no wait lasts forever."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"timeout_s={value!r}: expected a positive number of seconds")
    return float(value)


def silent_s(limit: float) -> float:
    """The seconds after which a wait that may take up to `limit` warns that it takes long."""
    return min(SLOW_NS / 1e9, limit / 2)
