"""Collectives alone, as plans without compute."""

from __future__ import annotations

from dataclasses import replace

from autofuse.lowering.orders import PlanShape

from .executor import Result, simulate
from .machine import Machine
from .work import Nothing, Sums

GRAIN = (32, 64)
"""Rows and columns of the pieces that a collective moves."""


def ring_reduce_scatter(machine: Machine, world: int, chunk: tuple[int, int], itemsize: int = 2) -> Result:
    """A kernel a step: programs add what arrived to what is there, and store the sum at the neighbour. Data
    is larger than the cache, which is left out."""
    alone = replace(machine, groups=1, pieces=1, tracker=False, read_latency=0.0, cache=0.0)
    shape = PlanShape("matmul_reduce_scatter", "ring", world, ((chunk,) * world,), GRAIN)
    return simulate(shape, alone, Sums(itemsize), stepped=True)


def ring_all_gather(machine: Machine, world: int, chunk: tuple[int, int], itemsize: int = 2) -> Result:
    """Copy engines move every chunk round the ring."""
    alone = replace(machine, groups=1, pieces=1, cache=0.0)
    shape = PlanShape("all_gather_matmul", "ring", world, ((chunk,) * world,), GRAIN)
    return simulate(shape, alone, Nothing(itemsize))
