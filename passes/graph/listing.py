"""Graphs as text, `mm: f32[16, 16] = aten.mm(view, permute)`, and the site that changed each line."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import fx

from autofuse.lowering.torch_internals import dtype_name
from autofuse.passes.report import Line, Listing

from .anchors import is_fused_op, source_of


def listing(graph: fx.Graph, layout_of: Callable[[fx.Node], str] = lambda node: "") -> Listing:
    """One line for each node, in the order of the graph. Slow for large graphs."""
    return Listing(tuple(Line(n.name, _text(n), source_of(n), None, layout_of(n)) for n in graph.nodes))


def owners_of(graph: fx.Graph, changed: Mapping[str, int]) -> dict[str, int]:
    """The sites of fused ops, by the names of their inputs: a merged op has the inputs of its parts."""
    ops = [n for n in graph.nodes if is_fused_op(n) and n.name in changed]
    return {i.name: changed[op.name] for op in reversed(ops) for i in op.all_input_nodes}


def tie_merged(graph: fx.Graph, owners: Mapping[str, int], changed: dict[str, int]) -> None:
    """Add to `changed` the fused ops that are new since `owners_of`, and the nodes computed from them.

    An op that was merged from ops of several sites belongs to the first of these sites.
    """
    for node in graph.nodes:
        if node.op != "output" and node.name not in changed:
            sites = owners if is_fused_op(node) else changed
            known = [sites[i.name] for i in node.all_input_nodes if i.name in sites]
            if known:
                changed[node.name] = min(known)


def tie(
    before: Listing, after: Listing, changed: Mapping[str, int], collectives: Mapping[str, int]
) -> tuple[Listing, Listing]:
    """Both listings with the sites of their lines. `changed` and `collectives` map names of nodes to sites.

    The line of a collective or of its wait belongs to the site of the collective. Another line belongs to the
    site that changed it if the line differs between the listings, else to no site.
    """
    texts = [{line.name: line.text for line in lines} for lines in (before, after)]

    def site(line: Line) -> int | None:
        differs = texts[0].get(line.name) != texts[1].get(line.name)
        return collectives.get(line.name, changed.get(line.name) if differs else None)

    def tied(lines: Listing) -> Listing:
        return Listing(tuple(replace(line, site=site(line)) for line in lines))

    return tied(before), tied(after)


def _text(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_value(node.args[0])}"
    return f"{node.name}{_type(node.meta.get('val'))} = {_call(node)}"


def _call(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "placeholder"
    if node.op != "call_function":
        return f"{node.op} {node.target}"
    if node.target is operator.getitem:
        return f"{_value(node.args[0])}[{_value(node.args[1])}]"
    arguments = [*map(_value, node.args), *(f"{k}={_value(v)}" for k, v in node.kwargs.items())]
    target = node.target
    name = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", target)
    return f"{str(name).removesuffix('.default')}({', '.join(arguments)})"


def _value(value: object) -> str:
    match value:
        case fx.Node():
            return value.name
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case tuple():
            return f"({', '.join(map(_value, value))}{',' * (len(value) == 1)})"
        case torch.dtype():
            return dtype_name(value)
    return repr(value)


def _type(val: object) -> str:
    match val:
        case torch.Tensor():
            return f": {dtype_name(val.dtype)}[{', '.join(map(str, val.shape))}]"
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return f": {val}"
    return ""
