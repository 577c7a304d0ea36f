"""Calls of ops that change their arguments, in the form that functional graphs have.

A functional graph calls a higher-order op, which calls the op on copies and returns the results of the op,
then the changed copies. It takes arguments by keyword. The changed tensors, the bases, are listed in
`_all_bases`. The keyword `_<name>_base_index` holds the position of argument `name` in that list; for a list
of tensors, `_<name>_<i>_base_index` holds the position of entry `i`. Inductor later removes the copies that
it can.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autofuse.lowering.torch_internals import auto_functionalized

from .emit import Emitter

_BASES = "_all_bases"


def called(node: fx.Node) -> object:
    """The op that the node calls, directly or through the higher-order op."""
    return node.args[0] if node.target is auto_functionalized() else node.target


def arguments(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a call by name, in the order of the schema; None if a changed argument is a view."""
    op = called(node)
    assert isinstance(op, torch._ops.OpOverload)
    schema = op._schema.arguments
    if node.target is not auto_functionalized():
        given = dict(zip((a.name for a in schema), node.args, strict=False))
        return {a.name: given.get(a.name, node.kwargs.get(a.name, a.default_value)) for a in schema}
    given, left = dict(node.kwargs), set(node.kwargs)
    bases = given[_BASES]
    left.remove(_BASES)

    def changed(name: str) -> Any:
        left.discard(name)
        index = given[name]
        return None if index is None else bases[index]

    found: dict[str, Any] = {}
    for a in schema:
        if a.alias_info is None:
            found[a.name] = given.get(a.name, a.default_value)
            left.discard(a.name)
        elif f"_{a.name}_length" in given:
            left.remove(f"_{a.name}_length")
            count = given[f"_{a.name}_length"]
            found[a.name] = [changed(f"_{a.name}_{i}_base_index") for i in range(count)]
        else:
            found[a.name] = changed(f"_{a.name}_base_index")
    return None if left else found


def new_bases(node: fx.Node) -> dict[fx.Node, fx.Node]:
    """The changed copies that a functional call returns, by base. Copies without users are left out."""
    count = len(node.args[0]._schema.returns) or 1
    items = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    bases = node.kwargs[_BASES]
    return {b: items[count + i] for i, b in enumerate(bases) if count + i in items}


def call_on_copies(
    emitter: Emitter, op: torch._ops.OpOverload, given: Mapping[str, Any]
) -> tuple[list[fx.Node], dict[fx.Node, fx.Node]]:
    """Insert a functional call of an op that changes lists of tensors, all different.

    Returns the results, and the changed copies by base.
    """
    count = len(op._schema.returns)
    changing = [a.name for a in op._schema.arguments if a.alias_info is not None]
    bases = [base for name in changing for base in given[name]]
    if not bases:
        node = emitter.call(op, *(given[a.name] for a in op._schema.arguments))
        return [node] if count == 1 else [emitter.item(node, i) for i in range(count)], {}
    rest: dict[str, Any] = {name: value for name, value in given.items() if name not in changing}
    for name in changing:
        rest[f"_{name}_length"] = len(given[name])
        rest |= {f"_{name}_{i}_base_index": bases.index(base) for i, base in enumerate(given[name])}
    node = emitter.call(auto_functionalized(), op, **rest, **{_BASES: bases})
    items = [emitter.item(node, i) for i in range(count + len(bases))]
    return items[:count], dict(zip(bases, items[count:], strict=True))
