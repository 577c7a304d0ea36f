"""Layers of a large model on up to 1024 GPUs, in each order: what fusion would gain, and a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autofuse.lowering import ops  # noqa: F401  (registers the ops that plans name)
from autofuse.lowering.plan import Order
from autofuse.lowering.simulate.executor import Record, Result
from autofuse.lowering.simulate.machine import Machine, Shape
from autofuse.lowering.simulate.problems import Problem, apart, timeline
from autofuse.timeline import Event, Kind, Timeline, chrome_trace, draw_svg

from .script import by_order

HIDDEN, INTERMEDIATE, TOKENS = 16384, 53248, 4096
"""The down projection of Llama 405B."""
OPS = ("matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul", "embedding_bag_all_to_all")


def layer(op: str, world: int, tokens: int = TOKENS) -> Problem:
    """The layer on `world` GPUs. Embeddings: 64 tables a GPU, 32768 bags of all GPUs, 10 rows a bag."""
    part = INTERMEDIATE // world
    if op == "embedding_bag_all_to_all":
        return Problem(op, world, max(1, 32768 // world), 10, 64 * 256)
    if op == "all_gather_matmul":
        return Problem(op, world, tokens, HIDDEN, part)
    return Problem(op, world, tokens, part, HIDDEN)


def rows(worlds: Sequence[int], machine: Machine) -> Iterator[list[str]]:
    """A row by network, op and ranks: time apart, and in each order, on one switch and on hosts of 8. Each
    comes when it is simulated, the head first."""
    orders = [order.value for order in Order]
    hosts = replace(machine.network, shape=Shape.HOSTS, width=8, nic_rate=50e3, nic_latency=3.0)
    yield ["network", "op", "ranks", "apart us", *(f"{order} us" for order in orders), "gain of the best"]
    for title, network in (("one switch", machine.network), ("hosts of 8, 50 GB/s a NIC", hosts)):
        on = replace(machine, network=network)
        for op in OPS:
            for world in worlds:
                if network.shape is Shape.HOSTS and (world <= 8 or op == "embedding_bag_all_to_all"):
                    continue
                problem = layer(op, world)
                before, after = apart(problem, on), by_order(problem, on)
                best = min((us for us in after.values() if us is not None), default=before)
                times = [after[order] for order in orders]
                shown = ["-" if us is None else f"{us:.0f}" for us in times]
                yield [title, op, str(world), f"{before:.0f}", *shown, f"{before / best:.2f}x"]


_KINDS = {"compute": Kind.COMPUTED, "reduce": Kind.REDUCED, "copy": Kind.COPIED, "send": Kind.PUSHED}


def timelines(result: Result, processors: int) -> list[Timeline]:
    """The records of rank 0 as `autofuse trace` has them."""

    def event(record: Record) -> Event:
        kind = _KINDS[record.kind]
        return Event(record.program, kind, record.peer, record.tile, record.begin, record.end)

    events = sorted(map(event, result.records), key=lambda e: (e.program, e.begin))
    return [Timeline(0, processors, tuple(events), 0)]


def write_trace(path: Path, machine: Machine, world: int = 8) -> None:
    """`path`.json for Perfetto and `path`.svg: the reduce_scatter of the layer on 8 GPUs."""
    result = timeline(layer("matmul_reduce_scatter", world, 2048), machine, "direct")
    found = timelines(result, machine.processors)
    path.with_suffix(".json").write_text(chrome_trace(found))
    title = f"matmul_reduce_scatter of {world} ranks, simulated"
    path.with_suffix(".svg").write_text(draw_svg(found, title))
