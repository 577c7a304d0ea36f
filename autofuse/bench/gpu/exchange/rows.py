"""What was measured of a cell of an exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from autofuse.bench.gpu.rows import Measured
from autofuse.lowering.gpu.choice.timing import Timing

C = TypeVar("C", bound="Cell")


@dataclass(frozen=True)
class Rates:
    """Rates of this machine in GB/s: what a rank sends, and what its memory reads and writes in a copy."""

    link: float
    memory: float


class Cell(Protocol):
    """An op at one size."""

    @property
    def op(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """The kind of the cell; each kind has totals of its own."""
        ...

    @property
    def labels(self) -> dict[str, str]:
        """The first columns of the cell's row."""
        ...

    @property
    def roughly_us(self) -> float:
        """The least time of a call, from which the number of calls in a graph follows."""
        ...

    def limit(self, compute_us: float | None, rates: Rates) -> float | None:
        """Microseconds of a perfect fusion."""
        ...


@dataclass(frozen=True, kw_only=True)
class Row(Measured):
    """All that was measured of a cell."""

    cell: Cell
    rates: Rates
    parts: Mapping[str, Timing]
    """Steps of the peers alone, if they are told apart: the all-to-all, and the copies that bring rows into
    the order to be sent (`pack`) or used (`unpack`)."""

    groups: ClassVar[tuple[str, ...]] = ("compute", "parts", "peers", "ways")

    @property
    def limit_us(self) -> float | None:
        return self.cell.limit(self.compute_us, self.rates)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], cell_type: type[Any]) -> Row:
        """The row that `to_json` wrote of a cell of that type; derived values are computed again."""
        fields = cls.fields_of(data)
        return cls(cell=cell_type(**data["cell"]), **{**fields, "rates": Rates(**data["rates"])})


def chosen(cells: list[C], rows: tuple[str, ...]) -> list[C]:
    """The cells whose name contains one of `rows`, all if there are none. ValueError if that is no cell."""
    found = [cell for cell in cells if not rows or any(part in cell.name for part in rows)]
    if not found:
        raise ValueError(f"no cell has one of {list(rows)} in its name; without --rows all are measured")
    return found
