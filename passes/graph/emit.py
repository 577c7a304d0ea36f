"""Inserts nodes, with sizes and views, and sets their `meta["val"]`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from autofuse.lowering import torch_internals

from .follow import Shapes, expression, value
from .layout import Digit, Layout, Size, common_digits, exact_quotient, prod, same_shape, same_size

aten = torch.ops.aten


class CannotEmit(Exception):
    """A size or a view cannot be written as nodes. Raised before the graph changes."""


def origin(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a node's metadata that name the user's code."""
    return {key: meta[key] for key in ("stack_trace", "nn_module_stack", "source_fn_stack") if key in meta}


class Emitter:
    """Inserts nodes before `anchor`.

    An input of a new node may stand behind `anchor`; the caller then sorts the graph with `order_nodes`.
    """

    def __init__(self, anchor: fx.Node, shapes: Shapes) -> None:
        self.graph = anchor.graph
        self.anchor = anchor
        self.shapes = shapes
        self.new: list[fx.Node] = []
        self._pending: list[Callable[[], object]] = []
        self.replaced: list[fx.Node] = []
        """Nodes that may have no users after `commit`."""
        self.touched: list[str] = []
        """After `commit`: names of the nodes that are new, erased, or have other inputs."""

    def call(self, target: Callable[..., Any], *args: object, **kwargs: object) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        self.new.append(node)
        node.meta.update(origin(self.anchor.meta))
        values, named = fx.node.map_arg(args, value), fx.node.map_arg(kwargs, value)
        tensors = [*_tensors(values), *_tensors(value(self.anchor))]
        mode = next((v.fake_mode for v in tensors if hasattr(v, "fake_mode")), None)
        if mode is None:
            node.meta["val"] = target(*values, **named)
        else:
            with mode:
                node.meta["val"] = target(*values, **named)
        return node

    def redo(self, step: fx.Node, source: fx.Node) -> fx.Node:
        """A copy of `step` that reads `source` in place of its first argument. Their strides may differ, so
        a view becomes a reshape."""
        reshapes = step.target in (aten.view.default, aten._unsafe_view.default)
        target = aten.reshape.default if reshapes else step.target
        assert callable(target)
        return self.call(target, source, *step.args[1:], **step.kwargs)

    def numbers(self, count: int | fx.Node, like: fx.Node) -> fx.Node:
        """`0, 1, ..., count - 1` as int64 on the device of `like`, by an op that Inductor lowers."""
        device = value(like).device  # type: ignore[attr-defined]
        options = {"dtype": torch.int64, "device": device, "requires_grad": False}
        return self.call(torch.ops.prims.iota.default, count, start=0, step=1, **options)

    def full(
        self, shape: Sequence[int | fx.Node], fill: object, like: fx.Node, dtype: torch.dtype | None = None
    ) -> fx.Node:
        """A tensor of one value on the device of `like`, by default of its dtype. Inductor decomposes
        new_full and zeros_like before this stage."""
        val = value(like)
        assert isinstance(val, torch.Tensor)
        options = {"dtype": dtype or val.dtype, "device": val.device, "pin_memory": False}
        return self.call(aten.full.default, [*shape], fill, **options)

    def cast(self, node: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        """The node in another dtype; None for its own."""
        val = value(node)
        assert isinstance(val, torch.Tensor)
        if dtype in (None, val.dtype):
            return node
        return self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def item(self, node: fx.Node, index: int) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            item = self.graph.call_function(operator.getitem, (node, index))
        item.meta["val"] = value(node)[index]  # type: ignore[index]
        self.new.append(item)
        return item

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """On `commit`, all users of `old` read `new`."""
        self.replaced.append(old)
        self._pending.append(lambda: old.replace_all_uses_with(new))

    def replace_input(self, user: fx.Node, old: fx.Node, new: fx.Node) -> None:
        """On `commit`, `user` reads `new` instead of `old`."""
        self.replaced.append(old)
        self._pending.append(lambda: user.replace_input_with(old, new))

    def commit(self) -> None:
        self.touched += [user.name for old in self.replaced for user in old.users if user.op != "output"]
        self.touched += [node.name for node in self.new]
        for change in self._pending:
            change()

    def undo(self) -> None:
        """Erase every inserted node. Not to be called after `commit`."""
        for node in reversed(self.new):
            self.graph.erase_node(node)
        self.new.clear()

    def size(self, size: Size) -> int | fx.Node:
        """The size as an int, or as a node that holds it. Raises CannotEmit if no node has the size."""
        size = self.shapes.meaning(size)
        if isinstance(size, int):
            return size
        if size.is_Integer:
            return int(size)
        for node in self.graph.nodes:
            val = node.meta.get("val")
            known = isinstance(val, torch.SymInt) and not self._is_own_size(node)
            if known and same_size(expression(val), size) and not self._after(node):
                return node
        for node in self.graph.nodes:
            val = node.meta.get("val")
            if isinstance(val, torch.Tensor) and node is not self.anchor and node not in self.new:
                for dim, s in enumerate(val.shape):
                    if same_size(expression(s), size) and not self._after(node):
                        return self.call(aten.sym_size.int, node, dim)
        op, parts = _operation(size)
        if op is not None:
            return functools.reduce(lambda a, b: self._symbolic(op, a, b), [self.size(p) for p in parts])
        raise CannotEmit(f"no value in the graph has the size {size}")

    def _symbolic(self, op: object, a: int | fx.Node, b: int | fx.Node) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(op, (a, b))
        node.meta["val"] = op(value(a), value(b))  # type: ignore[operator]
        self.new.append(node)
        return node

    def _is_own_size(self, node: fx.Node) -> bool:
        """Whether `node` is a size of the result that is replaced."""
        results = (self.anchor, *self.anchor.users)
        return node.target is aten.sym_size.int and node.args[0] in results

    def replace_sizes(self, results: Sequence[fx.Node]) -> None:
        """On `commit`, sizes of the replaced results are taken from other nodes."""
        for result in results:
            for user in list(result.users):
                if user.target is aten.sym_size.int:
                    size = self.size(self.shapes.size(user))
                    if isinstance(size, fx.Node):
                        self.replace(user, size)

    def _after(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node > self.anchor

    def reshape(self, node: fx.Node, shape: Sequence[Size]) -> fx.Node:
        current = self.shapes.known(node)
        if same_shape(current, shape):
            return node
        dynamic = [i for i, s in enumerate(shape) if not isinstance(self.shapes.meaning(s), int)]
        sizes: list[int | fx.Node] = [-1 if [i] == dynamic else self.size(s) for i, s in enumerate(shape)]
        return self.call(aten.reshape.default, node, sizes)

    def rebuild(
        self, node: fx.Node, have: Layout, want: Layout, shape: Sequence[Size] | None = None
    ) -> fx.Node:
        """Views and permutes that turn `node`, with layout `have`, into the tensor with layout `want`.

        Both layouts are relative to one source, and `have` has no fixed digits. `shape` is the shape of the
        result, by default that of `want`. Raises CannotEmit if no such views exist.
        """
        fixed = tuple(d for d, _ in want.fixed)
        refined = common_digits(have.digits, fixed + want.digits)
        if refined is None:
            source_layout = _source(have)
            if source_layout in (None, have):
                raise CannotEmit(f"{want} is no view of {have}")
            return self.rebuild(self.rebuild(node, have, source_layout), source_layout, want, shape)
        source, target = refined
        shape = want.shape if shape is None else shape
        if source == target and not fixed:
            return self.reshape(node, shape)
        node = self.reshape(node, [d.size for d in source])
        order = [source.index(d) for d in target]
        if order != sorted(order):
            node = self.call(aten.permute.default, node, order)
        for index in _fixed_indices(want.fixed, target):
            node = self.call(aten.select.int, node, 0, index)
        return self.reshape(node, shape)


def _source(layout: Layout) -> Layout | None:
    """The layout of the source itself, if `layout` has all elements of the source."""
    dims = {d.dim for d in layout.digits}
    if not dims or min(dims) < 0:
        return None
    sizes = [prod(d.size for d in layout.digits if d.dim == i) for i in range(max(dims) + 1)]
    return Layout.of(sizes)


def _fixed_indices(fixed: tuple[tuple[Digit, int], ...], target: tuple[Digit, ...]) -> list[int]:
    """The index of each leading digit of `target` that belongs to a fixed digit."""
    indices: list[int] = []
    position = 0
    for digit, index in fixed:
        remaining: Size = digit.size
        while remaining != 1:
            part = target[position]
            position += 1
            left = exact_quotient(remaining, part.size)
            if not isinstance(left, int) or not isinstance(part.size, int):
                raise CannotEmit("a piece of symbolic size")
            indices.append((index // left) % part.size)
            remaining = left
    return indices


def _operation(size: sympy.Expr) -> tuple[Callable[[Any, Any], Any] | None, Sequence[Size]]:
    """The outermost operation of a size and its operands."""
    division = torch_internals.floor_division(size)
    if division is not None:
        return operator.floordiv, division
    if isinstance(size, (sympy.Mul, sympy.Add)):
        return operator.mul if isinstance(size, sympy.Mul) else operator.add, size.args
    if isinstance(size, sympy.Pow) and size.exp.is_Integer and size.exp > 0:
        return operator.mul, [size.base] * int(size.exp)
    return None, ()


def _tensors(values: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    fx.node.map_aggregate(values, lambda v: found.append(v) if isinstance(v, torch.Tensor) else None)
    return found


def order_nodes(graph: fx.Graph) -> None:
    """Move nodes up where needed, so that every node stands after its inputs. RuntimeError on a cycle."""
    done: set[fx.Node] = set()
    entered: set[fx.Node] = set()
    ordered: list[fx.Node] = []
    for root in list(graph.nodes):
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [n for n in node.all_input_nodes if n not in done]
            if node in done or not missing:
                stack.pop()
                if node not in done:
                    done.add(node)
                    ordered.append(node)
            elif node in entered:  # its inputs were ordered, as far as they do not depend on it
                raise RuntimeError(f"{node.name} is computed from itself")
            else:
                entered.add(node)
                stack.extend(reversed(missing))
    last = None
    for node in ordered:
        if last is not None and node.op != "placeholder":
            last.append(node)
        last = node


def relax_views(graph: fx.Graph) -> None:
    """Turn every `view` into a `reshape`, since results of fused ops may have other strides."""
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default


def erase_unused(nodes: Sequence[fx.Node]) -> list[str]:
    """Erase those of `nodes` that have no users, then their inputs likewise. No node may have side effects.

    Returns the names of the erased nodes.
    """
    work = list(nodes)
    gone: list[str] = []
    while work:
        node = work.pop()
        if node._erased or node.users or node.op != "call_function":
            continue
        work.extend(node.all_input_nodes)
        gone.append(node.name)
        node.graph.erase_node(node)
    return gone
