"""Absorbs tails: pointwise ops and norms that read the result of a fused reduction become stages of the op.

    V, kept = matmul_all_reduce(..., [residual, gamma], "add %0; keep; to float32; rms 1e-06; mul %1")

The walk starts at the reduced output and goes down, through views that keep rows and columns. A value that
others read, too, is kept: the op returns it. The walk ends at what is no stage, at operands that are not
known before the op, and where several users could go on. Dtypes stay those of the graph after every stage.

A tail is absorbed on CPU ranks if it has a norm or an operand of full size, such as a residual: the other
stages cost Inductor nothing, since it fuses them with what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from autofuse.lowering.reference.tail import parse

from .graph.anchors import is_collective
from .graph.emit import CannotEmit, Emitter, erase_unused
from .graph.follow import WAIT, Shapes, argument, aten, dtype_of, is_cast, is_reshape, tensor
from .graph.functional import arguments
from .graph.layout import Layout, same_shape, same_size
from .matchers.operands import Operand, broadcast, materialise
from .matchers.product import constant

_REDUCTIONS = (
    torch.ops.autofuse.matmul_all_reduce.default,
    torch.ops.autofuse.matmul_reduce_scatter.default,
)
_FLOATS = torch.float32, torch.bfloat16, torch.float16
_UNARY = {aten.neg.default: "neg", aten.relu.default: "relu", aten.silu.default: "silu"}
_BINARY = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.sub.Tensor: "sub",
    aten.sub.Scalar: "sub",
    aten.rsub.Tensor: "rsub",
    aten.rsub.Scalar: "rsub",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
}
_SWAPPED = {"add": "add", "mul": "mul", "sub": "rsub", "rsub": "sub"}
_MOST_AHEAD = 16
"""How many stages the walk looks ahead for a norm."""


Prove: TypeAlias = Callable[[Any, Sequence[fx.Node], str], str]


@dataclass(frozen=True)
class Tail:
    """What became of the stages behind a reduction. `text`: those that were absorbed, empty if none.
    `end`: why the tail ends there, or why there is none. `proof`: as the op has it."""

    text: str
    end: str
    proof: str = ""

    @property
    def form(self) -> str:
        return "" if not self.text else "owner" if self.proof else "every"


@dataclass(frozen=True)
class Step:
    """One stage. `text` has `{}` for each operand; `node` holds V behind the stage.

    `inner`: the nodes that the stage replaces. `statistics`: those among them that a norm can return.
    """

    text: str
    node: fx.Node
    operands: tuple[Operand, ...] = ()
    inner: frozenset[fx.Node] = field(default=frozenset())
    statistics: tuple[fx.Node, ...] = ()

    @property
    def returned(self) -> tuple[fx.Node, ...]:
        """The statistics, if another node reads one of them."""
        read = any(u not in self.inner for s in self.statistics for u in s.users)
        return self.statistics if read else ()


def absorb_tails(graph: fx.Graph, prove: Prove) -> dict[fx.Node, Tail]:
    """Absorb the tails of the reductions of `graph` in place. By reduction, what became of its tail.

    `prove(group, operands, tail)`: what proves that the operands of a tail are replicated, if owners shall
    apply it; else an empty text.
    """
    changing = [n for n in graph.nodes if _changes_memory(n)]
    found: dict[fx.Node, Tail] = {}
    for op in list(graph.nodes):
        val = op.meta.get("val") if op.target in _REDUCTIONS else None
        if isinstance(val, (list, tuple)) and val[0].device.type == "cpu":
            new, tail = _absorb(op, changing, prove)
            found[new] = tail
    return found


def _changes_memory(n: fx.Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable


def _absorb(op: fx.Node, changing: Sequence[fx.Node], prove: Prove) -> tuple[fx.Node, Tail]:
    """The reduction that stands for `op` behind the rewrite, and its tail."""
    items = {item.args[1]: item for item in op.users}
    given = arguments(op)
    assert given is not None
    if 0 not in items or given["tail"]:
        return op, Tail(given["tail"], "")
    walk = _Walk(op, items[0], given.get("dim", 0) == 0, changing)
    steps, end = walk.steps()
    if not any(step.statistics or walk.full(step) for step in steps):
        nothing = "neither a norm nor an operand of full size follows"
        return op, Tail("", f"{nothing}: {end}" if end else nothing)
    return _rewrite(op, items, given, steps, walk, end, prove)


def _rewrite(
    op: fx.Node,
    items: dict[object, fx.Node],
    given: dict[str, Any],
    steps: Sequence[Step],
    walk: _Walk,
    end: str,
    prove: Prove,
) -> tuple[fx.Node, Tail]:
    for node in sorted({n for step in steps for n in walk.cone(step)}):
        op.prepend(node)
    emitter = Emitter(op, walk.shapes)
    words: list[str] = []
    kept: list[fx.Node] = []
    operands: list[fx.Node] = []
    last = items[0]
    try:
        for step in steps:
            if any(u not in step.inner for u in _readers(walk.holders(last))):
                words.append("keep")
                kept.append(last)
            numbers = [f"%{len(operands) + i}" for i in range(len(step.operands))]
            operands += [materialise(emitter, o) for o in step.operands]
            words.append(step.text.format(*numbers) + (" keep" if step.returned else ""))
            kept += step.returned
            last = step.node
        text = "; ".join(words)
        parse(text)
        read = [o.node for step in steps for o in step.operands]
        proof = prove(given["group_name"], read, text) if op.target is _REDUCTIONS[0] else ""
        tail = {"tail_operands": operands, "tail": text, "proof": proof}
        fused = emitter.call(op.target, *(given | tail).values())
        old = [last, *kept]
        for i, node in enumerate(old):
            item = emitter.item(fused, i)
            if dtype_of(item) != dtype_of(node):
                raise CannotEmit(f"{node.name} would become {dtype_of(item)}")
            emitter.replace(node, emitter.reshape(item, walk.shapes.known(node)))
        if 1 in items:  # the product
            emitter.replace(items[1], emitter.item(fused, len(old)))
            old.append(items[1])
        if any(n < i for n in emitter.new for i in n.all_input_nodes):
            raise CannotEmit("a size is known behind the op only")
    except CannotEmit as error:
        emitter.undo()
        return op, Tail("", str(error))
    emitter.commit()
    erase_unused([*old, items[0]])
    return fused, Tail(text, end, proof)


def _readers(holders: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Those that read V, in whatever view."""
    known = set(holders)
    return (u for h in known for u in h.users if u not in known)


class _Walk:
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
        while True:
            step = self._next(last)
            if isinstance(step, str):
                return steps, step
            steps.append(step)
            last = step.node

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
        """The nodes behind the op that operands of the step are computed by."""
        nodes = [o.node for o in step.operands]
        found: set[fx.Node] = set()
        while nodes:
            node = nodes.pop()
            if node not in found and self.op < node:
                found.add(node)
                nodes += node.all_input_nodes
        return found

    def _next(self, node: fx.Node) -> Step | str:
        """The stage behind `node`; why there is none."""
        holders = self.holders(node)
        norms = list(self._norms(holders))
        if len(norms) == 1:
            return norms[0]
        if norms:
            return f"several norms read {node.name}"
        readers = list(dict.fromkeys(_readers(holders)))
        found = [self._stage(u, holders) for u in readers]
        if len(found) == 1:
            return found[0]
        leading = [step for step in found if isinstance(step, Step) and self._leads(step.node, _MOST_AHEAD)]
        if len(leading) == 1:
            return leading[0]
        return f"{', '.join(u.name for u in readers)} read {node.name}"

    def _leads(self, node: fx.Node, ahead: int) -> bool:
        """Whether a norm follows behind stages."""
        holders = self.holders(node)
        if any(True for _ in self._norms(holders)):
            return True
        steps = (self._stage(u, holders) for u in _readers(holders)) if ahead else ()
        return any(isinstance(step, Step) and self._leads(step.node, ahead - 1) for step in steps)

    # --- pointwise stages -----------------------------------------------------------------------------

    def _stage(self, n: fx.Node, holders: Sequence[fx.Node]) -> Step | str:
        """`n`, which reads one of `holders`, as a stage; why it is none."""
        sides = [i for i in n.all_input_nodes if i in holders]
        shape = self.shapes.of(n)
        if n.op != "call_function" or not shape or len(sides) != 1 or dtype_of(n) not in _FLOATS:
            return f"{n.name} is no stage"
        v = sides[0]
        layout = Layout.of(self.size).reshape(shape)
        if layout is None or not same_shape(shape, self.shapes.of(v)):
            return f"{n.name} changes the shape"
        if any(self.op < m < n for m in self.changing):
            return f"memory changes before {n.name}"
        words = self._words(n, v)
        if words is None:
            return f"{n.name} is no stage"
        text, others = words
        operands = []
        for other in others:
            operand = broadcast(other, n, layout, self.size, self.shapes)
            if operand is None or dtype_of(other) not in (*_FLOATS, torch.bool):
                return f"{other.name} does not broadcast along rows or columns, or is no float"
            late = self._late(other)
            if late:
                return late
            operands.append(operand)
        return Step(text, n, tuple(operands), frozenset({n}))

    def _words(self, n: fx.Node, v: fx.Node) -> tuple[str, tuple[fx.Node, ...]] | None:
        """The stage as text, with `{}` for each of the operands; None if there is no such stage."""
        if is_cast(n):
            return f"to {str(dtype_of(n)).removeprefix('torch.')}", ()
        if n.target in _UNARY:
            return _UNARY[n.target], ()
        if n.target is aten.gelu.default:
            return f"gelu {argument(n, 1, 'approximate', 'none')}", ()
        if n.target in _BINARY:
            return _binary(n, v)
        if n.target is aten.where.self and n.args[0] is not v:
            return _where(n, v)
        return None

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
        """The norms of V over its columns. Means and variances with other readers are none."""
        for v in holders:
            shape = self.shapes.known(v)
            if not self.whole_rows or not shape or not same_size(shape[-1], self.size[1]):
                continue
            if dtype_of(v) != torch.float32:
                continue
            for reader in v.users:
                step = None
                if _is_square(reader, v):
                    step = _rms(reader, v)
                elif reader.target is aten.var_mean.correction:
                    step = _standardize(reader, v)
                if step is not None and not any(self.op < m < step.node for m in self.changing):
                    yield step


def _binary(n: fx.Node, v: fx.Node) -> tuple[str, tuple[fx.Node, ...]] | None:
    name = _BINARY[n.target]
    left, right = n.args[:2]
    if argument(n, 2, "alpha", 1) != 1:
        return None
    other = right
    if left is not v:
        if name not in _SWAPPED:
            return None
        name, other = _SWAPPED[name], left
    if isinstance(other, fx.Node):
        return (f"{name} {{}}", (other,)) if tensor(other) is not None else None
    return (f"{name} {other!r}", ()) if _is_number(other) else None


def _where(n: fx.Node, v: fx.Node) -> tuple[str, tuple[fx.Node, ...]] | None:
    mask, left, right = n.args
    dtype = dtype_of(v)
    name, other = ("where", right) if left is v else ("masked_fill", left)
    if not isinstance(mask, fx.Node) or not isinstance(other, fx.Node) or dtype is None:
        return None
    number = constant(other, dtype)
    if number is not None:
        return f"{name} {{}} {number!r}", (mask,)
    return f"{name} {{}} {{}}", (mask, other)


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _only(n: fx.Node | None) -> fx.Node | None:
    """The only user of a node."""
    users = list(n.users) if n is not None else []
    return users[0] if len(users) == 1 else None


def _is_square(n: fx.Node, v: fx.Node) -> bool:
    if n.target is aten.pow.Tensor_Scalar:
        return n.args == (v, 2)
    return n.target is aten.mul.Tensor and n.args == (v, v)


def _over_columns(n: fx.Node, v: fx.Node) -> bool:
    """Whether a mean or variance is over the last dim alone, which stays as a dim of size 1."""
    rank = len(v.meta["val"].shape)
    dims = argument(n, 1, "dim")
    kept = argument(n, 2, "keepdim", False) if n.target is aten.mean.dim else n.kwargs.get("keepdim")
    return kept is True and isinstance(dims, (list, tuple)) and [d % rank for d in dims] == [rank - 1]


def _scale(mean: fx.Node | None) -> tuple[fx.Node, fx.Node, float | int] | None:
    """`rsqrt(mean + eps)` below a mean: the sum, the root and eps."""
    total = _only(mean)
    if total is None or total.target not in (aten.add.Tensor, aten.add.Scalar):
        return None
    eps, root = total.args[1], _only(total)
    if total.args[0] is not mean or not _is_number(eps) or argument(total, 2, "alpha", 1) != 1:
        return None
    if root is None or root.target is not aten.rsqrt.default:
        return None
    assert isinstance(eps, (int, float))
    return total, root, eps


def _times(n: fx.Node, scale: fx.Node) -> fx.Node | None:
    """The only product of both."""
    found = [u for u in n.users if u.target is aten.mul.Tensor and set(u.args[:2]) == {n, scale}]
    return found[0] if len(found) == 1 else None


def _rms(square: fx.Node, v: fx.Node) -> Step | None:
    mean = _only(square)
    if mean is None or mean.target is not aten.mean.dim or mean.kwargs.get("dtype") is not None:
        return None
    found = _scale(mean) if _over_columns(mean, v) else None
    if found is None:
        return None
    total, root, eps = found
    normed = _times(v, root)
    if normed is None:
        return None
    return Step(f"rms {eps!r}", normed, (), frozenset({square, mean, total, root, normed}), (root,))


def _standardize(both: fx.Node, v: fx.Node) -> Step | None:
    if both.args[0] is not v or both.kwargs.get("correction") != 0 or not _over_columns(both, v):
        return None
    items = {item.args[1]: item for item in both.users}
    found = _scale(items.get(0))
    mean = items.get(1)
    if found is None or mean is None:
        return None
    total, root, eps = found
    centred = [u for u in mean.users if u.target is aten.sub.Tensor and u.args == (v, mean)]
    if len(centred) != 1 or argument(centred[0], 2, "alpha", 1) != 1:
        return None
    normed = _only(centred[0])
    if normed is None or normed is not _times(centred[0], root):
        return None
    inner = frozenset({both, items[0], mean, total, root, centred[0], normed})
    return Step(f"standardize {eps!r}", normed, (), inner, (mean, root))
