"""What was measured of a cell, and what follows from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from autofuse.passes.report import Report

OURS, DECLARED, NO_TAILS, CEILING = "autofuse", "declared", "no tails", "ceiling"
ALL_OURS = (OURS, DECLARED, NO_TAILS)
LAUNCHES = ("us", "graph_us")


@dataclass(frozen=True)
class Measured:
    """The times of a variant, in microseconds a step of the slowest rank; None: not measured."""

    us: float | None = None
    """The host launches every kernel."""
    graph_us: float | None = None
    """Replayed from a CUDA graph."""
    host_us: float | None = None
    """Until the host returns, the GPU being idle before."""
    kernel_us: float | None = None
    """The sum of the durations of the kernels; of the graph where there is one."""
    error: float | None = None
    """The largest |result - exact| / |exact| (Frobenius) of the results: output, gradients."""
    ready_s: float = 0.0
    """The first step, in which it is compiled."""
    failed: str = ""
    graph_failed: str = ""


@dataclass(frozen=True)
class Row:
    """sites, declared_sites: what became of the collectives in `autofuse` and in `declared`; complete: no
    variant was left out for want of time."""

    name: str
    variants: Mapping[str, Measured]
    sites: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True
    exact_failed: str = ""
    """Why there are no errors."""
    declared_sites: Mapping[str, Any] = field(default_factory=dict)

    def time(self, variant: str, launched: str) -> float | None:
        found: float | None = getattr(self.variants.get(variant, Measured()), launched)
        return found

    def best_other(self, launched: str) -> tuple[str, float] | None:
        """Name and time of the fastest variant that is not ours."""
        torchs = [name for name in self.variants if name not in (*ALL_OURS, CEILING)]
        times = {name: self.time(name, launched) for name in torchs}
        known = {name: us for name, us in times.items() if us}
        return min(known.items(), key=lambda item: item[1]) if known else None

    def speedup(self, launched: str) -> float | None:
        """Of ours over the best other."""
        best, ours = self.best_other(launched), self.time(OURS, launched)
        return best[1] / ours if best and ours else None

    def share(self, launched: str) -> float | None:
        """(best other - ours) / (best other - ceiling); None where there is nothing to gain."""
        best, ours, ceiling = (
            self.best_other(launched),
            self.time(OURS, launched),
            self.time(CEILING, launched),
        )
        if not best or not ours or not ceiling or ceiling >= best[1]:
            return None
        return (best[1] - ours) / (best[1] - ceiling)

    def to_json(self) -> dict[str, Any]:
        derived = {
            launched: {
                "best_other": self.best_other(launched),
                "speedup": self.speedup(launched),
                "share": self.share(launched),
            }
            for launched in LAUNCHES
        }
        return {**asdict(self), "derived": derived}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        known = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        variants = {name: Measured(**values) for name, values in data["variants"].items()}
        return cls(**{**known, "variants": variants})


def sites_of(report: Report) -> dict[str, Any]:
    """What became of the collectives until now: states, ways of the fused ones, reasons of the kept ones."""
    now = report.until_now()
    ways = Counter(f"{site.pattern}: {run.way.name}" for site in now.fused for run in site.runs)
    fell_back = Counter(f"{site.pattern}: {each.why}" for site in now.fused for each in site.fell_back)
    kept = Counter(
        f"{site.collective}: {site.reason.value if site.reason else ''}: {site.detail}" for site in now.kept
    )
    states = {state.value: count for state, count in now.counts.items() if count}
    return {"states": states, "ways": dict(ways), "fell back": dict(fell_back), "kept": dict(kept)}
