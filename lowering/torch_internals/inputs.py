"""The inputs of a compiled graph: where they come from, and how DTensors among them are placed."""

import re
from typing import Any

import torch
from torch import fx

from .groups import group_ranks_of

_LOCAL = re.compile(r"L\['(\w+)'\]")


def input_source(node: fx.Node) -> tuple[str, str]:
    """Of an input of a graph of dynamo: the argument of the compiled function that holds it, and the whole
    expression, `("batch", "L['batch']['tokens']")`."""
    known = getattr(node.meta.get("grapharg"), "source", None) or getattr(node, "_dynamo_source", None)
    name = getattr(known, "name", node.name)
    path = str(name() if callable(name) else name)  # torch before 2.13 has a method
    found = _LOCAL.match(path)
    return (found.group(1) if found else path), path


def position_of_input(node: fx.Node) -> int | None:
    """Of an input of a joint graph: the position of the input of the graph of dynamo that it is, or whose
    local tensor it is; None for all others."""
    found = node.meta.get("desc")
    if getattr(found, "attr", None) == "_local_tensor":
        found = getattr(found, "base", None)
    return getattr(found, "idx", None) if type(found).__name__ == "PlainAOTInput" else None


def tangent_of(node: fx.Node) -> int | None:
    """Of an input of a joint graph: the position of the output whose gradient it is; None for all others."""
    found = node.meta.get("desc")
    if type(found).__name__ != "TangentAOTInput":
        return None
    output = getattr(found, "output", None)
    return int(getattr(output, "idx", 0))


def placements(value: torch.Tensor) -> list[tuple[frozenset[int], str, int | None]] | None:
    """Of a DTensor, for each dim of its mesh: the ranks of the group of this rank, `replicate`, `shard` or
    `partial`, and the dim that is sharded; None for other tensors."""
    spec: Any = getattr(value, "_spec", None)
    if spec is None or not hasattr(value, "to_local"):
        return None
    found = []
    for i, placement in enumerate(spec.placements):
        kind = "replicate" if placement.is_replicate() else "partial" if placement.is_partial() else "shard"
        found.append((group_ranks_of(spec.mesh.get_group(i)), kind, getattr(placement, "dim", None)))
    return found
