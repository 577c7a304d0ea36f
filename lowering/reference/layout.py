"""`(dim, outer)` layouts of dense parts, and the plain collectives that references are made of.

The cut dim of a matrix, of length outer * world * inner, is read as `(outer, world, inner)`; the part of
rank r is digit r of the middle: rows (`dim` 0) or columns (`dim` 1) `(o, r, i)` in the order `(o, i)`.
"""

from collections.abc import Sequence

import torch
from torch import SymInt, Tensor

Size = int | SymInt
"""A size that may be a symbol, while a graph is traced."""

_collectives = torch.ops._c10d_functional


def parts(matrix: Tensor, dim: int, outer: Size, world: int) -> Tensor:
    """`[M, N]` -> `[world, M / world, N]` (`dim` 0) or `[world, M, N / world]` (`dim` 1)."""
    m, n = matrix.shape
    if dim == 0:
        inner = m // (outer * world)
        return matrix.reshape(outer, world, inner, n).transpose(0, 1).reshape(world, outer * inner, n)
    inner = n // (outer * world)
    return matrix.reshape(m, outer, world, inner).permute(2, 0, 1, 3).reshape(world, m, outer * inner)


def whole(parts: Tensor, dim: int, outer: Size) -> Tensor:
    """The inverse of `parts`."""
    world, m, n = parts.shape
    if dim == 0:
        return parts.reshape(world, outer, m // outer, n).transpose(0, 1).reshape(world * m, n)
    return parts.reshape(world, m, outer, n // outer).permute(1, 2, 0, 3).reshape(m, world * n)


def check_divisible(length: int, outer: int, world: int, op: str, what: str) -> None:
    """Raises ValueError unless `length` is a multiple of `outer * world`."""
    if length % (outer * world):
        raise ValueError(
            f"{op}: {length} {what} cannot be cut into {world} equal parts (outer={outer}); "
            f"pad them to a multiple of {outer * world}"
        )


def all_reduce(x: Tensor, reduce_op: str, world: int, group_name: str) -> Tensor:
    """Sum or mean of `x` over the ranks; the mean is the sum divided, as not every backend has `avg`."""
    total = _collectives.wait_tensor(_collectives.all_reduce(x.contiguous(), "sum", group_name))
    return total / world if reduce_op == "avg" else total


def reduce_scatter(x: Tensor, reduce_op: str, dim: int, outer: Size, world: int, group_name: str) -> Tensor:
    """This rank's part of the sum or mean of `x: [M, N]` over the ranks."""
    mine = parts(x, dim, outer, world)
    total = _collectives.reduce_scatter_tensor(mine.flatten(0, 1).contiguous(), "sum", world, group_name)
    total = _collectives.wait_tensor(total)
    return total / world if reduce_op == "avg" else total


def all_gather(x: Tensor, dim: int, outer: Size, world: int, group_name: str) -> Tensor:
    """The matrix whose part of this rank is `x`."""
    gathered = _collectives.wait_tensor(
        _collectives.all_gather_into_tensor(x.contiguous(), world, group_name)
    )
    return whole(gathered.unflatten(0, (world, x.shape[0])), dim, outer)


def all_to_all(
    x: Tensor, output_splits: Sequence[Size], input_splits: Sequence[Size], group_name: str
) -> Tensor:
    """Parts of `x` along dim 0 go to the ranks; returns what comes, by source."""
    return _collectives.wait_tensor(
        _collectives.all_to_all_single(x.contiguous(), list(output_splits), list(input_splits), group_name)
    )
