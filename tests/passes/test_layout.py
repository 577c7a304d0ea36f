"""Layouts against eager torch: random chains of views, permutes, splits and concatenations."""

from __future__ import annotations

import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import Shapes, follow
from autofuse.passes.graph.layout import (
    Digit,
    Layout,
    common_digits,
    compose,
    cut_out,
    exact_quotient,
    regroup,
)

from .chains import Step, apply, move, moves
from .oracle import index_of, is_digits, leads_with_a_digit, places


def source_index(layout: Layout, shape: tuple[int, ...]) -> Tensor:
    """The flat index into the source of every element of a tensor with this layout."""
    strides = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    total = torch.zeros([1] * len(layout.dims), dtype=torch.long)
    for i, dim in enumerate(layout.dims):
        axis = torch.zeros(1, dtype=torch.long)
        for d in dim:
            axis = (axis[:, None] + torch.arange(int(d.size)) * int(d.div) * strides[d.dim]).reshape(-1)
        total = total + axis.reshape([-1 if j == i else 1 for j in range(len(layout.dims))])
    return total + sum(i * int(d.div) * strides[d.dim] for d, i in layout.fixed)


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Step]]:
    """A shape and moves that keep all elements."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    return shape, draw(moves(shape, most=6))


def traced_graph(shape: tuple[int, ...], moves: list[Step]) -> fx.GraphModule:
    """ATen graph of the chain with `meta["val"]`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: apply(x, moves) + 0, tracing_mode="fake")(torch.zeros(shape))


def moved(layout: Layout, step: Step) -> Layout | None:
    """The layout after one move."""
    name, *args = step
    if name == "reshape":
        return layout.reshape(args[0])
    if name == "permute":
        return layout.permute(args[0])
    if name == "split and cat":
        dim, length, to = args
        count = int(layout.shape[dim]) // length
        pieces = [p for i in range(count) if (p := layout.piece(dim, i, count)) is not None]
        return Layout.join(pieces, to) if len(pieces) == count else None
    return layout


@settings(max_examples=1500, derandomize=True, database=None)
@given(chains())
def test_layouts_are_all_lists_of_digits(case: tuple[tuple[int, ...], list[Step]]) -> None:
    """A layout has the index of eager, and there is one wherever the index is made of digits."""
    shape, steps = case
    layout, index = Layout.of(shape), index_of(shape)
    for step in steps:
        after, found = move(index, step), moved(layout, step)
        expected = is_digits(after, shape)
        if step[0] == "split and cat" and (count := index.shape[step[1]] // step[2]) > 1:
            expected &= leads_with_a_digit(index, step[1], count, shape)
        assert (found is not None) == expected, (shape, steps, step)
        if found is None:
            return
        assert found.shape == tuple(after.shape)
        assert torch.equal(source_index(found, shape).expand(after.shape), after)
        layout, index = found, after


@settings(max_examples=1000, derandomize=True, database=None)
@given(st.sampled_from([2, 3, 4]), st.data())
def test_cuts_are_all_parts_of_rows_or_columns(world: int, data: st.DataObject) -> None:
    """The leading digit can be cut out of a matrix exactly if the parts are those of some (dim, outer)."""
    shape = (world * data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 4, 6, world])))
    steps = data.draw(moves(shape))
    index, layout = apply(index_of(shape), steps).reshape(world, -1), Layout.of(shape)
    for step in (*steps, ("reshape", tuple(index.shape))):
        found = moved(layout, step)
        if found is None:
            return
        layout = found
    cut = cut_out(Layout.of(shape), layout.dims[0][0]) if len(layout.dims[0]) == 1 else None
    expected = places(index, shape)
    assert (cut is not None) == bool(expected), (shape, steps)
    assert cut is None or (cut.dim, cut.outer) in expected


@settings(max_examples=150)
@given(chains())
def test_trace_is_eager(case: tuple[tuple[int, ...], list[Step]]) -> None:
    shape, moves = case
    numel = torch.Size(shape).numel()
    graph = traced_graph(shape, moves).graph
    end = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0].args[0]
    found = follow(end, lambda n: n.op == "placeholder", Shapes())
    expected = apply(torch.arange(numel).view(shape), moves)
    if found is None:
        # Only views that no list of digits expresses, such as 2x3 -> 3x2 of a permuted tensor.
        assert any(name in ("reshape", "split and cat") for name, *_ in moves)
        return
    assert found.layout.shape == tuple(expected.shape)
    assert torch.equal(source_index(found.layout, shape).expand(expected.shape), expected)


@settings(max_examples=100)
@given(chains())
def test_rebuild_is_eager(case: tuple[tuple[int, ...], list[Step]]) -> None:
    shape, moves = case
    gm = traced_graph(shape, moves)
    end = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0].args[0]
    found = follow(end, lambda n: n.op == "placeholder", Shapes())
    if found is None:
        return
    start = gm.graph.find_nodes(op="placeholder")[0]
    output = gm.graph.output_node()
    rebuilt = Emitter(output, Shapes()).rebuild(start, Layout.of(shape), found.layout)
    output.args = (rebuilt,)
    gm.recompile()
    x = torch.randn(shape)
    assert torch.equal(gm(x), apply(x, moves))
    assert tuple(rebuilt.meta["val"].shape) == tuple(gm(x).shape)


@settings(max_examples=100)
@given(chains(), st.data())
def test_compose_is_eager(case: tuple[tuple[int, ...], list[Step]], data: st.DataObject) -> None:
    shape, moves = case
    half = data.draw(st.integers(0, len(moves)))
    middle = apply(torch.zeros(shape), moves[:half])
    inner = trace_moves(shape, moves[:half])
    outer = trace_moves(tuple(middle.shape), moves[half:])
    if inner is None or outer is None:
        return
    composed = compose(outer, inner)
    if composed is not None:
        expected = apply(torch.arange(torch.Size(shape).numel()).view(shape), moves)
        assert torch.equal(source_index(composed, shape).expand(expected.shape), expected)


def trace_moves(shape: tuple[int, ...], moves: list[Step]) -> Layout | None:
    graph = traced_graph(shape, moves).graph
    end = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0].args[0]
    found = follow(end, lambda n: n.op == "placeholder", Shapes())
    return None if found is None else found.layout


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 4), st.integers(1, 3))
def test_cut_out(outer: int, world: int, inner: int, columns: int) -> None:
    layout = Layout.of((outer * world * inner, columns))
    cut = cut_out(layout, Digit(0, inner, world))
    assert cut is not None
    assert (cut.dim, cut.outer) == (0, outer)
    assert cut.rest.shape == (outer * inner, columns)


def test_symbolic_sizes() -> None:
    s = sympy.Symbol("s", integer=True, positive=True)
    assert exact_quotient(16 * s, 4) == 4 * s
    assert exact_quotient(s, 4) is None
    batch = Layout.of((16 * s, 8)).reshape((s, 16, 8))
    assert batch is not None
    pieces = [batch.piece(1, i, 4) for i in range(4)]
    joined = Layout.join([p for p in pieces if p is not None], 0)
    assert joined is not None
    assert joined.shape == (4 * s, 4, 8)
    leading = regroup(joined.dims[0], (4, s))
    assert leading is not None
    cut = cut_out(Layout.of((16 * s, 8)), leading[0][0])
    assert cut is not None
    assert (cut.dim, cut.outer) == (0, s)


def test_what_is_no_list_of_digits() -> None:
    assert Layout.of((2, 3)).permute((1, 0)).reshape((2, 3)) is None
    assert common_digits(Layout.of((4,)).digits, Layout.of((6,)).digits) is None
    pieces = [Layout.of((4,)).piece(0, i, 2) for i in (1, 0)]
    assert Layout.join([p for p in pieces if p is not None], 0) is None


def test_values_of_new_nodes_are_fake() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    out = graph.output(x)
    with FakeTensorMode() as mode:
        x.meta["val"] = mode.from_tensor(torch.zeros(4, 6))
    node = Emitter(out, Shapes()).call(torch.ops.aten.permute.default, x, [1, 0])
    assert node.meta["val"].shape == (6, 4)
    assert node.meta["val"].fake_mode is mode
