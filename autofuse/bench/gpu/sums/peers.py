"""The ways to run a cell of sums: with what torch ships, compiled, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autofuse.bench.gpu.exchange.work import Sample, Variant, Work, sampled
from autofuse.bench.gpu.named_ways import Fused
from autofuse.bench.gpu.ratios import DTYPE
from autofuse.bench.gpu.sums.cells import REDUCE, SCATTER, Cell
from autofuse.lowering.torch_internals import (
    grouped_mm,
    resolve_group,
    symmetric_all_reduce,
    symmetric_empty,
    symmetric_views,
)

Inputs: TypeAlias = Sequence[Tensor]
"""Of experts: x, w, ends, back, factors. Of tables: indices, tables, then offsets."""
Local: TypeAlias = Callable[[Inputs], Tensor]

SETS = 4
"""Of inputs that calls take by turns."""


def work(cell: Cell, device: torch.device, group_name: str) -> Work:
    """All that there is to measure of a cell."""
    drawn, local, exact = (
        (_experts, _added, _exact_added) if cell.kind == "experts" else (_tables, _pooled, _exact_pooled)
    )
    inputs = drawn(cell, device)
    some = sampled(cell.rows, cell.world, device)
    rows = some.flatten()
    mine = exact(cell, inputs[0], rows)
    total = mine.clone()
    dist.all_reduce(total)
    alone = Sample((cell.rows, cell.columns), rows, mine)
    if cell.op == REDUCE:
        whole = Sample((cell.rows, cell.columns), rows, total)
    else:
        whole = Sample(
            (cell.rows // cell.world, cell.columns), some[0], total.chunk(cell.world)[dist.get_rank()]
        )
    compiled = torch.compile(local(cell), dynamic=False)
    fused = Fused(cell.op, [_arguments(cell, given, group_name) for given in inputs])

    def variant(run: Local, sample: Sample) -> Variant:
        return Variant(lambda i: run(inputs[i % len(inputs)]), sample.error)

    found = peers(cell, compiled, device, group_name)
    variants = {
        "compute": {"compiled": variant(compiled, alone)},
        "peers": {name: variant(run, whole) for name, run in found.items()},
        "ours": {"auto": Variant(fused.auto, whole.error)},
    }
    return Work(variants, fused)


def peers(cell: Cell, compiled: Local, device: torch.device, group_name: str) -> dict[str, Local]:
    """The compiled sums of this rank, and a collective of torch's."""

    def nccl(given: Inputs) -> Tensor:
        total = compiled(given)
        if cell.op == REDUCE:
            dist.all_reduce(total)
            return total
        part = total.new_empty(cell.rows // cell.world, cell.columns)
        dist.reduce_scatter_tensor(part, total)
        return part

    found: dict[str, Local] = {"nccl": nccl}
    if cell.op == REDUCE and device.type == "cuda":
        shared = symmetric_empty(cell.rows * cell.columns, getattr(torch, DTYPE), device)
        symmetric_views(shared, resolve_group(group_name))

        def symmetric(given: Inputs, once: bool) -> Tensor:
            """A compiled program would store its sums there; this one copies them."""
            shared.copy_(compiled(given).flatten())
            return symmetric_all_reduce(shared, group_name, once=once).view(cell.rows, cell.columns)

        found["one_shot"] = lambda given: symmetric(given, True)
        found["two_shot"] = lambda given: symmetric(given, False)
    return found


def _experts(cell: Cell, device: torch.device) -> list[Inputs]:
    """All ranks have the same routing. Each has rows and weights of its own."""
    same = torch.Generator(device).manual_seed(5)
    entries, depth, dtype = cell.rows * cell.top, cell.depth // cell.world, getattr(torch, DTYPE)
    w = torch.randn(cell.experts, depth, cell.columns, device=device, dtype=dtype) / cell.depth**0.5
    found = list[Inputs]()
    for _ in range(SETS):
        scores = torch.rand(cell.rows, cell.experts, device=device, generator=same)
        factors, chosen = scores.topk(cell.top)
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(
            expert, torch.arange(cell.experts, device=device), right=True, out_int32=True
        )
        x = torch.randn(entries, depth, device=device, dtype=dtype)
        found.append([x, w, ends, order.argsort(), factors.reshape(-1, 1)])
    return found


def _added(cell: Cell) -> Local:
    """As Mixtral in Hugging Face has it: weighted, and added up in the order of the tokens."""

    def local(given: Inputs) -> Tensor:
        x, w, ends, back, factors = given
        weighted = grouped_mm(x, w, ends)[back] * factors
        return weighted.view(cell.rows, cell.top, -1).sum(1).to(x.dtype)

    return local


def _exact_added(cell: Cell, given: Inputs, rows: Tensor) -> Tensor:
    x, w, ends, back, factors = given
    entries = (rows[:, None] * cell.top + torch.arange(cell.top, device=rows.device)).flatten()
    places = back[entries]
    expert = torch.searchsorted(ends.long(), places, right=True)
    of_rows = [x[p].double() @ w[e].double() for p, e in zip(places.tolist(), expert.tolist(), strict=True)]
    return (torch.stack(of_rows) * factors[entries]).view(len(rows), cell.top, -1).sum(1)


def _tables(cell: Cell, device: torch.device) -> list[Inputs]:
    dim, dtype = cell.columns // cell.tables, getattr(torch, DTYPE)
    tables = [torch.randn(cell.table_rows, dim, device=device, dtype=dtype) for _ in range(cell.tables)]
    offsets = torch.arange(0, cell.rows * cell.pooling, cell.pooling, device=device)
    return [
        [
            *(torch.randint(0, cell.table_rows, (cell.rows * cell.pooling,), device=device) for _ in tables),
            *tables,
            offsets,
        ]
        for _ in range(SETS)
    ]


def _pooled(cell: Cell) -> Local:
    def local(given: Inputs) -> Tensor:
        indices, tables = given[: cell.tables], given[cell.tables : -1]
        bags = zip(indices, tables, strict=True)
        return torch.cat([F.embedding_bag(i, t, given[-1], mode="sum") for i, t in bags], 1)

    return local


def _exact_pooled(cell: Cell, given: Inputs, rows: Tensor) -> Tensor:
    bags = zip(given[: cell.tables], given[cell.tables : -1], strict=True)
    return torch.cat([t[i.view(cell.rows, -1)[rows]].double().sum(1) for i, t in bags], 1)


def _arguments(cell: Cell, given: Inputs, group_name: str) -> tuple[Any, ...]:
    """Those of the fused op."""
    scattered = (0, 1) if cell.op == SCATTER else ()
    end = ("sum", *scattered, False, [], "", "", group_name, "direct", "bench")
    if cell.kind == "tables":
        offsets = [given[-1]] * cell.tables
        return given[: cell.tables], given[cell.tables : -1], offsets, "bags sum 0 -1", *end
    x, w, ends, back, factors = given
    product = f"grouped %0; take %1; mul %2; sum {cell.top}; to {DTYPE}"
    return [x], [w], [ends[:, None], back[:, None], factors], product, *end
