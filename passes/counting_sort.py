"""Replaces a sort of rows by their experts by a counting sort, where the graph has the counts already.

    counts      [ranks * experts]: rows that came from each rank for each expert
    v           0, 1, ..., experts - 1, once for each rank
    index       argsort(repeat_interleave(v, counts), stable=True)

The rows that came from one rank for one expert are a segment. A stable sort moves segments as a whole, so
`index` is that of `graph/segments.py`, with the segments in the order of experts. On a GPU a sort of 64-bit
numbers is some 20 launches. The exchange cannot start before them, because it takes the index.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from .graph.anchors import find_anchors
from .graph.emit import Emitter, erase_unused
from .graph.follow import Shapes, argument, aten, dtype_of, tensor
from .graph.segments import choice_of, counts_up, prove

_SORT = aten.sort.stable
_REPEATED = aten.repeat_interleave.Tensor


def count_to_sort(graph: fx.Graph) -> None:
    """Replace all such sorts of a graph with an all_to_all, in place."""
    sorts = graph.find_nodes(op="call_function", target=_SORT)
    if not sorts or all(anchor.kind != "all_to_all" for anchor in find_anchors(graph)):
        return
    for sort in sorts:
        indices = [user for user in sort.users if user.target is operator.getitem and user.args[1] == 1]
        if indices and (repeated := _segments(sort)) is not None:
            new = _index(sort, *repeated)
            for index in indices:
                index.replace_all_uses_with(new)
            erase_unused(indices)


def _segments(sort: fx.Node) -> tuple[fx.Node, int] | None:
    """The numbers of the segments of the rows that are sorted by expert, and how many experts there are."""
    keys = sort.args[0]
    ascending = not argument(sort, 3, "descending", False)
    chosen = choice_of(keys) if isinstance(keys, fx.Node) and ascending else None
    if chosen is None:
        return None
    experts, numbers = chosen
    counts = numbers.args[0] if numbers.target is _REPEATED else None
    if not isinstance(counts, fx.Node) or "output_size" not in numbers.kwargs:
        return None
    count = _repeats(experts)
    vector = tensor(counts)
    if count is None or vector is None or vector.dim() != 1 or dtype_of(counts) != torch.int64:
        return None
    if not isinstance(Shapes().known(counts)[0], int):
        return None
    return (numbers, count) if tensor(experts).shape == vector.shape else None  # type: ignore[union-attr]


def _repeats(experts: fx.Node) -> int | None:
    """How many numbers a vector counts up to, again and again from 0."""
    if experts.target is not aten.repeat.default:
        return None
    source, times = experts.args[:2]
    if not isinstance(source, fx.Node) or not isinstance(times, (list, tuple)) or len(times) != 1:
        return None
    count = source.args[0] if counts_up(source) else None
    return count if isinstance(count, int) and count > 0 else None


def _index(sort: fx.Node, numbers: fx.Node, experts: int) -> fx.Node:
    """The index by counts. In the order of `counts`, segment j

        ends before row  old[j] = sum of counts[k] where k <= j                    of the rows that are sorted
        ends before row  new[j] = sum of counts[k] where place(k) <= place(j)      of the result
        index[i] = i + old[j] - new[j] for the one j where new[j] - counts[j] <= i < new[j]

    There are few segments, and Inductor makes two kernels of these sums. Running sums and repeat_interleave
    are six launches, each of which delays the exchange on a GPU. Matrices have an entry [j, i] for segment j
    and row i, so that no view of the rows is needed: their number is not known at compile time, and Inductor
    launches a kernel more for every such view.
    """
    emitter = Emitter(sort, Shapes())
    call = emitter.call
    counts, size = numbers.args[0], numbers.kwargs["output_size"]
    assert isinstance(counts, fx.Node)
    assert isinstance(size, (int, fx.Node))
    segments = tensor(counts).shape[0]  # type: ignore[union-attr]

    def column(of_segments: fx.Node) -> fx.Node:
        return call(aten.unsqueeze.default, of_segments, 1)

    def ends(places: fx.Node) -> fx.Node:
        before = call(aten.ge.Tensor, column(places), places)
        return call(aten.sum.dim_IntList, call(aten.mul.Tensor, counts, before), [1])

    order, rows = emitter.numbers(segments, counts), emitter.numbers(size, counts)
    table = call(aten.reshape.default, order, [experts, segments // experts])  # places by expert, then rank
    places = call(aten.reshape.default, call(aten.permute.default, table, [1, 0]), [segments])
    old, new = ends(order), ends(places)
    begun = call(aten.ge.Tensor, rows, column(call(aten.sub.Tensor, new, counts)))
    inside = call(aten.mul.Tensor, begun, call(aten.lt.Tensor, rows, column(new)))
    sources = call(aten.add.Tensor, rows, column(call(aten.sub.Tensor, old, new)))
    index = call(aten.sum.dim_IntList, call(aten.mul.Tensor, sources, inside), [0])
    prove(index)
    return index
