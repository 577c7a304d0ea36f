"""autofuse: a torch.compile backend that fuses compute with the collective it feeds or consumes.

Names are imported on first use: the import of the package must be fast, and must work while torch is
imported, since `TORCH_LOGS="+autofuse"` imports it then.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofuse import config, ops, optim
    from autofuse.backend import custom_pass
    from autofuse.collectives import register_collective
    from autofuse.declarations import replicated
    from autofuse.enabling import disable, enable
    from autofuse.holdings import memory_summary
    from autofuse.inspection import debug, explain, rewrite
    from autofuse.passes.reasons import Reason
    from autofuse.passes.report import Report, Site
    from autofuse.recovery import check, reset
    from autofuse.table_optimizers import SGD, RowwiseAdagrad, optimizer_in_backward
    from autofuse.warm_up import warmup

__all__ = [
    "SGD",
    "Reason",
    "Report",
    "RowwiseAdagrad",
    "Site",
    "__version__",
    "check",
    "config",
    "custom_pass",
    "debug",
    "disable",
    "enable",
    "explain",
    "memory_summary",
    "ops",
    "optim",
    "optimizer_in_backward",
    "register_collective",
    "replicated",
    "reset",
    "rewrite",
    "warmup",
]

_HOME = {
    "Reason": "autofuse.passes.report",
    "Report": "autofuse.passes.report",
    "RowwiseAdagrad": "autofuse.table_optimizers",
    "SGD": "autofuse.table_optimizers",
    "Site": "autofuse.passes.report",
    "check": "autofuse.recovery",
    "custom_pass": "autofuse.backend",
    "debug": "autofuse.inspection",
    "disable": "autofuse.enabling",
    "enable": "autofuse.enabling",
    "explain": "autofuse.inspection",
    "memory_summary": "autofuse.holdings",
    "optimizer_in_backward": "autofuse.table_optimizers",
    "register_collective": "autofuse.collectives",
    "replicated": "autofuse.declarations",
    "reset": "autofuse.recovery",
    "rewrite": "autofuse.inspection",
    "warmup": "autofuse.warm_up",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return version("autofuse")
        except PackageNotFoundError:  # a checkout that is not installed
            return "0+checkout"
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in ("config", "ops", "optim"):
        return import_module(f"autofuse.{name}")
    raise AttributeError(f"module 'autofuse' has no attribute {name!r}")
