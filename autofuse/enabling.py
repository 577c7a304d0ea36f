"""`autofuse.enable`: stock `torch.compile(model)` and `backend="inductor"` fuse as `backend="autofuse"` does.

torch loads this module in every process, by its entry points `torch.backends`, at the end of its own import.
So it imports nothing that is slow, not even what `torch_internals` imports, and touches torch only if the
environment says so.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

_lock = threading.Lock()
_active: list[Enabled] = []
_installed = False
_OFF = ("", "0", "false", "no", "off")


class Enabled:
    """What `enable` returns: a context manager that takes this enabling away at its end."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *raised: object) -> None:
        with _lock:
            # By identity: it may have been taken away by `disable`.
            _active[:] = [each for each in _active if each is not self]


def enable(**options: Any) -> Enabled:
    """From now on, what `torch.compile` compiles with `backend="inductor"` is fused, on all threads.

    `with autofuse.enable(policy="always"):` does it for what is compiled inside. Of several that are in force
    the latest counts, with its own options alone. What has been compiled stays as it is.

    Args:
        options: those of autofuse, as for `backend="autofuse"`. Inductor's belong to `torch.compile`.

    Raises:
        ValueError: for an unknown option and for a bad value.
    """
    from autofuse.options import own_options

    return _enable(own_options(options))


def disable() -> None:
    """End every enabling by `enable` and by `AUTOFUSE_ENABLE`: later stock compilations fuse nothing."""
    with _lock:
        _active.clear()


def enabled() -> Mapping[str, Any] | None:
    """The options that count now; None if stock compilations stay as they are."""
    active = list(_active)
    return active[-1].options if active else None


def autoload() -> None:
    """torch calls this at the end of its import, in every process."""
    if os.environ.get("AUTOFUSE_ENABLE", "").lower() not in _OFF:
        _enable({})


def _enable(options: Mapping[str, Any]) -> Enabled:
    global _installed
    found = Enabled(options)
    with _lock:
        _active.append(found)
        if not _installed:
            # torch may be in the middle of its import.
            wrapper = sys.modules["torch"]._TorchCompileInductorWrapper
            wrapper.__call__ = _fusing(wrapper.__call__)
            _installed = True
    return found


def _has_collectives() -> bool:
    """Whether torch was built with them."""
    return bool(sys.modules["torch"].distributed.is_available())


def _fusing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a stock compilation, by which torch.compile hands dynamo's graph to Inductor."""

    @functools.wraps(stock)
    def compile_stock(
        self: Any, model_: Any, inputs_: Any, *, config_patches: Mapping[str, Any] | None = None
    ) -> Any:
        patched = {} if config_patches is None else {"config_patches": config_patches}
        options = enabled()
        if options is None or not _has_collectives():
            return stock(self, model_, inputs_, **patched)

        from autofuse.backend import compile_fused
        from autofuse.lowering.torch_internals import compiles_for_a_file
        from autofuse.options import settings

        if compiles_for_a_file():
            log.warning("autofuse is enabled, but nothing is fused in code that is compiled for a file")
            return stock(self, model_, inputs_, **patched)
        patches = {**self.config, **patched.get("config_patches", {})}
        # torch before 2.13 has no names of regions.
        region = getattr(self, "name", None)
        return compile_fused(model_, inputs_, settings(**options), patches, region)

    return compile_stock
