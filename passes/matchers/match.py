"""What a matcher returns: a `Match` that can rewrite the graph, or a `Reject` with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import fx

from autofuse.native_kernels import cpu
from autofuse.passes.graph.anchors import Anchor, is_collective
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import SPLITS, Shapes, aten, dtype_of, is_cast, is_view, trace
from autofuse.passes.graph.layout import Layout, Size
from autofuse.passes.report import Reason

from .product import Product, Reject, between


@dataclass(frozen=True)
class Context:
    """What the rewrite of one anchor needs besides the anchor."""

    group: str | fx.Node
    world: int
    order: str
    site: str
    shapes: Shapes


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
        shape = emitter.shapes.of(node)
        assert shape is not None
        emitter.replace(node, emitter.reshape(emitter.item(fused, i), shape))


@dataclass(frozen=True)
class Reader:
    """`user` reads `view`, of layout `layout` relative to the result of a collective."""

    user: fx.Node
    view: fx.Node
    layout: Layout


def find_readers(anchor: Anchor, shapes: Shapes, through: torch.dtype | None = None) -> list[Reader]:
    """Everything that computes with the result of the collective, and the view of it that it reads.

    A cast of the result to the dtype `through` counts as a view.
    """
    results = set(anchor.results)
    layouts: dict[fx.Node, Layout | None] = {}
    found: dict[tuple[fx.Node, fx.Node], Reader] = {}

    def layout_of(node: fx.Node) -> Layout | None:
        if node not in layouts:
            traced = trace(node, results.__contains__, shapes, through)
            layouts[node] = None if traced is None else traced.layout
        return layouts[node]

    def moves(user: fx.Node) -> bool:
        """Is `user` a view that can be followed (a split is, if its pieces are)?"""
        if user.target in SPLITS:
            return all(layout_of(piece) is not None for piece in user.users)
        return (is_view(user) or is_cast(user)) and layout_of(user) is not None

    seen: set[tuple[fx.Node, fx.Node | None]] = set()

    def visit(node: fx.Node, view: fx.Node, unknown: fx.Node | None = None) -> None:
        """`unknown`: a view without a layout between `view` and `node`; views of it may have one again."""
        for user in node.users:
            if user in results or user.target is aten.sym_size.int:
                continue
            known, reader = moves(user), unknown or user
            if known or is_view(user):
                entry = (user, None if known else reader)
                if entry not in seen:
                    seen.add(entry)
                    visit(user, user if known and user.target not in SPLITS else view, entry[1])
            else:
                layout = layout_of(view)
                assert layout is not None
                found[reader, view] = Reader(reader, view, layout)

    for result in anchor.results:
        visit(result, result)
    return list(found.values())


def only_cast(readers: list[Reader]) -> torch.dtype | None:
    """The dtype that everyone who reads the result casts it to."""
    dtypes = {dtype_of(r.user) if is_cast(r.user) else None for r in readers}
    return dtypes.pop() if len(dtypes) == 1 else None


def reread(emitter: Emitter, whole: fx.Node, layout: Layout, readers: Iterable[Reader]) -> None:
    """Let the readers read views of `whole`, which has `layout` on the result of the collective."""
    rebuilt: dict[fx.Node, fx.Node] = {}
    for reader in readers:
        view = reader.view
        if view not in rebuilt:
            rebuilt[view] = emitter.rebuild(whole, layout, reader.layout, emitter.shapes.of(view))
        emitter.replace_input(reader.user, view, rebuilt[view])


def depends_on(anchor: Anchor, nodes: Iterable[fx.Node]) -> fx.Node | None:
    """The first of `nodes` that is computed from the collective's result."""
    seen: set[fx.Node] = set()

    def reaches(node: fx.Node) -> bool:
        if node is anchor.node:
            return True
        if node in seen or node < anchor.node:
            return False
        seen.add(node)
        return any(reaches(i) for i in node.all_input_nodes)

    return next((n for n in nodes if reaches(n)), None)


def collective_above(node: fx.Node, first: fx.Node) -> fx.Node | None:
    """A collective behind `first` that `node` is computed from."""
    seen: set[fx.Node] = set()
    work = [node]
    while work:
        n = work.pop()
        if n in seen or not first < n:
            continue
        if is_collective(n):
            return n
        seen.add(n)
        work.extend(n.all_input_nodes)
    return None


def outside_reader(anchor: Anchor, leaves: Sequence[fx.Node]) -> fx.Node | None:
    """Who besides the collective reads one of `leaves` or what lies between them and the collective."""
    inside: set[fx.Node] = set()
    work = [anchor.input]
    while work:
        node = work.pop()
        if node is not None and node not in inside:
            inside.add(node)
            if node not in leaves:
                work.extend(node.all_input_nodes)
    return next((u for n in inside for u in n.users if u not in inside and u is not anchor.node), None)


def extra_users(end: fx.Node, source: fx.Node, found: Product) -> tuple[fx.Node, ...]:
    """Who else reads finished products, themselves or views of them on their way to `end`."""
    path = {found.last} | between(source, found.last)
    for head, _ in found.heads:
        path |= {head} | between(source, head)
    users = {u: None for n in sorted(path) for u in n.users}
    return tuple(u for u in users if u not in path and u is not end)


def replace_result(emitter: Emitter, anchor: Anchor, result: fx.Node) -> None:
    """Let everything that reads the result of the collective read `result`."""
    for node in anchor.results:
        emitter.replace(node, result)
