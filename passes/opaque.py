"""User-defined ops that are collectives.

Matchers know functional collectives only. Before sites are matched, the functional collective of the same
meaning takes the place of each registered op, between permutes if the op cuts a dim other than 0. If the site
is kept, the user-defined op is put back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from autofuse.lowering.torch_internals import group_world

from .graph.anchors import OPAQUE, STANDS_FOR, c10d
from .graph.emit import erase_unused, origin
from .graph.follow import WAIT, aten, tensor

# The roles of arguments of each kind of collective.
ROLES = {
    "all_reduce": ("input", "group", "world", "reduce_op"),
    "reduce_scatter": ("input", "group", "world", "reduce_op", "dim"),
    "all_gather": ("input", "group", "world", "dim"),
    "all_to_all": ("input", "group", "world", "output_splits", "input_splits"),
}
_SPLITS = ("output_splits", "input_splits")


@dataclass(frozen=True)
class Opaque:
    """The meaning of an op: a collective of `kind`. `roles` maps roles to the names of the op's arguments."""

    name: str
    kind: str
    roles: Mapping[str, str]
    reduce_op: str
    """The reduction, if no argument has this role."""
    group: Callable[[str], str]
    """From the op's group argument to the name of the process group; raises if there is none."""

    def __str__(self) -> str:
        """A text that is the same in every process."""
        return repr((self.name, self.kind, sorted(self.roles.items()), self.reduce_op))


@dataclass(frozen=True)
class Meaning:
    """The user-defined op that a functional collective stands in for, as the report shows it."""

    op: str
    problem: str = ""
    """Why the group is not known; empty if it is known."""


@dataclass(frozen=True)
class StandIn:
    """The nodes that stand in for the call `target(*args, **kwargs)` on the tensor `source`."""

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]
    source: fx.Node
    splits: list[list[object]]
    """Of an all_to_all: the sizes that the arguments give."""
    first: fx.Node
    """The input of the collective: the source, or a permute of it."""
    node: fx.Node
    """The functional collective."""
    wait: fx.Node
    order: list[int]
    """The permutation of the dims of the source."""
    length: fx.Node | None
    """A node with the length of one part, if no other node of the graph may have this value."""


_registered: dict[object, Opaque] = {}


def register(op: torch._ops.OpOverload, opaque: Opaque) -> None:
    """Declare `op` a collective. Replaces an earlier registration of `op`."""
    _registered[op] = opaque
    OPAQUE[op] = opaque.name


def registrations(graph: fx.Graph) -> list[str]:
    """The registrations and names of groups, which a rewrite of `graph` uses, for cache keys."""
    used = []
    for node in graph.nodes:
        opaque = _registered.get(node.target)
        if opaque is not None:
            used.append(f"{opaque} {_group(opaque, _arguments(node))}")
    return used


def all_registrations() -> list[str]:
    """All registrations, in an order that is the same in every process."""
    return sorted(map(str, _registered.values()))


def stand_in(graph: fx.Graph) -> list[StandIn]:
    """Replace every registered op whose arguments can be read by a functional collective."""
    found = []
    for node in list(graph.nodes):
        opaque = _registered.get(node.target)
        if opaque is not None and _can_be_read(node, opaque):
            found.append(_stand_in(node, opaque))
    return found


def put_back(stand_ins: list[StandIn]) -> None:
    """Put the user-defined op back where its functional collective is still in the graph."""
    for it in stand_ins:
        if not it.node._erased:
            _put_back(it)
        if it.length is not None:
            erase_unused([it.length])


# --- stand in -----------------------------------------------------------------------------------------


def _stand_in(node: fx.Node, opaque: Opaque) -> StandIn:
    graph, arguments = node.graph, _arguments(node)
    by_role = {role: arguments[name] for role, name in opaque.roles.items()}
    source, val, out = by_role["input"], tensor(by_role["input"]), tensor(node)
    assert val is not None
    assert out is not None
    group, problem = _group(opaque, arguments)
    world = group_world(group) or 1
    if not problem and by_role.get("world", world) != world:
        problem = f"{opaque.name} says {by_role['world']} ranks, but its group has {world}"
    reduce_op = by_role.get("reduce_op", opaque.reduce_op)
    dim = by_role.get("dim", 0) % val.dim()
    order = [dim, *(d for d in range(val.dim()) if d != dim)]
    inverse = sorted(order, key=order.__getitem__)
    call = partial(_call, graph, node.meta)
    splits: list[list[object]] = []
    length: fx.Node | None = None
    with graph.inserting_before(node):
        first = call(val.permute(order), aten.permute.default, source, order) if dim else source
        moved = out.permute(order) if dim else out
        if opaque.kind == "all_reduce":
            collective = call(moved, c10d.all_reduce.default, first, reduce_op, group)
        elif opaque.kind == "reduce_scatter":
            collective = call(moved, c10d.reduce_scatter_tensor.default, first, reduce_op, world, group)
            if not isinstance(out.shape[dim], int):
                whole = call(val.shape[dim], aten.sym_size.int, source, dim)
                length = call(out.shape[dim], operator.floordiv, whole, world)
        elif opaque.kind == "all_gather":
            collective = call(moved, c10d.all_gather_into_tensor.default, first, world, group)
        else:
            even = [out.shape[0] // world] * world
            splits = [list(by_role.get(role) or even) for role in _SPLITS]
            collective = call(moved, c10d.all_to_all_single.default, first, *splits, group)
        wait = result = call(moved, WAIT, collective)
        if dim:
            result = call(out, aten.permute.default, wait, inverse)
    for user in list(node.users):
        if user.target is aten.sym_size.int:
            user.args = (wait, inverse[user.args[1]])
    collective.meta[STANDS_FOR] = Meaning(opaque.name, problem)
    node.replace_all_uses_with(result)
    call_of = (node.target, node.args, dict(node.kwargs), dict(node.meta))
    graph.erase_node(node)
    return StandIn(*call_of, source, splits, first, collective, wait, order, length)


def _can_be_read(node: fx.Node, opaque: Opaque) -> bool:
    """Whether input and sizes alone are no constants, and arguments without a role have their default."""
    arguments = _arguments(node)
    val, out = tensor(arguments[opaque.roles["input"]]), tensor(node)
    if val is None or out is None or val.dim() == 0:
        return False
    splits = [opaque.roles.get(role) for role in _SPLITS]
    for argument in node.target._schema.arguments:
        name, given = argument.name, arguments[argument.name]
        if name not in opaque.roles.values():
            if not argument.has_default_value() or given != argument.default_value:
                return False
        elif name != opaque.roles["input"] and name not in splits and not isinstance(given, (int, str)):
            return False
    if opaque.kind != "all_to_all" or all(name and arguments[name] for name in splits):
        return True
    # Without splits the parts are equal, and their size must be known.
    return isinstance(val.shape[0], int) and val.shape == out.shape


# --- put back -----------------------------------------------------------------------------------------


def _put_back(it: StandIn) -> None:
    graph, permuted = it.node.graph, it.order != sorted(it.order)
    source = it.node.args[0]
    if permuted:
        assert isinstance(source, fx.Node)
        source = source.args[0] if source is it.first else _moved_back(source, it)
    # Rewrites of other sites may have replaced the source and the sizes.
    now: dict[fx.Node, Any] = {it.source: source}
    sizes: Sequence[Any] = it.node.args[1 : 1 + len(it.splits)]
    for taken, current in zip(it.splits, sizes, strict=True):
        now.update((a, b) for a, b in zip(taken, current, strict=True) if isinstance(a, fx.Node))
    args, kwargs = fx.node.map_arg((it.args, it.kwargs), lambda n: now.get(n, n))
    with graph.inserting_before(it.node):
        restored = moved = graph.call_function(it.target, args, kwargs)
        restored.meta = dict(it.meta)
        if permuted:
            moved = _call(graph, it.meta, tensor(it.wait), aten.permute.default, restored, it.order)
    for user in list(it.wait.users):
        if user.target is aten.sym_size.int:
            user.args = (restored, it.order[user.args[1]])
        elif permuted and user.target is aten.permute.default and _undoes(user, it.order):
            user.replace_all_uses_with(restored)
            graph.erase_node(user)
    # A rewrite of another site may read the wait itself, before the permute.
    it.wait.replace_all_uses_with(moved)
    erase_unused([it.wait, *([moved] if permuted else [])])


def _moved_back(source: fx.Node, it: StandIn) -> fx.Node:
    """The input of the user-defined op, where a rewrite of another site gave the collective a tensor that is
    permuted already."""
    inverse = sorted(it.order, key=it.order.__getitem__)
    val = tensor(source)
    assert val is not None
    with it.node.graph.inserting_before(it.node):
        return _call(it.node.graph, it.meta, val.permute(inverse), aten.permute.default, source, inverse)


def _undoes(permute: fx.Node, order: list[int]) -> bool:
    inverse = permute.args[1]
    return isinstance(inverse, (list, tuple)) and [order[i] for i in inverse] == sorted(order)


# --- arguments ----------------------------------------------------------------------------------------


def _group(opaque: Opaque, arguments: dict[str, Any]) -> tuple[str, str]:
    """(name of the process group, why it is not known)."""
    own = arguments[opaque.roles["group"]]
    try:
        return opaque.group(own), ""
    except Exception as error:  # the user's function may raise anything; the op then stays as it is
        return str(own), f"{opaque.name} has no process group for {own!r}: {error!r}"


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument by name, defaults included."""
    schema = node.target._schema.arguments
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def _call(graph: fx.Graph, like: Mapping[str, Any], val: object, target: Any, *args: object) -> fx.Node:
    """A call whose value is `val`, with the source line of the metadata `like`."""
    node = graph.call_function(target, args)
    node.meta.update(origin(like))
    node.meta["val"] = val
    return node
