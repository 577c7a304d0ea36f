"""The work of the ways of embedding bags: sizes of kernels, and of the ops that they replace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofuse.lowering.gpu.choice.work import Rows, Work

if TYPE_CHECKING:
    from .ways import ExchangeProblem

LIKELY_POOLING = 10
"""Rows that formulas assume for each bag, since a rank knows only its own indices. Points correct it."""


def _rows(p: ExchangeProblem, name: str, together: bool) -> Rows:
    itemsize = p.dtype.itemsize
    own = p.m * p.n * itemsize  # bytes of all bags of a rank's tables
    sent = p.b * sum(p.columns) * itemsize * (p.world - 1) / p.world
    return Rows(f"{p.op} {name}", own * LIKELY_POOLING, sent, together)


def kernel_work(config: Any, p: ExchangeProblem) -> Work:
    """The work of a kernel that pools and exchanges."""
    return _rows(p, "kernel", True)


def merged_work(config: Any, p: ExchangeProblem) -> Work:
    return _rows(p, "merged", False)


def torch_work(p: ExchangeProblem) -> tuple[Work, ...]:
    """A kernel for every table, then the collective, or the other way round."""
    return (_rows(p, "torch", False),)
