"""The settings of the pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from .choice.device_table import DeviceTable, shipped


@dataclass(frozen=True)
class Settings:
    """The settings of the pass; equal on all ranks.

    Attributes:
        policy: `auto` fuses a site where the cost model predicts a gain, `always` every site, `never` none.
        patterns: names of the patterns that may be fused; None for all.
        order: the order of the plans.
        tables: device tables of the cost model; the first table that fits a device is used.
        schedule: who computes what lies behind a reduction (docs/schedules.md).
        lines: whether fused ops name the line of their site; otherwise they name the collective only.
    """

    policy: str = "auto"
    patterns: frozenset[str] | None = None
    order: str = "direct"
    tables: tuple[DeviceTable, ...] = field(default_factory=shipped, repr=False)
    schedule: str = "auto"
    lines: bool = True
