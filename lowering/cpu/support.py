"""What the CPU kernels can run: asked while graphs are compiled, as `lowering.gpu.support` is for GPUs."""

from __future__ import annotations

from autofuse.native_kernels.cpu import DTYPES, available, why_not
from autofuse.native_kernels.cpu.linear import FEW_ROWS, LONG_ROWS, VERY_FEW_ROWS

__all__ = ["DTYPES", "FEW_ROWS", "LONG_ROWS", "VERY_FEW_ROWS", "available", "why_not"]
