"""What a matcher returns: a `Match` that can rewrite the graph, or a `Reject` with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import fx

from autofuse.lowering.cpu import support as cpu
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import Shapes, aten, expression, tensor
from autofuse.passes.graph.layout import Size, same_size
from autofuse.passes.report import Reason, Reject


@dataclass(frozen=True)
class Context:
    """What the rewrite of one anchor needs besides the anchor."""

    group: str | fx.Node
    world: int
    order: str
    site: str
    shapes: Shapes


def context_of(anchor: Anchor, world: int, order: str) -> Context:
    """The context of a collective over `world` ranks."""
    # Not the node's name, which counts the collectives of one graph: ranks may cut a model into other graphs.
    site = anchor.source or anchor.kind
    return Context(anchor.group, world, order, site, _shapes(anchor, world))


def _shapes(anchor: Anchor, world: int) -> Shapes:
    """Shapes under what a reduce_scatter, or the splits of an all_to_all, imply."""
    shapes = Shapes()
    source, result = tensor(anchor.input), tensor(anchor.node)
    if (
        anchor.kind == "reduce_scatter"
        and anchor.input is not None
        and source is not None
        and result is not None
    ):
        shapes.assume_cut(expression(source.shape[0]), world, expression(result.shape[0]))
        shapes.assume_alike(anchor.input)
    for splits, val in ((anchor.input_splits, source), (anchor.output_splits, result)):
        sizes = [expression(s) for s in splits]
        if sizes and val is not None and all(same_size(s, sizes[0]) for s in sizes):
            shapes.assume_cut(expression(val.shape[0]), world, sizes[0])
    return shapes


@dataclass(frozen=True)
class Work:
    """What the cost model needs: matmul sizes, and bytes read by compute that is no matmul."""

    matmuls: tuple[tuple[Size, Size, Size], ...] = ()
    """(M, K, N) of each matmul on one rank."""
    count: Size = 1
    """Weights that the rows of a matmul are spread over (experts), or tables that are pooled."""
    bytes_read: Size = 0
    bytes_kept: Size = 0
    """Bytes that the fused op must copy besides, such as a gathered tensor that others read."""


@dataclass(frozen=True)
class Match:
    """A legal site. `apply` inserts the fused op and lets the users of the collective read it."""

    pattern: str
    work: Work
    shapes: Shapes
    apply: Callable[[Emitter], None]
    inputs: tuple[fx.Node, ...]
    """What the fused op reads: it can stand only after all of them."""
    early: tuple[fx.Node, ...] = ()
    """Users that may stand before the collective and will read an output of the fused op."""
    not_on_gpus: str = "this op has no kernel for GPUs yet"
    """Why the GPU kernels cannot run it; empty if they can."""


Found: TypeAlias = "Match | Reject"


def check_dtype(dtype: torch.dtype | None) -> Reject | None:
    """The reason if the kernels cannot exchange the dtype."""
    name = str(dtype).removeprefix("torch.")
    return None if dtype in cpu.DTYPES else Reject(Reason.DTYPE, f"{name} is exchanged")


def fill_biases(emitter: Emitter, x: fx.Node, biases: Sequence[fx.Node | None]) -> list[fx.Node]:
    """The biases as the fused ops take them: none at all, or one a matmul, empty where it has none."""
    if all(b is None for b in biases):
        return []
    return [b if b is not None else emitter.call(aten.new_empty.default, x, [0]) for b in biases]


def hand_out(emitter: Emitter, fused: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Let those who read `nodes[i]` read output `i` of the fused op."""
    for i, node in enumerate(nodes):
        shape = emitter.shapes.known(node)
        emitter.replace(node, emitter.reshape(emitter.item(fused, i), shape))


def replace_result(emitter: Emitter, anchor: Anchor, result: fx.Node) -> None:
    """Let everything that reads the result of the collective read `result`."""
    for node in anchor.results:
        emitter.replace(node, result)
