"""Layouts against eager torch: random chains of views, permutes, splits and concatenations."""

from __future__ import annotations

import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autofuse.passes.emit import Emitter
from autofuse.passes.layout import Digit, Layout, common_digits, compose, cut_out, exact_quotient, regroup
from autofuse.passes.trace import Shapes, trace


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


def factors(n: int) -> list[int]:
    return [f for f in range(1, n + 1) if n % f == 0]


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple]]:
    """A shape and a chain of moves, each (name, arguments), that keeps all elements."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    moves: list[tuple] = []
    current = list(shape)
    for _ in range(draw(st.integers(1, 6))):
        name = draw(
            st.sampled_from(["split dim", "merge dims", "permute", "split and cat", "unsqueeze", "clone"])
        )
        rank = len(current)
        if name == "split dim":
            dim = draw(st.integers(0, rank - 1))
            minor = draw(st.sampled_from(factors(current[dim])))
            current[dim : dim + 1] = [current[dim] // minor, minor]
            moves.append(("reshape", tuple(current)))
        elif name == "merge dims" and rank > 1:
            dim = draw(st.integers(0, rank - 2))
            current[dim : dim + 2] = [current[dim] * current[dim + 1]]
            moves.append(("reshape", tuple(current)))
        elif name == "permute":
            order = draw(st.permutations(range(rank)))
            current = [current[i] for i in order]
            moves.append(("permute", tuple(order)))
        elif name == "split and cat":
            dim, to = draw(st.integers(0, rank - 1)), draw(st.integers(0, rank - 1))
            length = draw(st.sampled_from(factors(current[dim])))
            moves.append(("split and cat", dim, length, to))
            count = current[dim] // length
            current[dim] = length
            current[to] *= count
        elif name == "unsqueeze" and rank < 6:
            dim = draw(st.integers(0, rank))
            current.insert(dim, 1)
            moves.append(("reshape", tuple(current)))
        else:
            moves.append(("clone",))
    return shape, moves


def apply(x: Tensor, moves: list[tuple]) -> Tensor:
    for name, *args in moves:
        if name == "reshape":
            x = x.reshape(args[0])
        elif name == "permute":
            x = x.permute(args[0])
        elif name == "split and cat":
            dim, length, to = args
            x = torch.cat(x.split(length, dim), to)
        else:
            x = x.clone()
    return x


def traced_graph(shape: tuple[int, ...], moves: list[tuple]) -> fx.GraphModule:
    """ATen graph of the chain with `meta["val"]`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: apply(x, moves) + 0, tracing_mode="fake")(torch.zeros(shape))


@settings(max_examples=150, deadline=None)
@given(chains())
def test_trace_is_eager(case: tuple[tuple[int, ...], list[tuple]]) -> None:
    shape, moves = case
    numel = torch.Size(shape).numel()
    graph = traced_graph(shape, moves).graph
    end = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0].args[0]
    found = trace(end, lambda n: n.op == "placeholder", Shapes())
    expected = apply(torch.arange(numel).view(shape), moves)
    if found is None:
        # Only views that no list of digits expresses, such as 2x3 -> 3x2 of a permuted tensor.
        assert any(name in ("reshape", "split and cat") for name, *_ in moves)
        return
    assert found.layout.shape == tuple(expected.shape)
    assert torch.equal(source_index(found.layout, shape).expand(expected.shape), expected)


@settings(max_examples=100, deadline=None)
@given(chains())
def test_rebuild_is_eager(case: tuple[tuple[int, ...], list[tuple]]) -> None:
    shape, moves = case
    gm = traced_graph(shape, moves)
    end = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0].args[0]
    found = trace(end, lambda n: n.op == "placeholder", Shapes())
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


@settings(max_examples=100, deadline=None)
@given(chains(), st.data())
def test_compose_is_eager(case: tuple[tuple[int, ...], list[tuple]], data: st.DataObject) -> None:
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


def trace_moves(shape: tuple[int, ...], moves: list[tuple]) -> Layout | None:
    graph = traced_graph(shape, moves).graph
    end = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0].args[0]
    found = trace(end, lambda n: n.op == "placeholder", Shapes())
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
