"""Absorbs tails: pointwise ops and norms that read the result of a fused reduction become stages of the op.

    V, kept = matmul_all_reduce(..., [residual, gamma], "add %0; keep; to float32; rms 1e-06; mul %1")

The walk starts at the reduced output and goes down, through views that keep rows and columns. A value that
others read, too, is kept: the op returns it. The walk ends at what is no stage, at operands that are not
known before the op, and where several users could go on. Dtypes stay those of the graph after every stage.

A tail is absorbed on CPU ranks if it has a norm or an operand of full size, such as a residual: the other
stages cost Inductor nothing, since it fuses them with what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from autofuse.lowering.reference.tail import parse
from autofuse.passes.graph.emit import CannotEmit, Emitter, erase_unused
from autofuse.passes.graph.follow import dtype_of
from autofuse.passes.graph.functional import arguments
from autofuse.passes.matchers.operands import materialise

from .step import Step
from .walk import Walk, readers_of

_REDUCTIONS = (
    torch.ops.autofuse.matmul_all_reduce.default,
    torch.ops.autofuse.matmul_reduce_scatter.default,
)


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
    walk = Walk(op, items[0], given.get("dim", 0) == 0, changing)
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
    walk: Walk,
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
            if any(u not in step.inner for u in readers_of(walk.holders(last))):
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
