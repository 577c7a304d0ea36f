"""The places of rows in an expert op: runs of rows, positions, and the exchange as a plain collective."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.reference.layout import Size, all_to_all
from autofuse.lowering.torch_internals import group_size

FEW_ROWS = 256
"""With shorter runs, all rows of an expert are multiplied together: a matmul of fewer rows spends a tenth or
more of its time on reading and packing the weight."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `[row, row + length)` of an expert that lie at `at` and on in the part of one rank."""

    expert: int
    row: int
    length: int
    at: int


def even_runs(count: int, outer: int, world: int, c: int) -> list[list[Run]]:
    """Per rank the runs of `[count, (outer, world, c)]`, whose parts are `[count, outer, c]`."""
    return [
        [Run(e, (o * world + part) * c, c, (e * outer + o) * c) for e in range(count) for o in range(outer)]
        for part in range(world)
    ]


def find_runs(
    positions: Tensor | None, ranges: Sequence[tuple[int, int]], splits: Sequence[int]
) -> list[list[Run]] | None:
    """Per rank the runs of dropless rows, row i at `positions[i]` (absent: i) of parts of `splits` rows that
    follow each other. None if a run has fewer than FEW_ROWS rows on average."""
    total = ranges[-1][1] if ranges else 0
    starts = [sum(splits[:rank]) for rank in range(len(splits))]
    runs: list[list[Run]] = [[] for _ in splits]
    if total == 0:
        return runs
    where = torch.arange(total) if positions is None else positions[:total]
    part = torch.bucketize(
        where, torch.tensor([a + n for a, n in zip(starts, splits, strict=True)]), right=True
    )
    new = torch.ones(total, dtype=torch.bool)
    new[1:] = (where.diff() != 1) | (part.diff() != 0)
    new[[start for start, stop in ranges if start < stop]] = True
    heads = new.nonzero().flatten()
    if heads.shape[0] * FEW_ROWS > total:
        return None
    rows = [*heads.tolist(), total]
    expert = 0
    for row, stop, at, rank in zip(
        rows[:-1], rows[1:], where[heads].tolist(), part[heads].tolist(), strict=True
    ):
        while row >= ranges[expert][1]:
            expert += 1
        runs[rank].append(Run(expert, row - ranges[expert][0], stop - row, at - starts[rank]))
    return runs


def check_positions(positions: Tensor | None, rows: Size, total: int, op: str) -> Tensor | None:
    """The positions in int64, contiguous. Raises ValueError unless each row has one below `total`."""
    if positions is None:
        if rows != total:
            raise ValueError(f"{op}: {rows} rows without positions cannot be {total} rows of a buffer")
        return None
    if positions.dim() != 1 or positions.shape[0] != rows:
        raise ValueError(f"{op}: expected a position for each of {rows} rows, got {tuple(positions.shape)}")
    if rows and not (int(positions.min()) >= 0 and int(positions.max()) < total):
        raise ValueError(f"{op}: positions must lie in [0, {total}), the rows of the exchanged buffer")
    return positions.to(torch.int64).contiguous()


_CUT = ("experts", "rows an expert", "columns")


def check_capacity(shape: Sequence[int], dim: int, outer: int, world: int, op: str) -> int:
    """c of `shape[dim] = outer * world * c`. Raises ValueError if there is none."""
    if shape[dim] % (outer * world):
        raise ValueError(
            f"{op}: {shape[dim]} {_CUT[dim]} cannot be cut into {world} equal parts (outer={outer}); "
            f"pad the {'capacity' if dim == 1 else 'dim'} to a multiple of {outer * world}"
        )
    return shape[dim] // (outer * world)


def parts(t: Tensor, dim: int, outer: Size, world: int) -> Tensor:
    """View `[W, ...]` of the parts of `t: [E, R, N]`, whose dim `dim` is `(outer, W, c)`."""
    return t.unflatten(dim, (outer, world, t.shape[dim] // (outer * world))).movedim(dim + 1, 0)


def part_shape(shape: Sequence[Any], dim: int, world: int) -> list[Any]:
    """The shape of one part of a tensor of `shape`, sizes being what they are there."""
    return [size // world if i == dim else size for i, size in enumerate(shape)]


def distinct(positions: Tensor, total: int) -> bool:
    """Whether no position below `total` occurs twice."""
    seen = torch.zeros(total, dtype=torch.bool)
    seen[positions] = True
    return int(seen.sum()) == positions.shape[0]


def combine_rows(
    p: Tensor,
    positions: Tensor | None,
    output_splits: Sequence[Size],
    input_splits: Sequence[Size],
    dim: int,
    outer: Size,
    group_name: str,
) -> Tensor:
    """The exchange of `P` with the functional collective."""
    if not input_splits:
        world = group_size(group_name)
        sent = parts(p, dim, outer, world).reshape(world, -1)
        received = all_to_all(sent, [1] * world, [1] * world, group_name)
        return received.view(world, *part_shape(p.shape, dim, world))
    sent = p if positions is None else p.new_zeros((sum(input_splits), p.shape[1])).index_add(0, positions, p)
    return all_to_all(sent, output_splits, input_splits, group_name)


def dispatch_rows(
    x: Tensor,
    positions: Tensor | None,
    output_splits: Sequence[Size],
    input_splits: Sequence[Size],
    dim: int,
    outer: Size,
    group_name: str,
) -> Tensor:
    """The exchange of `x` into `X`, the mirror of `combine_rows`."""
    if not input_splits:
        world, shape = x.shape[0], x.shape[1:]
        sent = x.reshape(world, -1)
        received = all_to_all(sent, [1] * world, [1] * world, group_name).view(world, *shape)
        inner = received.unflatten(dim + 1, (outer, shape[dim] // outer))
        return inner.movedim(0, dim + 1).flatten(dim, dim + 2)
    received = all_to_all(x, output_splits, input_splits, group_name)
    return received if positions is None else received[positions]
