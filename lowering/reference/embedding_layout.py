"""The places of pooled rows in the five layouts of embedding_bag_all_to_all, and the plain exchange of them.

With `b` bags a rank, `C[s]` columns of source rank s and, in the last three, T tables of D columns on each:

    bsc   [b, sum(C)]      bag, source, column
    sbc   [b * sum(C)]     source, bag, column
    bstd  [b, W, T, D]     stbd  [W, T, b, D]     sbtd  [W, b, T, D]
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from autofuse.lowering.reference.layout import Size, all_to_all

LAYOUTS = ("bsc", "sbc", "bstd", "stbd", "sbtd")


def shape(layout: str, b: Size, columns: Sequence[Size], dims: Sequence[Size]) -> list[Size]:
    """The shape of a tensor of `layout`."""
    world, tables = len(columns), len(dims)
    match layout:
        case "bsc":
            return [b, sum(columns)]
        case "sbc":
            return [b * sum(columns)]
        case "bstd":
            return [b, world, tables, dims[0]]
        case "stbd":
            return [world, tables, b, dims[0]]
        case "sbtd":
            return [world, b, tables, dims[0]]
    raise ValueError(f"unknown layout {layout!r}; expected one of {', '.join(LAYOUTS)}")


def check(op: str, layout: str, bags: int, columns: Sequence[int], dims: Sequence[int], rank: int) -> None:
    """Raises ValueError unless `bags` bags of tables with `dims` columns can be exchanged in `layout`."""
    world = len(columns)
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: unknown layout {layout!r}; expected one of {', '.join(LAYOUTS)}")
    if bags % world:
        raise ValueError(f"{op}: a batch of {bags} bags cannot be cut into {world} equal parts; pad it")
    if columns[rank] != sum(dims):
        raise ValueError(
            f"{op}: columns[{rank}] is {columns[rank]}, but this rank has tables of {sum(dims)} columns; "
            "pass the sum of the table dims of every rank"
        )
    if "t" in layout and (len(set(dims)) != 1 or len(set(columns)) != 1):
        raise ValueError(
            f"{op}: layout {layout!r} needs tables of one dim and as many on every rank; "
            f"got dims {list(dims)} and columns {list(columns)}; use 'bsc' or 'sbc'"
        )


def place(
    layout: str, source: int, b: int, columns: Sequence[int], dims: Sequence[int]
) -> tuple[list[int], int]:
    """Element at which each table of `source` starts, and the elements between two of its bags."""
    before = sum(columns[:source])
    prefixes = list(accumulate(dims[:-1], initial=0))[: len(dims)]
    if layout in ("bsc", "bstd"):
        return [before + p for p in prefixes], sum(columns)
    if layout in ("sbc", "sbtd"):
        return [before * b + p for p in prefixes], columns[source]
    return [(before + p) * b for p in prefixes], dims[0]


def part(t: Tensor, layout: str, source: int, b: Size, columns: Sequence[Size]) -> Tensor:
    """View of the part of `source` in a tensor of `layout`: `[b, C[source]]`, or `[b, T, D]`."""
    before = sum(columns[:source])
    match layout:
        case "bsc":
            return t.narrow(1, before, columns[source])
        case "sbc":
            return t.narrow(0, before * b, columns[source] * b).view(b, columns[source])
        case "bstd":
            return t[:, source]
        case "stbd":
            return t[source].transpose(0, 1)
    return t[source]


def exchange_forward(
    pooled: Tensor, layout: str, columns: Sequence[Size], dims: Sequence[Size], group_name: str
) -> Tensor:
    """All-to-all of `pooled: [B, C[r]]` into `layout`, with the functional collective."""
    world, b = len(columns), pooled.shape[0] // len(columns)
    mine = pooled.shape[1]
    flat = all_to_all(pooled.reshape(-1), [b * c for c in columns], [b * mine] * world, group_name)
    if layout == "sbc":
        return flat
    pieces = flat.split([b * c for c in columns])
    if layout == "bsc":
        return torch.cat([p.view(b, c) for p, c in zip(pieces, columns, strict=True)], 1)
    tables = flat.view(world, b, len(dims), dims[0])
    order = {"bstd": (1, 0, 2, 3), "stbd": (0, 2, 1, 3), "sbtd": (0, 1, 2, 3)}[layout]
    return tables.permute(order).contiguous()


def exchange_backward(
    grad: Tensor, layout: str, columns: Sequence[Size], mine: Size, bags: Size, group_name: str
) -> Tensor:
    """The inverse: a tensor of `layout` to `[B, C[r]]`, where `mine` is C[r]."""
    world = len(columns)
    b = bags // world
    sent = [part(grad, layout, s, b, columns).reshape(-1) for s in range(world)]
    flat = all_to_all(torch.cat(sent), [b * mine] * world, [b * c for c in columns], group_name)
    return flat.view(bags, mine)
