"""The walk from a reduced output down, through views and over stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from autofuse.passes.graph.anchors import is_collective
from autofuse.passes.graph.follow import WAIT, Shapes, dtype_of, is_cast, is_reshape
from autofuse.passes.graph.layout import Layout, same_shape, same_size
from autofuse.passes.matchers.operands import Operand, broadcast

from .backward import Found, backward_of
from .norms import norm_of
from .pointwise import words_of
from .step import Step

_FLOATS = torch.float32, torch.bfloat16, torch.float16
_QUANTISED = torch.float8_e4m3fn, torch.float8_e5m2
"""Other dtypes to which a stage may cast."""
_MOST_AHEAD = 16
"""How many stages the walk looks ahead for a norm."""


def readers_of(holders: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The nodes that read one of `holders`, which are V and its views, and are none of them."""
    known = set(holders)
    return (u for h in known for u in h.users if u not in known)


class Walk:
    """The walk from `item`, the reduced output of `op`, down."""

    def __init__(self, op: fx.Node, item: fx.Node, whole_rows: bool, changing: Sequence[fx.Node]) -> None:
        self.op = op
        self.item = item
        self.whole_rows = whole_rows
        self.changing = changing
        self.shapes = Shapes()
        self.size = self.shapes.known(item)

    def steps(self) -> tuple[list[Step], str]:
        """The stages, and why they end."""
        steps: list[Step] = []
        last = self.item
        behind_norm = False
        while True:
            step = self._next(last, behind_norm)
            if isinstance(step, str):
                return steps, step
            steps.append(step)
            last = step.node
            behind_norm = bool(step.statistics) or (behind_norm and step.is_affine)

    def holders(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """`node` and its views that keep the order of its elements."""
        found = [node]
        for holder in found:
            found += [u for u in holder.users if is_reshape(u)]
        return tuple(found)

    def full(self, step: Step) -> bool:
        """Whether an operand has the size of V. Of one row, a bias is smaller in that it has fewer dims."""
        shape = self.shapes.of(step.node)
        return any(
            same_shape(o.shape, self.size) or same_shape(self.shapes.of(o.node), shape) for o in step.operands
        )

    def cone(self, step: Step) -> set[fx.Node]:
        """The nodes behind the op from which operands of the step are computed."""
        nodes = [o.node for o in step.operands]
        found: set[fx.Node] = set()
        while nodes:
            node = nodes.pop()
            if node not in found and self.op < node:
                found.add(node)
                nodes += node.all_input_nodes
        return found

    def _next(self, node: fx.Node, behind_norm: bool) -> Step | str:
        """The stage behind `node`, or why there is none.

        If several nodes read the value, the walk follows the one that leads to a norm. Behind a norm it
        follows the one that scales or shifts the value: the other reader may save the value for the backward.
        """
        holders = self.holders(node)
        norms = list(self._norms(holders))
        if len(norms) == 1:
            return norms[0]
        if norms:
            return f"several norms read {node.name}"
        readers = list(dict.fromkeys(readers_of(holders)))
        found = [self._stage(u, holders) for u in readers]
        if len(found) == 1:
            return found[0]
        leading = [step for step in found if isinstance(step, Step) and self._leads(step.node, _MOST_AHEAD)]
        if not leading and behind_norm:
            leading = [step for step in found if isinstance(step, Step) and step.is_affine]
        if len(leading) == 1:
            return leading[0]
        return f"{', '.join(u.name for u in readers)} read {node.name}"

    def _leads(self, node: fx.Node, ahead: int) -> bool:
        """Whether a norm follows `node` within `ahead` stages."""
        holders = self.holders(node)
        if any(True for _ in self._norms(holders)):
            return True
        steps = (self._stage(u, holders) for u in readers_of(holders)) if ahead else ()
        return any(isinstance(step, Step) and self._leads(step.node, ahead - 1) for step in steps)

    # --- pointwise stages -----------------------------------------------------------------------------

    def _stage(self, n: fx.Node, holders: Sequence[fx.Node]) -> Step | str:
        """The node `n`, which reads one of `holders`, as a stage, or why it is none."""
        sides = [i for i in n.all_input_nodes if i in holders]
        shape = self.shapes.of(n)
        dtypes = (*_FLOATS, *_QUANTISED) if is_cast(n) else _FLOATS
        if n.op != "call_function" or not shape or len(sides) != 1 or dtype_of(n) not in dtypes:
            return f"{n.name} is no stage"
        v = sides[0]
        layout = Layout.of(self.size).reshape(shape)
        if layout is None or not same_shape(shape, self.shapes.of(v)):
            return f"{n.name} changes the shape"
        if any(self.op < m < n for m in self.changing):
            return f"memory changes before {n.name}"
        words = words_of(n, v)
        if words is None:
            return f"{n.name} is no stage"
        text, others = words
        operands = self._operands(n, layout, others)
        return operands if isinstance(operands, str) else Step(text, n, operands, frozenset({n}))

    def _operands(self, n: fx.Node, layout: Layout, others: Sequence[fx.Node]) -> tuple[Operand, ...] | str:
        """The operands of `n` besides V, or why one of them cannot be an operand. layout: that of `n`."""
        operands = []
        for other in others:
            operand = broadcast(other, n, layout, self.size, self.shapes)
            if operand is None or dtype_of(other) not in (*_FLOATS, torch.bool):
                return f"{other.name} does not broadcast along rows or columns, or is no float"
            late = self._late(other)
            if late:
                return late
            operands.append(operand)
        return tuple(operands)

    def _late(self, operand: fx.Node) -> str:
        """Why the operand cannot be computed before the op; empty if it can."""
        seen: set[fx.Node] = set()
        work = [operand]
        while work:
            n = work.pop()
            if n is self.op:
                return f"{operand.name} is computed from the sum itself"
            if n in seen or not self.op < n:
                continue
            if is_collective(n):
                return f"{operand.name} depends on the later collective {n.name}"
            if n.target is not WAIT and n.is_impure():
                return f"{operand.name} depends on {n.name}, which cannot move"
            seen.add(n)
            work.extend(n.all_input_nodes)
        return ""

    # --- norms ----------------------------------------------------------------------------------------

    def _norms(self, holders: Sequence[fx.Node]) -> Iterator[Step]:
        """The norms of V over its columns. A mean or variance that other nodes read belongs to no norm."""
        for v in holders:
            shape = self.shapes.known(v)
            if not self.whole_rows or not shape or not same_size(shape[-1], self.size[1]):
                continue
            if dtype_of(v) != torch.float32:
                continue
            for reader in v.users:
                found = backward_of(reader, v)
                step = norm_of(reader, v) if found is None else self._backward(found)
                if step is not None and not any(self.op < m < step.node for m in self.changing):
                    yield step

    def _backward(self, found: Found) -> Step | None:
        """A norm's backward as a stage. Its operands are known before the op."""
        layout = Layout.of(self.size).reshape(self.shapes.known(found.node))
        if layout is None:
            return None
        operands = self._operands(found.node, layout, found.operands)
        return None if isinstance(operands, str) else Step(found.text, found.node, operands, found.inner)
