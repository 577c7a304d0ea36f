"""`autofuse bench optimizer`: a step with its exchange of gradients, ours and what torch has.

All peers get the same gradients and are timed in turn, block by block, in one process a rank. None of them
includes a backward: what could be hidden behind one is not.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from autofuse import optim
from autofuse.bench.cpu.run import cores
from autofuse.lowering.buckets import buckets_of
from autofuse.lowering.update_rules import adam_numbers

OURS, OP = "autofuse", "reduce_update_gather"
BUCKET_BYTES = 25 << 20
"""Of the flat buffers, as in DDP."""

BLOCK_S, MOST_CALLS = 0.02, 64
"""Steps are timed in blocks of about this length: ranks leave a barrier up to milliseconds apart."""

RATES: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
Shapes = Sequence[tuple[int, ...]]


def _bert(layers: int) -> Shapes:
    d, block = 1024, []
    for _ in range(4):
        block += [(d, d), (d,)]
    return [*block, (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,), (d,), (d,)] * layers


def _gpt2(layers: int) -> Shapes:
    d = 768
    return [
        (d,),
        (d,),
        (d, 3 * d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (d, 4 * d),
        (4 * d,),
        (4 * d, d),
        (d,),
    ] * layers


def _llama(layers: int) -> Shapes:
    d, f = 2048, 8192
    return [(d, d), (512, d), (512, d), (d, d), (f, d), (f, d), (d, f), (d,), (d,)] * layers


CELLS: dict[str, Shapes] = {
    **{f"2^{n}": [(1 << n,)] for n in (10, 14, 18, 22, 24)},
    "64 of 2^10": [(1 << 10,)] * 64,
    "BERT-large, 2 layers": _bert(2),
    "GPT-2, 3 layers": _gpt2(3),
    "Llama-1B, 1 layer": _llama(1),
}
ON_GPUS: dict[str, Shapes] = {
    **{f"2^{n}": [(1 << n,)] for n in (10, 14, 18, 22, 26, 28)},
    "64 of 2^10": [(1 << 10,)] * 64,
    "BERT-large": [(30522, 1024), (512, 1024), *_bert(24)],
    "GPT-2": [(50257, 768), (1024, 768), *_gpt2(12)],
    "Llama-1B": [(128256, 2048), *_llama(16)],
}
"""The shapes of each row on GPUs; some take too long on a CPU."""


@dataclass(frozen=True)
class Options:
    """What to measure; equal on all ranks."""

    rows: tuple[str, ...]
    dtypes: tuple[str, ...]
    lamb: bool
    seconds: float
    """That are spent on a row, about."""
    threads: int = 1


@dataclass(frozen=True)
class Row:
    """Microseconds of a step of every peer: medians of the slowest rank."""

    name: str
    rule: str
    dtype: str
    world: int
    elements: int
    us: dict[str, float]

    @property
    def best(self) -> tuple[str, float]:
        """The fastest of torch's, and how many times as long as ours it takes."""
        name = min((n for n in self.us if not n.startswith(OURS)), key=lambda n: self.us[n])
        return name, self.us[name] / self.us[OURS]


def run(worlds: Sequence[int], options: Options) -> list[Row]:
    """The rows of groups of so many ranks each, which share out the cores of this process."""
    rows: list[Row] = []
    for world in worlds:
        threads = max(1, cores() // world)
        with tempfile.TemporaryDirectory(prefix="autofuse-bench-") as directory:
            chosen = Options(options.rows, options.dtypes, options.lamb, options.seconds, threads)
            multiprocessing.spawn(_rank, (world, directory, chosen), nprocs=world)
            rows += [Row(**row) for row in json.loads(Path(directory, "rows.json").read_text())]
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    peers = list(dict.fromkeys(name for row in rows for name in row.us))
    lines = [
        "| ranks | rule | dtype | tensors | "
        + " | ".join(f"{p} us" for p in peers)
        + " | best other / ours |"
    ]
    lines.append("|---" * (len(peers) + 5) + "|")
    for row in rows:
        of_peers = [f"{row.us[p]:,.0f}" if p in row.us else "" for p in peers]
        name, ratio = row.best
        cells = [str(row.world), row.rule, row.dtype, row.name, *of_peers, f"{ratio:.2f} ({name})"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run_on_gpus(options: Options) -> list[Row]:
    """The rows of the group of torchrun, which has been joined."""
    warnings.filterwarnings("ignore")
    return _rows(ON_GPUS, options, torch.device("cuda", torch.cuda.current_device()))


def _rank(rank: int, world: int, directory: str, options: Options) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    rows = _rows(CELLS, options, torch.device("cpu"))
    if rank == 0:
        Path(directory, "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def _rows(cells: dict[str, Shapes], options: Options, device: torch.device) -> list[Row]:
    return [
        _measure(name, shapes, rule, dtype, options, device)
        for name, shapes in cells.items()
        if not options.rows or any(part in name for part in options.rows)
        for rule in ("AdamW", *(["LAMB"] if options.lamb else []))
        for dtype in options.dtypes
    ]


def _measure(name: str, shapes: Shapes, rule: str, dtype: str, options: Options, device: torch.device) -> Row:
    steps = dict(_peers(rule, shapes, getattr(torch, dtype), device))
    _check(steps, rule)
    for step, _ in steps.values():
        _block(step, 2, device)
    each = _largest([_block(step, 2, device) for step, _ in steps.values()], device)
    calls = [max(1, min(MOST_CALLS, round(BLOCK_S / seconds))) for seconds in each]
    a_round = sum(count * seconds for count, seconds in zip(calls, each, strict=True))
    times: dict[str, list[float]] = {peer: [] for peer in steps}
    for _ in range(max(5, min(40, math.ceil(options.seconds / a_round)))):
        for (peer, (step, _)), count in zip(steps.items(), calls, strict=True):
            times[peer].append(_block(step, count, device))
    us = {peer: 1e6 * statistics.median(_largest(found, device)) for peer, found in times.items()}
    return Row(name, rule, dtype, dist.get_world_size(), sum(map(math.prod, shapes)), us)


Peer = tuple[Callable[[], object], list[Tensor]]
"""A step, and the parameters that it changes."""


def _peers(rule: str, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Peer]]:
    params = _params(shapes, dtype, device)
    ours = getattr(optim, rule)(params, **RATES)
    yield OURS, (ours.step, params)
    if rule == "LAMB":
        params = _params(shapes, dtype, device)
        yield "all_reduce + foreach LAMB", (_foreach_lamb(params), params)
        return

    if params[0].is_cuda:
        from autofuse.lowering.gpu import by_name

        for way in by_name.names(OP, _arguments(params), False):
            made = _params(shapes, dtype, device)
            arguments = _arguments(made)
            yield f"{OURS} {way}", (partial(by_name.run, way, OP, arguments), made)

    params = _params(shapes, dtype, device)
    each = torch.optim.AdamW(params, fused=True, **RATES)
    yield "all_reduce a tensor", (_after(_reduce_each, params, each), params)

    params = _params(shapes, dtype, device)
    bucketed = torch.optim.AdamW(params, fused=True, **RATES)
    yield "flat buckets", (_after(_reduce_buckets, params, bucketed), params)

    yield "reduce_scatter, slice, all_gather", _flat(shapes, dtype, device)

    from torch.distributed.optim import ZeroRedundancyOptimizer

    params = _params(shapes, dtype, device)
    if len(params) >= dist.get_world_size():
        zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, fused=True, **RATES)
        yield "ZeroRedundancyOptimizer", (_after(_reduce_buckets, params, zero), params)


def _arguments(params: list[Tensor]) -> tuple[Any, ...]:
    """Of the op: the first update of AdamW."""
    group = dist.group.WORLD
    assert group is not None
    owned = buckets_of(tuple(p.numel() for p in params), group.size()).owned(group.rank())
    row = adam_numbers(1, RATES["lr"], (0.9, 0.999), 1e-8, RATES["weight_decay"], True)
    numbers = torch.tensor([row], dtype=torch.float64, device="cpu").expand(len(params), -1)
    names = [f"parameter {i}" for i in range(len(params))]
    return (
        [p.detach() for p in params], _grads(params),
        [torch.zeros(owned, device=params[0].device) for _ in range(2)], numbers, "adam", "avg", 0.0, False,
        names, group.group_name, "direct", "bench",
    )  # fmt: skip


def _params(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """With gradients that differ from rank to rank."""
    weights, grads = (torch.Generator(device).manual_seed(seed) for seed in (0, 1 + dist.get_rank()))
    params = [torch.randn(s, generator=weights, device=device).to(dtype).requires_grad_() for s in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=grads, device=device).to(dtype)
    return params


def _after(
    reduce: Callable[[list[Tensor]], None], params: list[Tensor], optimizer: Any
) -> Callable[[], object]:
    def step() -> None:
        reduce(params)
        optimizer.step()

    return step


def _grads(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _reduce_each(params: list[Tensor]) -> None:
    works = [dist.all_reduce(g, async_op=True) for g in _grads(params)]
    for work in works:
        work.wait()
    torch._foreach_div_(_grads(params), dist.get_world_size())


def _reduce_buckets(params: list[Tensor]) -> None:
    bucket: list[Tensor] = []
    nbytes = 0
    for g in [*_grads(params), None]:
        if bucket and (g is None or nbytes + g.nbytes > BUCKET_BYTES):
            flat = torch.cat([t.view(-1) for t in bucket])
            dist.all_reduce(flat)
            flat.div_(dist.get_world_size())
            parts = flat.split([t.numel() for t in bucket])
            torch._foreach_copy_([t.view(-1) for t in bucket], list(parts))
            bucket, nbytes = [], 0
        if g is not None:
            bucket.append(g)
            nbytes += g.nbytes


def _flat(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Peer:
    """Gradients and parameters are views of two flat tensors, which is what ZeRO implementations keep."""
    world, rank = dist.get_world_size(), dist.get_rank()
    made = _params(shapes, dtype, device)
    length = -(-sum(p.numel() for p in made) // world) * world
    weights, grads = (torch.zeros(length, dtype=dtype, device=device) for _ in range(2))
    params, at = [], 0
    for p in made:
        params.append(weights[at : at + p.numel()].view(p.shape).copy_(p.detach()))
        grads[at : at + p.numel()].view(p.shape).copy_(p.grad)  # type: ignore[arg-type]
        at += p.numel()
    mine = weights.view(world, -1)[rank].detach().requires_grad_()
    optimizer = torch.optim.AdamW([mine], fused=True, **RATES)

    def step() -> None:
        mine.grad = torch.empty_like(mine)
        dist.reduce_scatter_tensor(mine.grad, grads)
        mine.grad.div_(world)
        optimizer.step()
        dist.all_gather_into_tensor(weights, mine.detach())

    return step, params


def _foreach_lamb(params: list[Tensor]) -> Callable[[], object]:
    m, v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    t = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal t
        t += 1
        _reduce_buckets(params)
        grads = _grads(params)
        torch._foreach_lerp_(m, grads, 0.1)
        torch._foreach_mul_(v, 0.999)
        torch._foreach_addcmul_(v, grads, grads, 0.001)
        root = torch._foreach_sqrt(v)
        torch._foreach_div_(root, math.sqrt(1 - 0.999**t))
        torch._foreach_add_(root, 1e-6)
        u = torch._foreach_div(m, root)
        torch._foreach_div_(u, 1 - 0.9**t)
        torch._foreach_add_(u, params, alpha=RATES["weight_decay"])
        factors = torch._foreach_div(torch._foreach_norm(params), torch._foreach_norm(u))
        torch._foreach_mul_(u, factors)
        torch._foreach_sub_(params, u, alpha=RATES["lr"])

    return step


def _check(steps: dict[str, Peer], rule: str) -> None:
    """One step of all peers gives nearly the same parameters."""
    for step, _ in steps.values():
        step()
    ours = steps[OURS][1]
    for peer, (_, params) in steps.items():
        for a, b in zip(ours, params, strict=True):
            far = float((a.detach().float() - b.detach().float()).abs().max())
            assert far <= 0.05, f"{rule}: {peer} is {far} away from ours"


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
