"""Exchanges of any number of values in a call on CPU ranks."""

from __future__ import annotations

from collections.abc import Sequence

from .control import VALUES
from .workspace import Call


def exchange_all(call: Call, values: Sequence[int]) -> list[list[int]]:
    """The 64-bit integers of every rank. Their number may differ. All ranks call this together."""
    first = VALUES - 1  # behind their number
    rows = call.exchange([len(values), *values[:first]])
    found = [row[1:] for row in rows]
    for at in range(first, max(row[0] for row in rows), VALUES):
        for mine, part in zip(found, call.exchange(values[at : at + VALUES]), strict=True):
            mine += part
    return found
