"""What must be as it was for a kernel to be launched again without `GpuWorkspace.enter`."""

from __future__ import annotations

from ctypes import c_int32

from autofuse import config
from autofuse.lowering.torch_internals import settings_of

from .chain import Chain
from .failures import Failures

_settings = settings_of(config, "timeout_s", "margin", "update")
"""That a call reads, each time."""


class Again:
    """Of one group. guard: what a launch looks at without Python."""

    def __init__(self, failures: Failures, chain: Chain) -> None:
        self._generation = c_int32(0)
        self._settings = _settings()
        self.guard = failures.guard(self._generation, chain)

    def unchanged(self) -> bool:
        """Whether the settings are those that `renew` has seen."""
        return self._settings == _settings()

    def renew(self) -> bool:
        """Whether settings have changed; from now on they have not."""
        before, self._settings = self._settings, _settings()
        return before != self._settings

    def forget(self) -> None:
        """Nothing that was prepared is launched again: the memory is another one, or as at first."""
        self._generation.value += 1
