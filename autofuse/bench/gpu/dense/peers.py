"""The ways to run a dense cell: what a user would otherwise use, and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.bench.gpu.dense.cells import Cell
from autofuse.bench.gpu.driver import relative_error
from autofuse.bench.gpu.named_ways import Fused
from autofuse.bench.gpu.ratios import DTYPE
from autofuse.lowering.gpu.choice.timing import Timing, captured
from autofuse.lowering.torch_internals import (
    async_tp_all_gather_matmul,
    async_tp_matmul_reduce_scatter,
    symmetric_all_reduce,
    symmetric_barrier,
    symmetric_views,
)

Run: TypeAlias = Callable[[Tensor], Tensor]
"""Takes a weight and returns the result."""

MOST_ONE_SHOT_BYTES = 64 << 20
"""Bytes up to which one_shot_all_reduce is measured: in it every rank reads all data of every other rank."""


@dataclass(frozen=True)
class Operands:
    """The operands of one cell. `x`: [M, K / W], of a gather [M / W, N], of logits [M, K];
    `gathered`: what all ranks' x make together, of all_gather_matmul only; `buffer`: symmetric memory, flat,
    for M * N elements or more."""

    x: Tensor
    gathered: Tensor | None
    buffer: Tensor
    group_name: str
    alone: str
    """The group of this rank alone."""


def operands(cell: Cell, buffer: Tensor, group_name: str, alone: str) -> Operands:
    """Random operands, different on every rank."""
    rows = cell.m // cell.world if cell.gathers else cell.m
    x = torch.randn(rows, cell.k, device="cuda", dtype=getattr(torch, DTYPE))
    gathered = None
    if cell.gathers:
        gathered = x.new_empty(cell.m, cell.k)
        dist.all_gather_into_tensor(gathered, x)
    return Operands(x, gathered, buffer, group_name, alone)


def exact(cell: Cell, given: Operands, w: Tensor) -> tuple[Tensor, Tensor]:
    """The matmul alone, and what this rank should get of the whole, computed in fp64."""
    product = (given.x if given.gathered is None else given.gathered).double() @ w.double()
    if cell.gathers:
        return product, product
    if cell.publishes:
        every = [torch.empty_like(product) for _ in range(cell.world)]
        dist.all_gather(every, product)
        return product, torch.cat(every, 1)
    total = product.clone()
    dist.all_reduce(total)
    if cell.op == "matmul_reduce_scatter":
        total = total.chunk(cell.world)[dist.get_rank()].clone()
    return product, total


def alone(cell: Cell, given: Operands) -> dict[str, Run]:
    """The matmul without the collective."""
    x = given.x if given.gathered is None else given.gathered
    out = x.new_empty(cell.m, cell.n)
    return {"cublas": lambda w: torch.mm(x, w, out=out)}


def ours_alone(cell: Cell, given: Operands) -> dict[str, Run]:
    """The same in our own kernels: those of all_gather_matmul on a group of one rank, where nothing moves."""
    from autofuse.lowering.gpu.dense import plain

    if cell.m < 512:  # reading the weight takes all of the time, and cuBLAS is as fast as any kernel there
        return {}
    x = given.x if given.gathered is None else given.gathered
    op, names = "all_gather_matmul", plain.alone(cell.m, cell.k, cell.n, x.dtype)
    return {name: lambda w, name=name: plain.run_on(name, op, x, w, given.alone) for name in names}  # type: ignore[misc]


def peers(cell: Cell, given: Operands) -> dict[str, Run]:
    """What torch ships, with the outputs in place."""
    if cell.gathers:
        return _gathering(cell, given)
    if cell.op == "matmul_reduce_scatter":
        return _scattering(cell, given)
    if cell.publishes:
        return _publishing(cell, given)
    return _reducing(cell, given)


def _reducing(cell: Cell, given: Operands) -> dict[str, Run]:
    x, group_name = given.x, given.group_name
    product = x.new_empty(cell.m, cell.n)
    buffer = given.buffer[: cell.exchanged]
    shared = buffer.view(cell.m, cell.n)

    def nccl(w: Tensor) -> Tensor:
        torch.mm(x, w, out=product)
        dist.all_reduce(product)
        return product

    def one_shot(w: Tensor) -> Tensor:
        torch.mm(x, w, out=shared)
        return symmetric_all_reduce(buffer, group_name, once=True).view(cell.m, cell.n)

    def two_shot(w: Tensor) -> Tensor:
        torch.mm(x, w, out=shared)
        symmetric_all_reduce(buffer, group_name, once=False)
        return shared

    found: dict[str, Run] = {"cublas+nccl": nccl, "cublas+one_shot": one_shot, "cublas+two_shot": two_shot}
    if buffer.nbytes > MOST_ONE_SHOT_BYTES:
        del found["cublas+one_shot"]
    return found


def _scattering(cell: Cell, given: Operands) -> dict[str, Run]:
    x = given.x
    product = x.new_empty(cell.m, cell.n)
    part = x.new_empty(cell.m // cell.world, cell.n)

    def nccl(w: Tensor) -> Tensor:
        torch.mm(x, w, out=product)
        dist.reduce_scatter_tensor(part, product)
        return part

    def async_tp(w: Tensor) -> Tensor:
        return async_tp_matmul_reduce_scatter(x, w, given.group_name)

    return {"cublas+nccl": nccl, "async_tp": async_tp}


def _gathering(cell: Cell, given: Operands) -> dict[str, Run]:
    x = given.x
    gathered = x.new_empty(cell.m, cell.k)
    out = x.new_empty(cell.m, cell.n)

    def nccl(w: Tensor) -> Tensor:
        dist.all_gather_into_tensor(gathered, x)
        return torch.mm(gathered, w, out=out)

    def async_tp(w: Tensor) -> Tensor:
        _, (result,) = async_tp_all_gather_matmul(x, [w], given.group_name)
        return result

    return {"cublas+nccl": nccl, "async_tp": async_tp}


def _publishing(cell: Cell, given: Operands) -> dict[str, Run]:
    x, m, n, world = given.x, cell.m, cell.n, cell.world
    product, stacked = x.new_empty(m, n), x.new_empty(world, m, n)
    out = x.new_empty(m, world * n)
    columns = out.view(m, world, n)
    group = dist.group.WORLD
    assert group is not None
    views = symmetric_views(given.buffer, group)
    shared = [view[: m * n].view(m, n) for view in views]
    rank = dist.get_rank()

    def nccl(w: Tensor) -> Tensor:
        """As functional collectives have it: ranks one behind the other, then moved beside each other."""
        torch.mm(x, w, out=product)
        dist.all_gather_into_tensor(stacked, product)
        columns.copy_(stacked.transpose(0, 1))
        return out

    flat, transposed = x.new_empty(n, m), x.new_empty(world * n, m)

    def nccl_transposed(w: Tensor) -> Tensor:
        """By hand: the logits of a token lie apart, but nothing has to be moved behind the collective."""
        torch.mm(w.t(), x.t(), out=flat)
        dist.all_gather_into_tensor(transposed, flat)
        return transposed.t()

    def pulled(w: Tensor) -> Tensor:
        """By hand with torch's symmetric memory: every rank reads the parts of the others."""
        torch.mm(x, w, out=shared[rank])
        symmetric_barrier(given.buffer, group)
        for i in range(world):
            source = (rank + i) % world
            columns[:, source].copy_(shared[source])
        symmetric_barrier(given.buffer, group)
        return out

    return {"cublas+nccl": nccl, "cublas+nccl transposed": nccl_transposed, "cublas+pulled": pulled}


def arguments(cell: Cell, given: Operands, w: Tensor, order: str = "direct") -> tuple[Any, ...]:
    """The arguments of the fused op."""
    x, group = given.x, (given.group_name, order, "bench")
    if cell.op == "matmul_all_reduce":
        return [x], [w], [], "mm", "sum", False, [], "", "", *group
    if cell.op == "matmul_reduce_scatter":
        return [x], [w], [], "mm", "sum", 0, 1, False, [], "", "", *group
    if cell.publishes:
        return [x], [w], [], "mm", 1, 1, False, False, *group
    return x, [w], [], 0, 1, False, *group


def fused(cell: Cell, given: Operands) -> Fused:
    """The fused op with a weight like those of the cell."""
    return Fused(cell.op, [arguments(cell, given, given.x.new_empty(cell.k, cell.n))])


def ours(cell: Cell, given: Operands) -> Run:
    """The fused op as policy `auto` runs it."""
    op = getattr(torch.ops.autofuse, cell.op)
    return lambda w: op(*arguments(cell, given, w))[0]


def our_ways(cell: Cell, given: Operands, unfused: bool) -> dict[str, Run]:
    """Every fused way that can run, by name; and the unfused way, as the op itself runs it."""
    return {name: in_way(cell, given, name) for name in fused(cell, given).names(unfused)}


def in_way(cell: Cell, given: Operands, name: str, order: str = "direct") -> Run:
    """The fused op in the way of that name."""
    return lambda w: Fused(cell.op, [arguments(cell, given, w, order)]).call(name)(0)


def chosen(cell: Cell, given: Operands) -> str:
    """The way that policy `auto` takes."""
    return fused(cell, given).chosen()


def keep(cell: Cell, given: Operands, timings: Mapping[tuple[str, str], Timing]) -> None:
    """Let policy `auto` decide by what was measured of the cell, from now on."""
    fused(cell, given).keep({name: us for (kind, name), us in captured(timings).items() if kind == "ways"})


def each(run: Run, weights: Sequence[Tensor]) -> Callable[[int], Tensor]:
    """Call number i; the weights take turns."""
    return lambda i: run(weights[i % len(weights)])


def checker(cell: Cell, given: Operands, w: Tensor) -> Callable[[tuple[str, str], Tensor], float]:
    """The error of what a variant (kind, name) returned for the weight `w`."""
    product, total = exact(cell, given, w)

    def check(key: tuple[str, str], result: Tensor) -> float:
        expected = product if key[0] == "compute" else total
        return relative_error(result, expected)

    return check
