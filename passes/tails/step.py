"""A stage of a tail, as it stands in the graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from autofuse.passes.matchers.operands import Operand


@dataclass(frozen=True)
class Step:
    """One stage. `text` has `{}` for each operand; `node` holds V behind the stage.

    `inner`: the nodes that the stage replaces. `statistics`: those among them that a norm can return.
    """

    text: str
    node: fx.Node
    operands: tuple[Operand, ...] = ()
    inner: frozenset[fx.Node] = field(default=frozenset())
    statistics: tuple[fx.Node, ...] = ()

    @property
    def returned(self) -> tuple[fx.Node, ...]:
        """The statistics, if another node reads one of them."""
        read = any(u not in self.inner for s in self.statistics for u in s.users)
        return self.statistics if read else ()

    @property
    def is_affine(self) -> bool:
        """Whether the stage may be a part of a norm, behind its statistics."""
        return self.text in ("mul {}", "add {}") or self.text.startswith("to ")
