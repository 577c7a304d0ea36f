"""Passes over post-grad graphs that replace collectives: by nothing (the ceiling), or by torch's all_reduce
in symmetric memory, whose operand a matmul writes where the peers read it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, fx

from autofuse.lowering import torch_internals
from autofuse.lowering.torch_internals import CustomGraphPass

_functional = torch.ops._c10d_functional
_aten = torch.ops.aten

_library = torch.library.Library("autofuse_bench", "DEF")
_library.define("all_reduce(Tensor x, str group, bool once) -> Tensor")
_library.define("mm_all_reduce(Tensor a, Tensor b, str group, bool once) -> Tensor")


class Replacing(CustomGraphPass):
    """replace: inserts, before a collective, what stands for its result; None: it stays."""

    def __init__(self, name: str, replace: Callable[[fx.Node], fx.Node | None]) -> None:
        self._name, self._replace = name, replace

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if getattr(node.target, "namespace", "") != "_c10d_functional":
                continue
            if node.target is _functional.wait_tensor.default:
                if getattr(node.args[0].target, "namespace", "") != "_c10d_functional":
                    node.replace_all_uses_with(node.args[0])
                    graph.erase_node(node)
                continue
            with graph.inserting_before(node):
                value = self._replace(node)
            if value is not None:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
        graph.eliminate_dead_code()
        graph.lint()

    def uuid(self) -> str:
        return f"autofuse.bench.models {self._name}"


def _call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    new = like.graph.call_function(target, args)
    new.meta = dict(like.meta)
    return new


def _nothing(node: fx.Node) -> fx.Node | None:
    """A result of the same shape, of this rank's data alone."""
    source: Any = node.args[0]
    value, before = node.meta["val"], source.meta["val"]
    if node.target is _functional.all_reduce.default:
        return source
    if node.target is _functional.all_gather_into_tensor.default:
        return _call(node, _aten.repeat.default, source, [node.args[1], *[1] * (value.dim() - 1)])
    if node.target is _functional.reduce_scatter_tensor.default:
        return _call(node, _aten.slice.Tensor, source, 0, 0, value.shape[0])
    if node.target is _functional.all_to_all_single.default:
        if tuple(map(str, value.shape)) == tuple(map(str, before.shape)):
            return source
        # A rank receives as many rows as it sends. The graph has two symbols for the two numbers.
        total: Any = reduce(partial(_added, node.graph), node.args[1])
        return _call(node, _aten.as_strided.default, source, [total, *value.shape[1:]], list(value.stride()))
    raise RuntimeError(f"the ceiling does not know {node.target}")


def _added(graph: fx.Graph, a: Any, b: Any) -> Any:
    """The sum of two sizes, each a number or a node."""
    if not isinstance(a, fx.Node) and not isinstance(b, fx.Node):
        return a + b
    new = graph.call_function(operator.add, (a, b))
    new.meta["val"] = operator.add(*(x.meta["val"] if isinstance(x, fx.Node) else x for x in (a, b)))
    return new


def _shared(once: bool) -> Callable[[fx.Node], fx.Node | None]:
    def replace(node: fx.Node) -> fx.Node | None:
        if node.target is not _functional.all_reduce.default or node.args[1] != "sum":
            return None
        group: Any = node.args[2]
        source: Any = node.args[0]
        product = source
        while product.target in (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default):
            product = product.args[0]
        if product.target is not _aten.mm.default:
            return _call(node, torch.ops.autofuse_bench.all_reduce.default, source, group, once)
        total = _call(product, torch.ops.autofuse_bench.mm_all_reduce.default, *product.args, group, once)
        if product is source:
            return total
        return _call(node, _aten.reshape.default, total, list(node.meta["val"].shape))

    return replace


def without() -> Replacing:
    """Every collective by local data of its shape."""
    return Replacing("ceiling", _nothing)


def in_symmetric_memory(once: bool) -> Replacing:
    """Every all_reduce by torch's in symmetric memory: one-shot if `once`, else two-shot."""
    return Replacing("one-shot" if once else "two-shot", _shared(once))


_memory: dict[tuple[str, torch.dtype], Tensor] = {}


def _memory_for(x: Tensor, size: int, group: str) -> Tensor:
    """Symmetric memory for `size` elements. The ranks ask for more together, in a first call."""
    known = _memory.get((group, x.dtype))
    if known is None or known.numel() < size:
        known = torch_internals.symmetric_empty(size, x.dtype, x.device)
        torch_internals.symmetric_views(known, torch_internals.resolve_group(group))
        _memory[group, x.dtype] = known
    return known[:size]


def _sum(shared: Tensor, group: str, once: bool) -> Tensor:
    """All ranks have read it when the next kernel of this rank begins."""
    if once:
        return torch_internals.symmetric_all_reduce(shared, group, once=True)
    out = torch.empty_like(shared)
    torch_internals.symmetric_all_reduce_into(out, shared, group)
    return out


def _all_reduce(x: Tensor, group: str, once: bool) -> Tensor:
    shared = _memory_for(x, x.numel(), group)
    shared.view(x.shape).copy_(x)
    return _sum(shared, group, once).view(x.shape)


def _mm_all_reduce(a: Tensor, b: Tensor, group: str, once: bool) -> Tensor:
    shape = a.shape[0], b.shape[1]
    shared = _memory_for(a, shape[0] * shape[1], group)
    torch.mm(a, b, out=shared.view(shape))
    return _sum(shared, group, once).view(shape)


_library.impl("all_reduce", _all_reduce, "CompositeExplicitAutograd")
_library.impl("mm_all_reduce", _mm_all_reduce, "CompositeExplicitAutograd")
_library.impl("all_reduce", lambda x, group, once: torch.empty(x.shape, dtype=x.dtype, device="meta"), "Meta")
_library.impl("mm_all_reduce", lambda a, b, group, once: a.new_empty(a.shape[0], b.shape[1]), "Meta")
