"""The result of a matcher: a `Match` that can rewrite the graph, or a `Reject` with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from autofuse.lowering.cpu import support as cpu
from autofuse.passes.choice.cost_model import Step
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import Shapes, aten, expression, is_reshape, tensor
from autofuse.passes.graph.layout import Size, exact_quotient, prod, same_size
from autofuse.passes.reasons import Reason, Reject
from autofuse.passes.settings import Settings


@dataclass(frozen=True)
class Context:
    """The arguments of a matcher besides the anchor: group, order, site and shapes."""

    group: str | fx.Node
    world: int
    order: str
    site: str
    shapes: Shapes
    taken: frozenset[fx.Node] = frozenset()
    """Matmuls behind an all_gather that reductions are going to take."""
    hands_out: bool = True
    """Whether readers of a product read that of the fused op; else torch multiplies once more for them."""

    @property
    def common(self) -> tuple[str, str, str]:
        """Group, order and site, which end the arguments of every fused op."""
        return str(self.group), self.order, self.site


def context_of(
    anchor: Anchor, world: int, settings: Settings, taken: frozenset[fx.Node] = frozenset()
) -> Context:
    """The context of a collective over `world` ranks."""
    # Not the name of the node: it counts the collectives of a graph, and graphs may break differently on
    # ranks.
    site = (anchor.source if settings.lines else None) or anchor.kind
    return Context(anchor.group, world, settings.order, site, _shapes(anchor, world), taken)


def _shapes(anchor: Anchor, world: int) -> Shapes:
    """Shapes, given that a reduce_scatter, or an all_to_all with equal splits, cuts a dim into equal
    parts."""
    shapes = Shapes()
    source, result = tensor(anchor.input), tensor(anchor.node)
    if anchor.kind == "reduce_scatter" and source is not None and result is not None:
        shapes.assume_cut(expression(source.shape[0]), world, expression(result.shape[0]))
        shapes.assume_alike(anchor.input)
    for splits, val in ((anchor.input_splits, source), (anchor.output_splits, result)):
        sizes = [expression(s) for s in splits]
        if sizes and val is not None and all(same_size(s, sizes[0]) for s in sizes):
            shapes.assume_cut(expression(val.shape[0]), world, sizes[0], own=val.dim() == 1)
    if anchor.kind == "all_to_all":
        _assume_views(anchor, world, shapes)
    return shapes


def _assume_views(anchor: Anchor, world: int, shapes: Shapes) -> None:
    """Views round a collective keep the number of elements: one of `[s, C]` as `[W, s // W, C]` requires that
    `s` is a multiple of `W`."""
    for first, following in ((anchor.input, _above), *((node, _below) for node in anchor.results)):
        part = exact_quotient(_elements(first), world)
        node: fx.Node | None = first
        while node is not None and part is not None:
            if not same_size(_elements(node), world * part):
                shapes.assume_cut(_elements(node), world, part, own=True)
                break
            node = following(node)


def _above(node: fx.Node) -> fx.Node | None:
    return node.all_input_nodes[0] if is_reshape(node) or node.target is aten.clone.default else None


def _below(node: fx.Node) -> fx.Node | None:
    return next(filter(is_reshape, node.users), None)


def _elements(node: fx.Node) -> Size:
    val = tensor(node)
    return 0 if val is None else prod(map(expression, val.shape))


@dataclass(frozen=True)
class Work:
    """The compute of a site, for the cost model."""

    matmuls: tuple[tuple[Size, Size, Size], ...] = ()
    """(M, K, N) of each matmul on one rank."""
    count: Size = 1
    """Number of experts that the rows of a matmul are spread over, of tables that are pooled, or of
    all_reduces without matmuls."""
    bytes_read: Size = 0
    """Bytes that pooling reads."""
    bytes_kept: Size = 0
    """Bytes of extra outputs, such as a gathered tensor that has other users."""
    sent: Size | None = None
    """Bytes of the inputs of all collectives that the op replaces; None for those of the anchor alone."""
    step: Step | None = None


@dataclass(frozen=True)
class Match:
    """A site that a fused op can replace. `apply` inserts the op and lets the users of the collective read
    it."""

    pattern: str
    work: Work
    shapes: Shapes
    apply: Callable[[Emitter], None]
    inputs: tuple[fx.Node, ...]
    """The inputs of the fused op, which must stand after all of them."""
    early: tuple[fx.Node, ...] = ()
    """Other users of the compute, which will read an output of the fused op; they may stand before it."""
    arguments: tuple[Any, ...] | None = None
    """The record of the fused op's arguments, as far as they are known before the rewrite, with tensors from
    the metadata of the graph. `FusedOp.gpu_gap` reads it. None for an op without gaps on GPUs."""
    not_on_gpus: str = ""
    """Why the GPU kernels cannot run the site, if the reason lies in the graph and not in the arguments."""
    remark: str = ""
    """For the report: compute beside the collective that the fused op leaves to torch."""
    takes: tuple[fx.Node, ...] = ()
    """Other collectives that the fused op replaces, too; they stand behind the anchor."""


Found: TypeAlias = "Match | Reject"


def check_dtype(dtype: torch.dtype | None) -> Reject | None:
    """Why the kernels cannot exchange the dtype; None if they can."""
    name = str(dtype).removeprefix("torch.")
    return None if dtype in cpu.DTYPES else Reject(Reason.DTYPE, f"{name} is exchanged")


def values(nodes: Iterable[object]) -> list[torch.Tensor]:
    """The tensors in the metadata of nodes; for None an empty one, which stands for no bias in fused ops."""
    known = (torch.empty(0) if node is None else tensor(node) for node in nodes)
    return [val for val in known if val is not None]


def fill_biases(emitter: Emitter, x: fx.Node, biases: Sequence[fx.Node | None]) -> list[fx.Node]:
    """The biases as fused ops take them: no bias at all, or one for each matmul, empty where it has none."""
    if all(b is None for b in biases):
        return []
    return [b if b is not None else emitter.call(aten.new_empty.default, x, [0]) for b in biases]


def hand_out(emitter: Emitter, fused: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Let the users of `nodes[i]` read output `i` of the fused op."""
    for i, node in enumerate(nodes):
        shape = emitter.shapes.known(node)
        emitter.replace(node, emitter.reshape(emitter.item(fused, i), shape))


def replace_result(emitter: Emitter, anchor: Anchor, result: fx.Node) -> None:
    """Let the users of the collective read `result`."""
    for node in anchor.results:
        emitter.replace(node, result)
