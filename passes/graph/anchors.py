"""The collectives of a graph. An `Anchor` describes one, whatever the spelling of its arguments."""

from __future__ import annotations

import math
import operator
import os
import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx
from torch.distributed import ProcessGroup

from autofuse.lowering.ops.library import FUSED_OPS, FusedOp
from autofuse.lowering.torch_internals import traced_group

from .follow import WAIT, argument, expression, tensor, value
from .functional import called
from .layout import Size, same_size

c10d = torch.ops._c10d_functional

_KINDS: dict[object, str] = {
    c10d.all_reduce.default: "all_reduce",
    c10d.all_reduce_.default: "all_reduce_",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.all_to_all_single.default: "all_to_all",
    c10d.broadcast.default: "broadcast",
    c10d.all_reduce_coalesced.default: "all_reduce_coalesced",
    c10d.reduce_scatter_tensor_coalesced.default: "reduce_scatter_coalesced",
    c10d.all_gather_into_tensor_coalesced.default: "all_gather_coalesced",
}
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep


# Names of user-defined ops that are collectives, by op; `opaque.py` fills it.
OPAQUE: dict[object, str] = {}

# Metadata key of a functional collective that stands in for a user-defined op. The value: `opaque.Meaning`.
STANDS_FOR = "autofuse_stands_for"


@dataclass(frozen=True)
class Anchor:
    """A collective: `kind` of `input` over `group`."""

    node: fx.Node
    kind: str

    @property
    def name(self) -> str:
        """The name in reports: the kind, or the name of the user-defined op that the node stands in for."""
        meaning = self.node.meta.get(STANDS_FOR)
        return self.kind if meaning is None else meaning.op

    @property
    def problem(self) -> str:
        """Why the group of a user-defined op is not known; empty if it is known."""
        meaning = self.node.meta.get(STANDS_FOR)
        return "" if meaning is None else meaning.problem

    @property
    def input(self) -> fx.Node:
        """The input of a collective that takes one tensor, as every kind with a matcher does."""
        source = self.node.args[0]
        assert isinstance(source, fx.Node)
        return source

    @cached_property
    def group(self) -> str | fx.Node:
        """The name of the group, or the node that yields the group, which may differ between ranks."""
        position = {"all_to_all": 3, "reduce_scatter": 3}.get(self.kind, 2)
        group: str | fx.Node = argument(self.node, position, "group_name")
        return group

    @cached_property
    def known_group(self) -> str | ProcessGroup | None:
        """The name, or the group that the node yielded while the graph was traced; None if unknown."""
        return group_of(self.group)

    @cached_property
    def reduce_op(self) -> str | None:
        op = argument(self.node, 1, "reduce_op") if self.kind in ("all_reduce", "reduce_scatter") else None
        return op.lower() if isinstance(op, str) else None

    @cached_property
    def output_splits(self) -> list[object]:
        """Of an all_to_all: the number of rows that each rank sends to this rank."""
        return self._splits(1, "output_split_sizes")

    @cached_property
    def input_splits(self) -> list[object]:
        """Of an all_to_all: the number of rows that this rank sends to each rank."""
        return self._splits(2, "input_split_sizes")

    def _splits(self, position: int, name: str) -> list[object]:
        splits = argument(self.node, position, name) if self.kind == "all_to_all" else None
        return list(splits) if isinstance(splits, (list, tuple)) else []

    @cached_property
    def even(self) -> bool:
        """Whether an all_to_all sends and receives equal parts."""
        sizes = [expression(s) for s in (*self.input_splits, *self.output_splits)]
        return bool(sizes) and all(same_size(sizes[0], s) for s in sizes)

    @property
    def part(self) -> Size:
        """The number of rows of one part of an even all_to_all."""
        return expression(self.input_splits[0])

    @cached_property
    def waits(self) -> tuple[fx.Node, ...]:
        """The waits for the collective, and waits for those waits."""
        found: list[fx.Node] = []
        work = [self.node]
        while work:
            for user in work.pop().users:
                if user.target is WAIT and user not in found:
                    found.append(user)
                    work.append(user)
        return tuple(found)

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """All nodes that hold the result: the waits and the collective itself."""
        return (*self.waits, self.node)

    @cached_property
    def source(self) -> str | None:
        return source_of(self.node)

    @property
    def nbytes(self) -> int | None:
        """Bytes of the input on this rank at the sizes seen while tracing; None if a size had no value."""
        val = tensor(self.node.args[0]) if self.node.args else None
        sizes = [] if val is None else [hint(s) for s in val.shape]
        if val is None or any(s is None for s in sizes):
            return None
        return math.prod(s for s in sizes if s is not None) * val.element_size()


def group_of(argument: object) -> str | ProcessGroup | None:
    """The group that an argument of a collective or a fused op names, or yielded while the graph was traced;
    None if that is unknown."""
    return argument if isinstance(argument, str) else traced_group(value(argument))


def source_of(node: fx.Node) -> str | None:
    """`file:line` of the user's code, the innermost frame outside torch."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    outside = [f for f in frames if not f[0].startswith((_TORCH, "<"))]
    return ":".join((outside or frames)[-1]) if frames else None


def hint(size: object) -> int | None:
    """The value that a size had while tracing; None if it had none."""
    if isinstance(size, fx.Node):
        size = size.meta.get("val")
    if isinstance(size, torch.SymInt):
        known = size.node.hint
        return None if known is None else int(known)
    return int(size) if isinstance(size, int) else None


def find_anchors(graph: fx.Graph) -> list[Anchor]:
    kinds = {**_KINDS, **OPAQUE}
    return [Anchor(n, kinds[n.target]) for n in graph.nodes if n.op == "call_function" and n.target in kinds]


def is_collective(node: fx.Node) -> bool:
    """Whether the node calls a functional collective, a user-defined collective or a fused op."""
    return node.op == "call_function" and (
        node.target in _KINDS or node.target in OPAQUE or is_fused_op(node)
    )


def is_fused_op(node: fx.Node) -> bool:
    return fused_op(node) is not None


def is_fused(node: fx.Node) -> bool:
    """Whether the node is an output of a fused op."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and is_fused_op(source)


def fused_op(node: fx.Node) -> FusedOp | None:
    """The record of the fused op that the node calls; None if it calls none."""
    op = called(node)
    name = op._schema.name if isinstance(op, torch._ops.OpOverload) else ""
    return FUSED_OPS.get(name.removeprefix("autofuse::")) if name.startswith("autofuse::") else None
