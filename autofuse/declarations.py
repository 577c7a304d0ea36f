"""`autofuse.replicated`: what is the same on all ranks of a group, as the user declares it.

The schedule of a graph may rest on such a declaration, and the ranks then compare the bits of what was
declared before the graph runs for the first time.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from autofuse.groups import Group, group_name
from autofuse.lowering.torch_internals import (
    group_ranks_of,
    input_source,
    placements,
    position_of_input,
    tangent_of,
)
from autofuse.passes.schedules.layouts import LOCAL, REPLICATED, Input, Layout


@dataclass(frozen=True)
class Declaration:
    """What `replicated` was told about one model. `positions`: the names of what its forward takes."""

    positions: tuple[str, ...]
    ranks: frozenset[int]
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    gradients: bool
    check_every: int


_declared: WeakKeyDictionary[nn.Module, list[Declaration]] = WeakKeyDictionary()


def replicated(
    model: nn.Module,
    *,
    parameters: Iterable[str] = ("*",),
    inputs: Iterable[str] = (),
    gradients: bool = False,
    group: Group = None,
    check_every: int = 0,
) -> None:
    """Declares that all ranks of `group` have the same values. Call it on all ranks, before compiling.

    Args:
        model: the model whose values they are.
        parameters: names of its parameters and buffers, as `model.named_parameters()` has them; `*` and `?`
            match as in file names. DTensors need no declaration: their placements are known.
        inputs: names of arguments of the model, or of the compiled function. Tensors in a list or dict that
            is an argument go by the name of the argument.
        gradients: that the gradients of all outputs are the same, too, as they are if every rank computes
            the same loss from the same outputs.
        group: a ProcessGroup, a one-dimensional DeviceMesh, the name of a group, or None for all ranks.
        check_every: compare the values again in every such call; 0: in the first call alone. Gradients are
            not compared.

    Raises:
        TypeError: if `model` is no module.
        ValueError: for names that match nothing, and for a negative `check_every`.

    A compiled call raises RuntimeError on all ranks if values differ that its schedule rests on. Declaring a
    model again adds to what was declared.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replicated: expected a torch.nn.Module, got {type(model).__name__}")
    if check_every < 0:
        raise ValueError(f"replicated: check_every={check_every}: expected 0 or the number of calls")
    model = getattr(model, "_orig_mod", model)  # what torch.compile(model) returns
    names = [name for name, _ in _values_of(model)]
    patterns = _names(parameters, "parameters")
    for pattern in patterns:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"replicated: no parameter or buffer of the model matches {pattern!r}")
    ranks = group_ranks_of(group_name(group, "replicated"))
    positions = tuple(inspect.signature(model.forward).parameters)
    known = Declaration(positions, ranks, patterns, _names(inputs, "inputs"), gradients, check_every)
    _declared.setdefault(model, []).append(known)


def _names(given: Iterable[str], what: str) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"replicated: {what}={given!r}: expected names")
    return names


def _values_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


@dataclass(frozen=True)
class Given:
    """What is known of the inputs of a graph of dynamo, in their order."""

    inputs: tuple[Input, ...]
    gradients: frozenset[frozenset[int]]
    check_every: int

    def of_graph(self, graph: fx.Graph) -> dict[fx.Node, Input]:
        """By the inputs of a joint, forward or backward graph that is made of it."""
        found: dict[fx.Node, Input] = {}
        for node in graph.find_nodes(op="placeholder"):
            position = position_of_input(node)
            if position is not None and position < len(self.inputs):
                found[node] = self.inputs[position]
            elif (output := tangent_of(node)) is not None:
                over = tuple((ranks, REPLICATED) for ranks in self.gradients)
                name = f"the gradient of output {output}"
                unlock = "declare autofuse.replicated(model, gradients=True)"
                found[node] = Input(name, over, unlock)
        return found


def given(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Given:
    """What is declared of the inputs of a graph, and what the placements of DTensors say."""
    names: dict[int, list[tuple[str, Declaration]]] = {}
    of_models: list[Declaration] = []
    held = {id(value) for value in example_inputs if isinstance(value, Tensor)}
    for model, declarations in list(_declared.items()):
        values = _values_of(model)
        if not any(id(value) in held for _, value in values):
            continue
        for each in declarations:
            of_models.append(each)
            for name, value in values:
                if any(fnmatchcase(name, pattern) for pattern in each.parameters):
                    names.setdefault(id(value), []).append((name, each))
    inputs = []
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        inputs.append(_input(input_source(node), value, names.get(id(value), []), of_models))
    gradients = frozenset(each.ranks for each in of_models if each.gradients)
    return Given(tuple(inputs), gradients, max((each.check_every for each in of_models), default=0))


def _input(
    source: tuple[str, str],
    value: Any,
    declared: list[tuple[str, Declaration]],
    of_models: list[Declaration],
) -> Input:
    argument, path = source
    if not isinstance(value, Tensor):
        return Input(path)
    placed = placements(value)
    if placed is not None:
        over = tuple((ranks, _layout(kind, dim)) for ranks, kind, dim in placed)
        return Input(path, over)
    if isinstance(value, nn.Parameter) or declared:
        name = declared[0][0] if declared else path
        over = tuple((each.ranks, REPLICATED) for _, each in declared)
        unlock = "if it is the same on all ranks, declare autofuse.replicated(model)"
        return Input(name, over, unlock, declared=True)
    # A wrapper of the model may take `*args`, which keeps positions, and `**kwargs`, which keeps names.
    for each in of_models:
        index = re.match(r"L\['args'\]\[(\d+)\]", path)
        if index is not None and int(index.group(1)) < len(each.positions):
            argument = each.positions[int(index.group(1))]
        elif key := re.match(r"L\['kwargs'\]\['(\w+)'\]", path):
            argument = key.group(1)
    over = tuple((each.ranks, REPLICATED) for each in of_models if argument in each.inputs)
    unlock = f"if it is the same on all ranks, declare autofuse.replicated(model, inputs=[{argument!r}])"
    return Input(path, over, unlock, declared=True)


def _layout(kind: str, dim: int | None) -> Layout:
    return {"replicate": REPLICATED, "partial": LOCAL}.get(kind, Layout("sliced", dim))


def plain(value: Any) -> torch.Tensor | None:
    """The tensor whose bits are compared; None for what is no tensor."""
    return value.to_local() if hasattr(value, "to_local") else value if isinstance(value, Tensor) else None
