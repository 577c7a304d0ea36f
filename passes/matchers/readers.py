"""Readers: nodes that read the result of a collective through views."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import SPLITS, Shapes, aten, dtype_of, follow, is_cast, is_view
from autofuse.passes.graph.layout import Layout, Size, prod, same_size


@dataclass(frozen=True)
class Reader:
    """`user` reads `view`, which has layout `layout` relative to the result of a collective."""

    user: fx.Node
    view: fx.Node
    layout: Layout


def find_readers(anchor: Anchor, shapes: Shapes, through: torch.dtype | None = None) -> list[Reader]:
    """All nodes that compute with the result of the collective, each with the view that it reads.

    A cast of the result to the dtype `through` counts as a view.
    """
    results = set(anchor.results)
    layouts: dict[fx.Node, Layout | None] = {}
    found: dict[tuple[fx.Node, fx.Node], Reader] = {}

    def layout_of(node: fx.Node) -> Layout | None:
        if node not in layouts:
            followed = follow(node, results.__contains__, shapes, through)
            layouts[node] = None if followed is None else followed.layout
        return layouts[node]

    def moves(user: fx.Node) -> bool:
        """Whether `user` is a view with a layout, or a split whose pieces have layouts."""
        if user.target in SPLITS:
            return all(layout_of(piece) is not None for piece in user.users)
        return (is_view(user) or is_cast(user)) and layout_of(user) is not None

    seen: set[tuple[fx.Node, fx.Node | None]] = set()

    def visit(node: fx.Node, view: fx.Node, unknown: fx.Node | None = None) -> None:
        """`unknown`: a view without a layout between `view` and `node`. Views of it may have layouts
        again."""
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


def find_cast_readers(anchor: Anchor, shapes: Shapes) -> tuple[list[Reader], torch.dtype | None]:
    """The readers. If all of them cast the result to one dtype: the readers of the cast, and the dtype."""
    readers = find_readers(anchor, shapes)
    dtypes = {dtype_of(r.user) if is_cast(r.user) else None for r in readers}
    cast = dtypes.pop() if len(dtypes) == 1 else None
    return (readers if cast is None else find_readers(anchor, shapes, through=cast)), cast


def takes_rows(reader: Reader, whole: tuple[Size, ...]) -> bool:
    """Whether the reader is a view of some of the rows of a result of shape `whole`, or reads such a view."""
    shape = Shapes().of(reader.user) if is_view(reader.user) else reader.layout.shape
    if not shape:  # a split has several results, a number is no row
        return is_view(reader.user)
    return same_size(shape[-1], whole[-1]) and not same_size(prod(shape), prod(whole))


def reread(emitter: Emitter, whole: fx.Node, layout: Layout, readers: Iterable[Reader]) -> None:
    """Let the readers read views of `whole`, which has `layout` relative to the result of the collective."""
    rebuilt: dict[fx.Node, fx.Node] = {}
    for reader in readers:
        view = reader.view
        if view not in rebuilt:
            rebuilt[view] = emitter.rebuild(whole, layout, reader.layout, emitter.shapes.of(view))
        emitter.replace_input(reader.user, view, rebuilt[view])
