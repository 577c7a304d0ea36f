"""Run a graph with collectives or fused ops for all ranks at once, in one process, by their definitions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

import autofuse.lowering.ops  # noqa: F401  (defines torch.ops.autofuse)
from autofuse.lowering.own_part import part_of_rank
from autofuse.lowering.reference.product import with_kept
from autofuse.lowering.reference.tail import tail_reference

c10d, fused = torch.ops._c10d_functional, torch.ops.autofuse
Calls = Sequence[tuple[Any, ...]]
"""The arguments of one call, by rank."""


def run(gm: fx.GraphModule, args: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """The outputs by rank of a graph that is called with `args[rank]`."""
    ranks = range(len(args))
    values: list[dict[fx.Node, Any]] = [{} for _ in ranks]
    inputs = iter(zip(*args, strict=True))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            results: Sequence[Any] = next(inputs)
        else:
            calls = [fx.map_arg(node.args, values[r].__getitem__) for r in ranks]
            if node.op == "output":
                return [call[0] for call in calls]
            assert node.op == "call_function", node
            if node.target in _COLLECTIVES:
                results = _COLLECTIVES[node.target](calls)
            else:
                results = [node.target(*call, **node.kwargs) for call in calls]
        for r in ranks:
            values[r][node] = results[r]
    raise AssertionError("no output")


def _reduce(tensors: Sequence[Tensor], op: str) -> Tensor:
    total = functools.reduce(operator.add, (t.float() for t in tensors))
    return (total / len(tensors) if op == "avg" else total).to(tensors[0].dtype)


def _all_reduce(calls: Calls) -> list[Tensor]:
    return [_reduce([x for x, *_ in calls], calls[0][1])] * len(calls)


def _reduce_scatter(calls: Calls) -> list[Tensor]:
    return list(_all_reduce(calls)[0].chunk(len(calls), 0))


def _all_gather(calls: Calls) -> list[Tensor]:
    return [torch.cat([x for x, *_ in calls])] * len(calls)


def _matmul_all_reduce(calls: Calls) -> list[list[Tensor]]:
    products, kept = zip(*(with_kept(*call[:4]) for call in calls), strict=True)
    _, _, _, _, op, keep, *_ = calls[0]
    whole = _reduce(products, op)
    results = [tail_reference(whole, call[6], call[7]) for call in calls]
    return [[*found, p] if keep else found for found, p in zip(results, kept, strict=True)]


def _matmul_reduce_scatter(calls: Calls) -> list[list[Tensor]]:
    products, kept = zip(*(with_kept(*call[:4]) for call in calls), strict=True)
    _, _, _, _, op, dim, outer, keep, *_ = calls[0]
    parts = _reduce(products, op).unflatten(dim, (outer, len(calls), -1)).unbind(dim + 1)
    parts = [part.flatten(dim, dim + 1) for part in parts]
    results = [tail_reference(part, call[8], call[9]) for part, call in zip(parts, calls, strict=True)]
    return [[*found, p] if keep else found for found, p in zip(results, kept, strict=True)]


def _all_gather_matmul(calls: Calls) -> list[list[Tensor]]:
    _, _, _, dim, outer, keep, *_ = calls[0]
    parts = [x.unflatten(dim, (outer, -1)) for x, *_ in calls]
    whole = torch.stack(parts, dim + 1).flatten(dim, dim + 2)
    results = []
    for _, w, bias, *_ in calls:
        assert not bias
        results.append([whole @ wi for wi in w] + ([whole] if keep else []))
    return results


def _own_parts(calls: Calls) -> list[Tensor]:
    x, dim, _, padded = (*calls[0], False)[:4]
    return [part_of_rank(x, dim, rank, len(calls), padded) for rank in range(len(calls))]


_COLLECTIVES: dict[object, Callable[[Calls], Sequence[Any]]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_gather_into_tensor.default: _all_gather,
    fused.own_part.default: _own_parts,
    c10d.wait_tensor.default: lambda calls: [x for (x,) in calls],
    fused.matmul_all_reduce.default: _matmul_all_reduce,
    fused.matmul_reduce_scatter.default: _matmul_reduce_scatter,
    fused.all_gather_matmul.default: _all_gather_matmul,
}
