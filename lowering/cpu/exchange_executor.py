"""Shared by the ops around an all-to-all: runs their plans, and makes the ranks agree on their splits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autofuse.lowering.cpu.workspace import Call
from autofuse.lowering.plan import Compute, Family, Plan, Send, Signal, Wait


def run_exchange(
    plan: Plan, call: Call, store: Callable[[int], None], arrived: Callable[[int], None]
) -> None:
    """Runs the actions of an exchange plan. `store(dest)` stores the chunk for `dest`, `arrived(source)`
    works on the chunk that `source` has stored here. A producer stores its own chunk without an arrival."""
    produces = plan.family is Family.PRODUCE
    for action in plan.actions:
        match action:
            case Send(dest=dest):
                store(dest)
            case Compute(tile=tile, dest=dest):
                if produces:
                    store(dest)
                else:
                    arrived(tile.chunk)
            case Signal(dest=dest, slot=slot):
                call.signal(dest, slot)
            case Wait(source=source, slot=slot):
                call.wait(source, slot, tile=source)  # one tile stands for a chunk
                if produces:
                    arrived(source)


@dataclass(frozen=True, slots=True)
class Splits:
    """`sends[a][b]`: rows that rank a sends to rank b. Parts arrive in the order of their sources."""

    sends: Sequence[Sequence[int]]

    @classmethod
    def even(cls, world: int, rows: int) -> "Splits":
        return cls([[rows] * world] * world)

    @classmethod
    def agree(cls, call: Call, input_splits: Sequence[int], output_splits: Sequence[int]) -> "Splits":
        """The splits of all ranks, which exchange them. Raises RuntimeError on all ranks if one sends a
        number of rows that another does not expect."""
        world = len(input_splits)
        told = call.exchange([*input_splits, *output_splits])
        for source, values in enumerate(told):
            for dest in range(world):
                expected = told[dest][world + source]
                if values[dest] != expected:
                    raise RuntimeError(
                        f"{call.op}: rank {source} sends {values[dest]} rows to rank {dest}, which expects "
                        f"{expected}; output_splits of a rank must be the input_splits of its peers for it"
                    )
        return cls([values[:world] for values in told])

    def start(self, source: int, dest: int) -> int:
        """The row of `dest`'s buffer at which the part of `source` starts."""
        return sum(sent[dest] for sent in self.sends[:source])

    def rows(self, dest: int) -> int:
        """Rows that `dest` receives."""
        return sum(sent[dest] for sent in self.sends)

    @property
    def most(self) -> int:
        """The most rows that any rank receives."""
        return max(self.rows(dest) for dest in range(len(self.sends)))
