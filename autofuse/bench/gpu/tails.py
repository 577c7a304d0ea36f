"""`autofuse bench tails`: a matmul, its all_reduce, a residual and a norm on the GPUs of torchrun.

    normed, h = rms_norm(residual + all_reduce(x @ w)), both on all ranks

All ways are timed in turn, captured, with cold weights:

    torch        what torch has for the sum, or a scatter, the norm of a part, and gathers; Inductor's norm
    unchanged    a fused sum, and Inductor's norm
    every        a fused sum with its tail
    owner        the owner of a row applies the tail and sends the results
    sum          the sum alone, in the same ways
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

import autofuse
from autofuse.bench.cpu.table import geometric_mean
from autofuse.bench.gpu.driver import TIMEOUT_S, Key, leave, machine, relative_error, written
from autofuse.bench.gpu.measured import RESULTS, TailProblem
from autofuse.bench.gpu.named_ways import Fused
from autofuse.bench.gpu.table import grid
from autofuse.bench.models.run import over
from autofuse.bench.pieces import normed
from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL, ways_of
from autofuse.lowering.gpu.choice.points import Point, own_file, write
from autofuse.lowering.gpu.choice.timer import Call, time_all
from autofuse.lowering.gpu.choice.timing import QUICK, calls_for, captured, copies_of, matmul_us
from autofuse.lowering.gpu.dense.ways import ONE_SHOT, REDUCE, TWO_SHOT, DenseProblem
from autofuse.lowering.torch_internals import compiling_variants, enable_symmetric_memory
from autofuse.passes.schedules.schedule import EVERY, OWNER, UNCHANGED

TAIL = "add %0; keep; to float32; rms 1e-06; to bfloat16; mul %1"
"""What `normed` is to a fused op."""

TOKENS = (8, 512, 64, 2048, 1, 8192)
HIDDEN = (8192, 4096)
FEW = 64
"""Most tokens of the cells that the table averages apart from the others."""
RATIOS = (1.0, 3.5)
"""K over all ranks, in hidden sizes."""

TORCH, SUM = "torch", "sum"
"""Kinds of ways besides schedules."""
BEHIND = ("sums", "rows", "row_packets")
"""Kinds of ways that multiply by cuBLAS. Of other kernels the one that is predicted best is measured."""


@dataclass(frozen=True)
class Cell:
    """Sizes of a rank, and microseconds of every way by its kind."""

    tokens: int
    k: int
    hidden: int
    world: int
    us: Mapping[str, Mapping[str, float]]

    @property
    def name(self) -> str:
        return f"{self.tokens} x {self.k} x {self.hidden}"

    def best(self, *kinds: str) -> tuple[float, str]:
        """The least time, and its way."""
        found = [(us, way) for kind in kinds for way, us in self.us.get(kind, {}).items()]
        return min(found, default=(math.inf, ""))

    @property
    def sums(self) -> DenseProblem:
        """The problem without its tail."""
        return DenseProblem(REDUCE, self.tokens, self.k, self.hidden, self.world, torch.bfloat16)

    def adds(self, way: str) -> bool:
        """Whether the kernel of a way adds the residual to the sums."""
        found = ways_of(self.sums).get(way)
        return found is not None and found.kernel is not None and found.kernel.adds

    def points(self) -> list[Point]:
        """What the choice of a way learns from the cell."""
        sums = self.sums
        tails = replace(sums, written=RESULTS * self.hidden)
        applied = {**self.us[EVERY], **self.us[OWNER]}
        return [Point.of(sums, {**self.us[SUM]}), Point.of(tails, applied)]


def tail_points(cells: Sequence[Cell]) -> list[Point]:
    """What a tail adds to the time of a sum, by rows and columns: the geometric mean over cells and ways. Of
    many rows behind kernels that add the residual themselves, as nearly all that are taken do."""
    found: dict[tuple[int, int], dict[str, list[float]]] = {}
    for cell in cells:
        added = found.setdefault((cell.tokens, cell.hidden), {"inductor": [], "tail_alone": []})
        for kind, name in ((TORCH, "inductor"), (UNCHANGED, "inductor"), (EVERY, "tail_alone")):
            for way, us in cell.us[kind].items():
                if kind == EVERY and cell.tokens > FEW and not cell.adds(way):
                    continue
                if way in cell.us[SUM] and not way.startswith(BEHIND):
                    added[name].append(us - cell.us[SUM][way])
    points = []
    for (rows, columns), added in found.items():
        times = {name: geometric_mean(us) for name, us in added.items() if us and min(us) > 0}
        if times:
            points.append(Point.of(TailProblem(rows, columns), times))
    return points


def check(world: int) -> None:
    """ValueError for a world that K of a cell cannot be shared by."""
    for ratio, hidden in itertools.product(RATIOS, HIDDEN):
        if round(ratio * hidden) % world:
            raise ValueError(f"{world} ranks cannot share K = {ratio * hidden:.0f}; start 2, 4 or 8")


def run(seconds: float, tune: bool, json_file: Path | None, markdown: Path | None) -> NoReturn:
    """Measures on the group of torchrun, which has been joined, and begins no cell after `seconds`. Rank 0
    prints and writes the table, and the JSON file after every cell; with `tune` it adds points to the user's
    own file. Ends the process."""
    group = dist.group.WORLD
    assert group is not None
    enable_symmetric_memory(group)
    until, cells = time.monotonic() + seconds, list[Cell]()
    data: dict[str, Any] = {"machine": machine(), "cells": []}
    norm = torch.compile(normed, dynamic=False)  # as fast as Inductor makes it, for each shape
    with compiling_variants(), torch.no_grad(), autofuse.config.patch(timeout_s=TIMEOUT_S):
        for ratio, hidden, tokens in itertools.product(RATIOS, HIDDEN, TOKENS):
            if over(until):
                break
            cells.append(_measured(tokens, round(ratio * hidden) // group.size(), hidden, group, norm))
            data["cells"].append(asdict(cells[-1]))
            written(cells[-1].name, data, json_file)
    if tune and dist.get_rank() == 0:
        points = [point for cell in cells for point in cell.points()] + tail_points(cells)
        write(own_file(torch.device("cuda", torch.cuda.current_device())), points)
    leave(lambda: table(cells), markdown)


def _measured(
    tokens: int, k: int, hidden: int, group: dist.ProcessGroup, norm: Callable[..., tuple[Tensor, Tensor]]
) -> Cell:
    x, *weights = _random(group.rank() + 1, (tokens, k), *[(k, hidden)] * copies_of(2 * k * hidden))
    residual, gamma = _random(0, (tokens, hidden), (hidden,))
    weights = [w.mul_(k**-0.5) for w in weights]

    def fused(behind: list[Tensor], tail: str, proof: str) -> Fused:
        site = f"tails {proof} {len(behind)} {tokens} {k} {hidden}"
        end = (behind, tail, proof, group.group_name, "direct", site)
        return Fused(REDUCE, [([x], [w], [], "mm", "sum", False, *end) for w in weights], whole=bool(tail))

    def then_norm(call: Call) -> Call:
        return lambda i: norm(call(i), residual, gamma)

    def sliced(i: int) -> tuple[Tensor, ...]:
        y, rows = x @ weights[i % len(weights)], tokens // group.size()
        part = y.new_empty(rows, hidden)
        dist.reduce_scatter_tensor(part, y)
        own = norm(part, residual.narrow(0, group.rank() * rows, rows), gamma)
        found = y.new_empty(2, tokens, hidden)
        for whole, t in zip(found, own, strict=True):
            dist.all_gather_into_tensor(whole, t)
        return tuple(found)

    sums, every, owner = fused([], "", ""), *(fused([residual, gamma], TAIL, p) for p in ("", "same"))
    libraries = [way for way in (CUBLAS_NCCL, ONE_SHOT, TWO_SHOT) if way in sums.names(True)]
    behind = [way for way in sums.names() if way.startswith(BEHIND)]
    others = [sums.chosen()] if sums.chosen() not in (*libraries, *behind) else []
    calls: dict[Key, Call] = {(SUM, way): sums.call(way) for way in (*libraries, *behind, *others)}
    calls |= {(TORCH, way): then_norm(sums.call(way)) for way in libraries}
    calls |= {(UNCHANGED, way): then_norm(sums.call(way)) for way in (*behind, *others)}
    calls |= {(EVERY, way): every.call(way) for way in every.names() if way in (*behind, *others)}
    if "rows" in owner.names():
        calls[OWNER, "rows"] = owner.call("rows")
    if tokens % group.size() == 0:
        calls[TORCH, "reduce_scatter, norm, all_gather"] = sliced
    total = (x @ weights[0]).float()
    dist.all_reduce(total)
    exact = total.bfloat16()
    wanted = {True: exact, False: normed(exact, residual, gamma)[0]}

    def check(key: Key, result: Any) -> float:
        first = result if isinstance(result, Tensor) else result[0]
        return relative_error(first, wanted[key[0] == SUM].double())

    times = captured(time_all(calls, calls_for(matmul_us(tokens, k, hidden) + 10), QUICK, check))
    us: dict[str, dict[str, float]] = {kind: {} for kind in (TORCH, UNCHANGED, EVERY, OWNER, SUM)}
    for (kind, way), found in times.items():
        us[kind][way] = round(found, 2)
    return Cell(tokens, k, hidden, group.size(), us)


def _random(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    own = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=own) for shape in shapes]


def table(cells: Sequence[Cell]) -> str:
    """The cells as a table in Markdown, and means."""
    titles = ("ranks", "hidden", "K of a rank", "tokens", "torch us", "unchanged us", "tail us", "tail in")
    rows: list[tuple[str, ...]] = [(*titles, "torch / unchanged", "torch / tail")]
    gains: dict[bool, list[float]] = {}
    for cell in sorted(cells, key=lambda c: (c.world, c.hidden, c.k, c.tokens)):
        tail, way = cell.best(EVERY, OWNER)
        us = [cell.best(TORCH)[0], cell.best(UNCHANGED)[0], tail]
        sizes = [str(size) for size in (cell.world, cell.hidden, cell.k, cell.tokens)]
        rows.append((*sizes, *(f"{t:,.1f}" for t in us), way, *(f"{us[0] / t:.2f}" for t in us[1:])))
        gains.setdefault(cell.tokens <= FEW, []).append(us[0] / tail)
    lines = [grid(rows), ""]
    for few, found in sorted(gains.items(), reverse=True):
        which = f"up to {FEW} tokens" if few else "more tokens"
        lines.append(f"- {which}: geometric mean {geometric_mean(found):.2f}x, worst {min(found):.2f}x")
    return "\n".join(lines)


def read(path: Path) -> list[Cell]:
    """The cells of a JSON file."""
    return [Cell(**cell) for cell in json.loads(path.read_text())["cells"]]
