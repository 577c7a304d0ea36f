"""Absorbs tails: pointwise ops and norms that read the result of a fused reduction become stages of the op.

    V, kept = matmul_all_reduce(..., [residual, gamma], "add %0; keep; to float32; rms 1e-06; mul %1")

The walk starts at the reduced output and goes down, through views that keep rows and columns. A value that
other nodes also read is kept: the op returns it. The walk ends at a node that is no stage, at an operand that
is not known before the op, and where several users could be the next stage. After every stage the value has
the dtype that it has in the graph.

A tail may be absorbed if it has a norm or an operand of full size, such as a residual. Inductor fuses other
stages with the code that follows, at no cost. The schedule decides whether a tail is absorbed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from autofuse.lowering.gpu.support import MOST_TAIL_COLUMNS, TAIL_UNIT
from autofuse.lowering.proofs import UNPROVEN
from autofuse.lowering.reference.tail import parse
from autofuse.passes.graph.anchors import fused_op
from autofuse.passes.graph.emit import CannotEmit, Emitter, erase_unused
from autofuse.passes.graph.follow import dtype_of
from autofuse.passes.graph.functional import arguments
from autofuse.passes.matchers.operands import materialise
from autofuse.passes.report import Considered

from .step import Step
from .walk import Walk, readers_of

_REDUCTIONS = (
    torch.ops.autofuse.matmul_all_reduce.default,
    torch.ops.autofuse.matmul_reduce_scatter.default,
)


@dataclass(frozen=True)
class Candidate:
    """A tail that a reduction could take.

    Attributes:
        op, given: the fused op, and its arguments.
        text: the tail.
        stages: its stages, as they stand in the graph.
        operands: the values that it reads.
        kept: the values that it returns besides its last one.
        reduced: the sum.
    """

    op: fx.Node
    given: Mapping[str, Any]
    text: str
    stages: tuple[Step, ...]
    operands: tuple[fx.Node, ...]
    kept: tuple[fx.Node, ...]
    reduced: fx.Node

    @property
    def group(self) -> Any:
        return self.given["group_name"]

    @property
    def whole(self) -> bool:
        """Whether every rank gets all rows."""
        return self.op.target is _REDUCTIONS[0]

    @property
    def on_gpus(self) -> bool:
        return bool(self.reduced.meta["val"].device.type == "cuda")

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return (self.stages[-1].node, *self.kept)


@dataclass(frozen=True)
class Decision:
    """Whether the op takes a tail. `proof`: as the op has it (`docs/ops.md`)."""

    absorb: bool
    proof: str = ""
    considered: tuple[Considered, ...] = ()


Decide: TypeAlias = Callable[[Candidate], Decision]


@dataclass(frozen=True)
class Tail:
    """What became of the stages behind a reduction. `text`: the absorbed tail, empty if there is none. `end`:
    why the tail ends there, or why there is none. `proof`: as the op has it. `behind`: the tail that was
    found in the graph. `considered`: the schedules that were compared to decide whether it is absorbed."""

    text: str
    end: str
    proof: str = ""
    considered: tuple[Considered, ...] = ()
    behind: str = ""

    @property
    def form(self) -> str:
        by_owners = self.proof not in ("", UNPROVEN)
        return "" if not self.text else "owner" if by_owners else "every"


def absorb_tails(graph: fx.Graph, decide: Decide) -> dict[fx.Node, Tail]:
    """Absorb, in place, the tails for which `decide` says so. Returns for each reduction what became of its
    tail."""
    changing = [n for n in graph.nodes if _changes_memory(n)]
    found: dict[fx.Node, Tail] = {}
    for op in list(graph.nodes):
        val = op.meta.get("val") if op.target in _REDUCTIONS else None
        if isinstance(val, (list, tuple)) and val[0].device.type in ("cpu", "cuda"):
            new, tail = _absorb(op, changing, decide)
            found[new] = tail
    return found


def _changes_memory(n: fx.Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable


def _absorb(op: fx.Node, changing: Sequence[fx.Node], decide: Decide) -> tuple[fx.Node, Tail]:
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
    candidate = _candidate(op, given, walk, steps)
    if candidate.on_gpus and (why := _gpu_gap(candidate)):
        return op, Tail("", why)
    decision = decide(candidate)
    fused, tail = op, Tail("", "")
    if decision.absorb:
        fused, tail = _rewrite(candidate, items, walk, end, decision.proof)
    if not decision.considered:
        return fused, tail
    return fused, replace(tail, considered=decision.considered, behind=candidate.text)


def _gpu_gap(candidate: Candidate) -> str:
    """Why GPU kernels do not apply the tail; empty if they do."""
    op, columns = fused_op(candidate.op), candidate.reduced.meta["val"].shape[-1]
    assert op is not None
    if not isinstance(columns, int) or columns % TAIL_UNIT or columns > MOST_TAIL_COLUMNS:
        return (
            f"GPU kernels apply tails to rows of a multiple of {TAIL_UNIT} and at most {MOST_TAIL_COLUMNS} "
            "values"
        )
    operands = [node.meta["val"] for node in candidate.operands]
    given = dict(candidate.given) | {"tail": candidate.text, "tail_operands": operands}
    return op.gpu_gap(op.arguments(**given))


def _candidate(op: fx.Node, given: dict[str, Any], walk: Walk, steps: Sequence[Step]) -> Candidate:
    words: list[str] = []
    kept: list[fx.Node] = []
    operands: list[fx.Node] = []
    last = walk.item
    for step in steps:
        if any(u not in step.inner for u in readers_of(walk.holders(last))):
            words.append("keep")
            kept.append(last)
        numbers = [f"%{len(operands) + i}" for i in range(len(step.operands))]
        operands += [o.node for o in step.operands]
        words.append(step.text.format(*numbers) + (" keep" if step.returned else ""))
        kept += step.returned
        last = step.node
    text = "; ".join(words)
    parse(text)
    return Candidate(op, given, text, tuple(steps), tuple(operands), tuple(kept), walk.item)


def _rewrite(
    candidate: Candidate, items: dict[object, fx.Node], walk: Walk, end: str, proof: str
) -> tuple[fx.Node, Tail]:
    op, text = candidate.op, candidate.text
    for node in sorted({n for step in candidate.stages for n in walk.cone(step)}):
        op.prepend(node)
    emitter = Emitter(op, walk.shapes)
    try:
        operands = [materialise(emitter, o) for step in candidate.stages for o in step.operands]
        tail = {"tail_operands": operands, "tail": text, "proof": proof}
        fused = emitter.call(op.target, *(dict(candidate.given) | tail).values())
        old = list(candidate.results)
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
