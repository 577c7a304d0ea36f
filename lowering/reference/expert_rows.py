"""The places of rows in an expert op: runs of rows, positions, and the exchange as a plain collective."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autofuse.lowering.reference.layout import Size, all_to_all
from autofuse.lowering.torch_internals import group_size

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
