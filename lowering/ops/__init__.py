"""The fused ops, `torch.ops.autofuse.*`, one file an op. Importing this package defines them all."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
