"""The functions of the CUDA driver, through its Python bindings. They are imported when one is needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def bindings() -> Any:
    """RuntimeError without the package."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError(
            f"CUDA kernels and copy engines need the package cuda-bindings ({error}): "
            "pip install 'cuda-bindings>=13' (CUDA builds of torch bring it)"
        ) from error
    return driver


def call(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of the driver returns after CUDA_SUCCESS. RuntimeError with any other code."""
    error, *results = function(*args)
    if error:
        raise RuntimeError(f"{function.__name__} failed: {error!r}")
    return results[0] if results else None
