"""Whether a prepared launch may be repeated without `GpuWorkspace.enter`: if memory, stream and settings are
the same as before."""

from __future__ import annotations

from collections.abc import Hashable
from ctypes import c_int32
from typing import Any

from autofuse import config
from autofuse.lowering.torch_internals import settings_of

from .chain import Chain
from .failures import Failures

_settings = settings_of(config, "timeout_s", "margin", "update")
"""Returns the settings that every call reads."""


class Again:
    """Tells for one group whether a prepared launch may be repeated.

    guard: addresses of values that `native_kernels/gpu/launch.cpp` compares before a launch, without Python.
    """

    def __init__(self, failures: Failures, chain: Chain) -> None:
        self._generation, self._chain = c_int32(0), chain
        self._settings = _settings()
        self.guard = failures.guard(self._generation, chain)

    def unchanged(self) -> bool:
        """Whether the settings are those of the last `renew`."""
        return self._settings == _settings()

    def renew(self) -> bool:
        """Whether settings have changed since the last `renew`."""
        before, self._settings = self._settings, _settings()
        return before != self._settings

    def is_last(self, stream: int) -> bool:
        """Whether the last fused call of the GPU was made on this stream."""
        return self._chain.last.value == stream

    def forget(self, calls: dict[Hashable, Any]) -> None:
        """Drops all prepared launches, since the memory has been replaced or cleared."""
        calls.clear()
        self._generation.value += 1
