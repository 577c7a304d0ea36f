"""`autofuse bench optimizer`: a step with its exchange of gradients, ours and what torch has.

All peers get the same gradients and are timed in turn, block by block, in one process a rank. Only
training steps have a backward: else, what could be hidden behind one is not.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import multiprocessing

from autofuse.bench.cpu.run import cores

from .cells import CELLS, FEW_BUCKETS, ON_GPUS, Shapes
from .peers import Peer, peers
from .rows import OURS, WRITTEN, Options, Row
from .training import TRAINING, TRAINING_ON_GPUS, Model, training_peers
from .written import check_written, written_peers

Cell: TypeAlias = Shapes | Model

BLOCK_S, MOST_CALLS = 0.02, 64
"""Steps are timed in blocks of about this length: ranks leave a barrier up to milliseconds apart."""

FAR = 0.05
"""How far a parameter may be from ours after a step."""

WARM = 3
"""Steps before one is captured."""


def run(worlds: Sequence[int], options: Options) -> list[Row]:
    """The rows of groups of so many ranks each, which share out the cores of this process."""
    rows: list[Row] = []
    for world in worlds:
        threads = max(1, cores() // world)
        with tempfile.TemporaryDirectory(prefix="autofuse-bench-") as directory:
            chosen = replace(options, threads=threads)
            multiprocessing.spawn(_rank, (world, directory, chosen), nprocs=world)
            rows += [Row(**row) for row in json.loads(Path(directory, "rows.json").read_text())]
    return rows


def run_on_gpus(options: Options, json_file: Path | None) -> list[Row]:
    """The rows of the group of torchrun, which has been joined. Rank 0 writes the file after every row."""
    from autofuse.bench.gpu.driver import link, machine, written
    from autofuse.bench.gpu.rates import copy_rate

    warnings.filterwarnings("ignore")
    device = torch.device("cuda", torch.cuda.current_device())
    buffer, about = link(0)
    memory = copy_rate(buffer, torch.empty_like(buffer))
    data: dict[str, Any] = {"machine": machine(), **about, "memory_gb_per_s": memory, "rows": []}
    rows = []
    cells: Mapping[str, Cell] = _cells(options, ON_GPUS, TRAINING_ON_GPUS)
    for name, rule, dtype in _chosen(cells, options):
        row = _measure(name, cells[name], rule, dtype, options, device)
        limit = None if options.training else row.limit(about["link_gb_per_s"], memory)
        rows.append(replace(row, limit_us=limit))
        data["rows"].append({**asdict(rows[-1]), "best_other": row.best})
        written(f"{name} {rule} {dtype}", data, json_file)
    return rows


def _rank(rank: int, world: int, directory: str, options: Options) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    device = torch.device("cpu")
    cells: Mapping[str, Cell] = _cells(options, CELLS, TRAINING)
    chosen = _chosen(cells, options)
    rows = [_measure(name, cells[name], rule, dtype, options, device) for name, rule, dtype in chosen]
    if rank == 0:
        Path(directory, "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def _cells(
    options: Options, steps: Mapping[str, Shapes], training: Mapping[str, Model]
) -> Mapping[str, Cell]:
    return FEW_BUCKETS if options.written else training if options.training else steps


def _chosen(cells: Mapping[str, Cell], options: Options) -> list[tuple[str, str, str]]:
    """Name, rule and dtype of each row."""
    return [
        (name, rule, dtype)
        for name in cells
        if not options.rows or any(part in name for part in options.rows)
        for rule in _rules(options)
        for dtype in options.dtypes
    ]


def _rules(options: Options) -> Sequence[str]:
    if options.written:
        return (WRITTEN,)
    return ("AdamW", "LAMB") if options.lamb and not options.training else ("AdamW",)


def _measure(name: str, cell: Cell, rule: str, dtype: str, options: Options, device: torch.device) -> Row:
    kind = getattr(torch, dtype)
    if isinstance(cell, Model):
        compared = dict(training_peers(cell, kind, device))
    elif rule == WRITTEN:
        compared = dict(written_peers(cell, kind, device))
    else:
        compared = dict(peers(rule, cell, kind, device, options))
    elements = sum(p.numel() for p in compared[OURS][1])
    compared = check_written(compared) if rule == WRITTEN else _right(compared, rule)
    steps = {peer: _replay(step) if options.captured else step for peer, (step, _) in compared.items()}
    for step in steps.values():
        _block(step, 2, device)
    each = _largest([_block(step, 2, device) for step in steps.values()], device)
    calls = [max(1, min(MOST_CALLS, round(BLOCK_S / seconds))) for seconds in each]
    a_round = sum(count * seconds for count, seconds in zip(calls, each, strict=True))
    times: dict[str, list[float]] = {peer: [] for peer in steps}
    for _ in range(max(5, min(40, math.ceil(options.seconds / a_round)))):
        for (peer, step), count in zip(steps.items(), calls, strict=True):
            times[peer].append(_block(step, count, device))
    us = {peer: 1e6 * statistics.median(_largest(found, device)) for peer, found in times.items()}
    return Row(name, rule, dtype, dist.get_world_size(), elements, us, options.captured, options.clipped)


def _replay(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _right(steps: dict[str, Peer], rule: str) -> dict[str, Peer]:
    """Makes one step of every peer, and returns the peers whose parameters are then within `FAR` of those of
    `autofuse.optim`. A peer of torch that is farther away is named on stderr and left out. AssertionError if
    a kernel of ours is farther away, or if no peer of torch is left."""
    for step, _ in steps.values():
        step()
    found, ours = {}, steps[OURS][1]
    for peer, (step, params) in steps.items():
        pairs = zip(ours, params, strict=True) if params else ()
        far = max(
            (float((a.detach().float() - b.detach().float()).abs().max()) for a, b in pairs), default=0.0
        )
        (far,) = _largest([far], ours[0].device)
        if far <= FAR:
            found[peer] = step, params
            continue
        assert not peer.startswith(OURS), f"{rule}: {peer} is {far} away from the optimizer"
        if dist.get_rank() == 0:
            print(f"{rule}: {peer} is {far} away from ours, and left out", file=sys.stderr)
    assert len(found) > sum(peer.startswith(OURS) for peer in found), (
        f"{rule}: no other peer agrees with ours"
    )
    return found


def _block(step: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds a call, from a barrier on."""
    _finish(device)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    _finish(device)
    return (time.perf_counter() - begin) / calls


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _largest(values: Sequence[float], device: torch.device) -> list[float]:
    result = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return [float(v) for v in result]
