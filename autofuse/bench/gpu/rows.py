"""What a row of a GPU benchmark has: times of peers and of ours, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from autofuse.bench.gpu.ratios import from_json, least, ratio
from autofuse.lowering.gpu.choice.timing import Timing


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that was measured of a cell. Subclasses have the cell, and say what the limit is."""

    compute: Mapping[str, Timing]
    """The compute of the op without its collective, in every way that is known."""
    peers: Mapping[str, Timing]
    """The whole with what torch ships."""
    ours: Timing
    """The fused op as policy `auto` runs it."""
    way: str
    """The way that `auto` chose."""
    ways: Mapping[str, Timing]
    """All fused ways by name."""

    groups: ClassVar[tuple[str, ...]] = ("compute", "peers", "ways")
    derived: ClassVar[tuple[str, ...]] = ("compute_us", "peer_us", "limit_us", "speedup", "share", "missed")

    @property
    def compute_us(self) -> float | None:
        return least(self.compute)

    @property
    def peer_us(self) -> float | None:
        """The time of the best peer."""
        return least(self.peers)

    @property
    def limit_us(self) -> float | None:
        """The time of a perfect fusion."""
        raise NotImplementedError

    @property
    def speedup(self) -> float | None:
        """Over the best peer."""
        return ratio(self.peer_us, self.ours.us)

    @property
    def share(self) -> float | None:
        """The part of the limit that is reached."""
        return ratio(self.limit_us, self.ours.us)

    @property
    def missed(self) -> float | None:
        """How much faster the best of all ways is than what `auto` chose."""
        return ratio(self.ours.us, least({**self.ways, "auto": self.ours}))

    def variants(self) -> dict[str, Timing]:
        """All timings by kind and name."""
        groups = {kind: getattr(self, kind) for kind in self.groups} | {"ours": {"auto": self.ours}}
        return {f"{kind} {name}": timing for kind in groups for name, timing in groups[kind].items()}

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "derived": {name: getattr(self, name) for name in self.derived}}

    @classmethod
    def fields_of(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a row that `to_json` wrote, all but its cell; what is derived is left out."""
        fields = {key: value for key, value in data.items() if key not in ("derived", "cell")}
        groups = {kind: from_json(fields[kind]) for kind in cls.groups}
        return {**fields, **groups, "ours": Timing(**data["ours"])}
