"""The ways to run a cell of sums: with what torch ships, compiled, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

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
"""Of experts: x, w, ends, back, factors. Of tables: indices, tables, then offsets. Of a vocabulary: places,
table, and whether a token is one of another rank. Of products: x, w, and an operand of the stage."""
Local: TypeAlias = Callable[[Inputs], Tensor]

SETS = 4
"""Of inputs that calls take by turns."""


def work(cell: Cell, device: torch.device, group_name: str) -> Work:
    """All that there is to measure of a cell."""
    kind = KINDS[cell.kind]
    inputs = kind.drawn(cell, device)
    some = sampled(cell.rows, cell.world, device)
    rows = some.flatten()
    mine = kind.exact(cell, inputs[0], rows)
    total = mine.clone()
    dist.all_reduce(total)
    alone = Sample((cell.rows, cell.columns), rows, mine)
    if cell.op == REDUCE:
        whole = Sample((cell.rows, cell.columns), rows, total)
    else:
        whole = Sample(
            (cell.rows // cell.world, cell.columns), some[0], total.chunk(cell.world)[dist.get_rank()]
        )
    torch._dynamo.reset()  # which compiles a function for a few shapes only
    compiled = torch.compile(kind.local(cell), fullgraph=True, dynamic=False)
    scattered = (0, 1) if cell.op == SCATTER else ()
    end = ("sum", *scattered, False, [], "", "", group_name, "direct", "bench")
    fused = Fused(cell.op, [(*kind.arguments(cell, given), *end) for given in inputs])

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


def _of_experts(cell: Cell, given: Inputs) -> tuple[Any, ...]:
    x, w, ends, back, factors = given
    product = f"grouped %0; take %1; mul %2; sum {cell.top}; to {DTYPE}"
    return [x], [w], [ends[:, None], back[:, None], factors], product


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


def _of_pooled(cell: Cell, given: Inputs) -> tuple[Any, ...]:
    return given[: cell.tables], given[cell.tables : -1], [given[-1]] * cell.tables, "bags sum 0 -1"


def _vocabulary(cell: Cell, device: torch.device) -> list[Inputs]:
    """All ranks have the same tokens."""
    same = torch.Generator(device).manual_seed(6)
    table = torch.randn(cell.table_rows, cell.columns, device=device, dtype=getattr(torch, DTYPE))
    found = list[Inputs]()
    for _ in range(SETS):
        tokens = torch.randint(0, cell.world * cell.table_rows, (cell.rows,), device=device, generator=same)
        places = tokens - dist.get_rank() * cell.table_rows
        theirs = (places < 0) | (places >= cell.table_rows)
        found.append([places.masked_fill(theirs, 0), table, theirs])
    return found


def _read(cell: Cell) -> Local:
    """As torch's sharded embeddings have it."""
    return lambda given: F.embedding(given[0], given[1]).masked_fill(given[2][:, None], 0.0)


def _exact_read(cell: Cell, given: Inputs, rows: Tensor) -> Tensor:
    places, table, theirs = given
    return table[places[rows]].double().masked_fill(theirs[rows, None], 0.0)


def _of_read(cell: Cell, given: Inputs) -> tuple[Any, ...]:
    places, table, theirs = given
    return [places[:, None]], [table], [theirs[:, None]], "rows; masked_fill %0 0.0"


STAGES: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "bias": ("addmm %0", lambda x, w, bias: torch.addmm(bias, x, w)),
    "scale": ("mm; mul 0.5", lambda x, w, _: x @ w * 0.5),
    "residual": ("mm; add %0", lambda x, w, residual: x @ w + residual),
}


def _product(cell: Cell, device: torch.device) -> list[Inputs]:
    depth = cell.depth // cell.world

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=getattr(torch, DTYPE))

    operand = (cell.columns,) if cell.model == "bias" else (cell.rows, cell.columns)
    return [
        [new(cell.rows, depth), new(depth, cell.columns) / cell.depth**0.5, new(*operand)]
        for _ in range(SETS)
    ]


def _staged(cell: Cell) -> Local:
    return lambda given: STAGES[cell.model][1](*given)


def _exact_staged(cell: Cell, given: Inputs, rows: Tensor) -> Tensor:
    x, w, operand = (t.double() for t in given)
    return STAGES[cell.model][1](x[rows], w, operand if operand.dim() == 1 else operand[rows])


def _of_staged(cell: Cell, given: Inputs) -> tuple[Any, ...]:
    x, w, operand = given
    text = STAGES[cell.model][0]
    return [x], [w], [operand] * ("%0" in text), text


class Kind(NamedTuple):
    """drawn: inputs; local: what torch compiles; exact: some rows of P in float64; arguments: the first ones
    of the fused op."""

    drawn: Callable[[Cell, torch.device], list[Inputs]]
    local: Callable[[Cell], Local]
    exact: Callable[[Cell, Inputs, Tensor], Tensor]
    arguments: Callable[[Cell, Inputs], tuple[Any, ...]]


KINDS = {
    "experts": Kind(_experts, _added, _exact_added, _of_experts),
    "tables": Kind(_tables, _pooled, _exact_pooled, _of_pooled),
    "product": Kind(_product, _staged, _exact_staged, _of_staged),
    "vocabulary": Kind(_vocabulary, _read, _exact_read, _of_read),
}
