"""The ways to exchange gradients of bags and add up those of an embedding cell's tables: torch's, and ours.

Gradients are dense: as large as the tables, and 0 in most rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autofuse.bench.gpu.driver import relative_error
from autofuse.bench.gpu.embedding.bags import Bags, drawn, offsets
from autofuse.bench.gpu.embedding.cells import BACKWARD, Cell
from autofuse.bench.gpu.exchange.work import SAMPLED, Sample, Variant, Work, exchange, sampled
from autofuse.bench.gpu.named_ways import Fused
from autofuse.bench.gpu.ratios import DTYPE


@dataclass(frozen=True)
class Forward:
    """What torch's forward leaves to its backward, of `N` bags: `offsets`: [N]; `bag_of`: [N * L], the bag of
    every index; `sizes`: [N], indices of every bag."""

    offsets: Tensor
    bag_of: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, cell: Cell, device: torch.device, tables: int = 1) -> Forward:
        """For so many tables, one after another."""
        starts = offsets(cell, device, tables)
        bag_of = torch.arange(len(starts), device=device).repeat_interleave(cell.pooling)
        return cls(starts, bag_of, torch.full_like(starts, cell.pooling))

    def gradient(self, grad: Tensor, indices: Tensor, rows: int) -> Tensor:
        """[rows, D] of [N, D], as compiled graphs make it."""
        highest = indices.new_empty(0)  # of max pooling
        return torch.ops.aten._embedding_bag_backward(
            grad, indices, self.offsets, self.bag_of, self.sizes, highest, rows, False, 0, False, None
        )


@dataclass(frozen=True)
class Operands:
    """`grad`: [B / W, W * sum(D_t)]; `one`: of every table; `big[g]`: of the big table in which those of the
    g-th dim lie; `group_name`: the ranks."""

    cell: Cell
    grad: Tensor
    one: Forward
    big: list[Forward]
    bags: list[Bags]
    group_name: str


@dataclass(frozen=True)
class Gradients:
    """Gradients of all tables, exact in some rows. `rows[t]`: [S]; `exact[t]`: [S, D_t], fp64; `unused[t]`:
    [V_t], whether no index names a row."""

    rows: list[Tensor]
    exact: list[Tensor]
    unused: list[Tensor]

    def error(self, found: Sequence[Tensor]) -> float:
        """|found - exact| / |exact| (Frobenius) on these rows. RuntimeError for other shapes, and if anything
        is in a row that no index names."""
        expected = [
            (len(unused), exact.shape[1]) for unused, exact in zip(self.unused, self.exact, strict=True)
        ]
        if [tuple(g.shape) for g in found] != expected:
            raise RuntimeError(
                f"expected gradients of shapes {expected}, got {[tuple(g.shape) for g in found]}"
            )
        stray = [(g.any(1) & unused).any() for g, unused in zip(found, self.unused, strict=True)]
        if True in (strays := torch.stack(stray).tolist()):
            raise RuntimeError(f"the gradient of table {strays.index(True)} is not 0 where no index is")
        values = [g[rows].flatten() for g, rows in zip(found, self.rows, strict=True)]
        return relative_error(torch.cat(values), torch.cat([exact.flatten() for exact in self.exact]))


class Path:
    """Buffers on the way from `grad` to what gradients of tables are made from, and the steps of that way."""

    def __init__(self, given: Operands) -> None:
        cell, grad = given.cell, given.grad
        self.cell = cell
        self.grad = grad.view(-1, cell.world, cell.columns)
        self.sent = grad.new_empty(cell.world, cell.batch // cell.world, cell.columns)
        self.received = grad.new_empty(cell.batch, cell.columns)
        self.by_table = [grad.new_empty(len(rows) * cell.batch, dim) for dim, rows in cell.by_dim]

    def pack(self) -> Tensor:
        """To [W, B / W, sum(D_t)], by destination."""
        return self.sent.copy_(self.grad.transpose(0, 1))

    def exchange(self) -> Tensor:
        """To [B, sum(D_t)]."""
        return exchange(self.received, self.sent.view(self.received.shape), None, None)

    def unpack(self) -> list[Tensor]:
        """To [T_g * B, D_g] of every dim, by table and bag."""
        for place, columns in zip(self._places(), self._columns(self.received), strict=True):
            place.copy_(columns)
        return self.by_table

    def unpacked(self) -> Tensor:
        """[B, sum(D_t)] again, of what `unpack` made."""
        whole = torch.empty_like(self.received)
        for place, columns in zip(self._places(), self._columns(whole), strict=True):
            columns.copy_(place)
        return whole

    def parts(self, sent: Sample, received: Sample) -> dict[str, Variant]:
        """The steps, each by itself; sent, received: what `pack` and `exchange` make."""
        return {
            "all-to-all": Variant(lambda i: self.exchange(), received.error),
            "pack": Variant(lambda i: self.pack(), sent.error),
            "unpack": Variant(lambda i: self.unpack(), lambda r: received.error(self.unpacked())),
        }

    def _places(self) -> list[Tensor]:
        return [rows.view(-1, self.cell.batch, rows.shape[1]) for rows in self.by_table]

    def _columns(self, whole: Tensor) -> list[Tensor]:
        """[T_g, B, D_g] of every dim."""
        widths = [dim * len(rows) for dim, rows in self.cell.by_dim]
        pieces = zip(whole.split(widths, 1), self.cell.by_dim, strict=True)
        return [piece.unflatten(1, (-1, dim)).transpose(0, 1) for piece, (dim, _) in pieces]


def operands(cell: Cell, device: torch.device, group_name: str) -> Operands:
    """Random gradients and bags, other ones on every rank."""
    shape = (cell.batch // cell.world, cell.world * cell.columns)
    grad = torch.randn(shape, device=device, dtype=getattr(torch, DTYPE))
    big = [Forward.of(cell, device, len(rows)) for _, rows in cell.by_dim]
    return Operands(cell, grad, Forward.of(cell, device), big, drawn(cell, device), group_name)


def work(cell: Cell, device: torch.device, group_name: str) -> Work:
    """All that there is to measure of a cell."""
    given = operands(cell, device, group_name)
    sent, received, gradients = exact(given)
    fused = Fused(BACKWARD, [arguments(given, bags) for bags in given.bags], whole=True)

    def variant(run: Callable[[Bags], list[Tensor]]) -> Variant:
        return Variant(lambda i: run(given.bags[i % len(given.bags)]), gradients.error)

    path = Path(given)  # of the steps alone: the peers have another, for what lies here stays
    path.pack()
    path.exchange()
    by_table = path.unpack()
    variants = {
        "compute": {
            "per table": variant(lambda bags: _per_table(given, bags, path.received)),
            "merged": variant(lambda bags: _merged(given, bags, by_table)),
        },
        "parts": path.parts(sent, received),
        "peers": {name: variant(run) for name, run in peers(given).items()},
        "ours": {"auto": Variant(fused.auto, gradients.error)},
    }
    return Work(variants, fused)


def peers(given: Operands) -> dict[str, Callable[[Bags], list[Tensor]]]:
    """What torch ships, with buffers in place, and indices of a merged table shifted beforehand."""
    path = Path(given)

    def per_table(bags: Bags) -> list[Tensor]:
        path.pack()
        return _per_table(given, bags, path.exchange())

    def merged(bags: Bags) -> list[Tensor]:
        path.pack()
        path.exchange()
        return _merged(given, bags, path.unpack())

    return {"per table+nccl": per_table, "merged+nccl": merged}


def exact(given: Operands) -> tuple[Sample, Sample, Gradients]:
    """What this rank sends and gets, [B, sum(D_t)] each, and what the first set makes of it."""
    cell = given.cell
    shape = (cell.batch, cell.columns)
    sent = given.grad.view(-1, cell.world, cell.columns).transpose(0, 1).reshape(shape)
    received = exchange(torch.empty_like(sent), sent, None, None)
    some = sampled(cell.batch, cell.world, sent.device).flatten()
    # Rows that another set uses: memory that is not set to 0 has what earlier calls made of that.
    places = torch.linspace(0, cell.batch * cell.pooling - 1, SAMPLED, device=sent.device).long()
    rows = [
        torch.cat([i[places] for i in two]) for two in zip(*(b.indices for b in given.bags[:2]), strict=True)
    ]
    first = [indices.view(shape[0], -1) for indices in given.bags[0].indices]
    values, unused = [], []
    pieces = received.split([dim for _, dim in cell.sizes], 1)
    for piece, wanted, indices, (count, _) in zip(pieces, rows, first, cell.sizes, strict=True):
        times = (indices == wanted[:, None, None]).sum(2)
        values.append(times.double() @ piece.double())
        unused.append(
            torch.ones(count, dtype=torch.bool, device=sent.device).index_fill_(0, indices.flatten(), 0)
        )
    return (
        Sample(shape, some, sent[some].double()),
        Sample(shape, some, received[some].double()),
        Gradients(rows, values, unused),
    )


def _per_table(given: Operands, bags: Bags, received: Tensor) -> list[Tensor]:
    """[V_t, D_t] of every table, from its columns of [B, sum(D_t)]."""
    sizes = given.cell.sizes
    pieces = received.split([dim for _, dim in sizes], 1)
    return [
        given.one.gradient(piece, indices, rows)
        for piece, indices, (rows, _) in zip(pieces, bags.indices, sizes, strict=True)
    ]


def _merged(given: Operands, bags: Bags, by_table: list[Tensor]) -> list[Tensor]:
    """The same, as parts of one gradient for every dim, from [T_g * B, D_g]."""
    found: list[Tensor] = []
    groups = zip(given.big, by_table, bags.merged, given.cell.by_dim, strict=True)
    for forward, grad, indices, (_, rows) in groups:
        found += forward.gradient(grad, indices, sum(rows)).split(rows)
    return found


def arguments(given: Operands, bags: Bags) -> tuple[Any, ...]:
    """Those of the fused op."""
    cell, tables = given.cell, given.cell.tables
    rows, dims = map(list, zip(*cell.sizes, strict=True))
    options = (0, False, -1, given.grad.dtype, [False] * tables, [cell.columns] * cell.world, "bsc", False)
    starts = [given.one.offsets] * tables
    return given.grad, bags.indices, starts, [], rows, dims, *options, given.group_name, "direct", "bench"
