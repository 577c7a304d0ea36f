"""Sums of reductions: trees of additions in which biases and residuals lie between them."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import autofuse

from .dense import group
from .harness import fake_group
from .test_chains import drawn

M, K, N = 6, 4, 3
SHAPES = {"residual": (M, N), "bias": (N,), "row": (1, N), "column": (M, 1), "number": ()}
"""The shapes of operands that are added to reductions."""

Tree: TypeAlias = "str | tuple[Tree, Tree]"
LEAVES = ("reduction", "reduced row", *SHAPES)


def leaves_of(tree: Tree) -> list[str]:
    return [tree] if isinstance(tree, str) else [leaf for side in tree for leaf in leaves_of(side)]


TREES = st.recursive(st.sampled_from(LEAVES), lambda side: st.tuples(side, side), max_leaves=9).filter(
    lambda tree: leaves_of(tree).count("reduction") > 0
)


def operands(tree: Tree, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(M, K)]
    shapes += [SHAPES.get(leaf, (K, N)) for leaf in leaves_of(tree)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def value(tree: Tree, x: Tensor, left: list[Tensor]) -> Tensor:
    """Takes the operands of the leaves from the front of `left`."""
    if isinstance(tree, tuple):
        a = value(tree[0], x, left)
        return a + value(tree[1], x, left)
    operand = left.pop(0)
    if tree in SHAPES:
        return operand
    return funcol.all_reduce((x if tree == "reduction" else x[:1]) @ operand, "sum", group())


def merged(tree: Tree, dtype: torch.dtype = torch.float32) -> tuple[fx.GraphModule, list[Tensor]]:
    args = operands(tree, dtype)
    with torch.no_grad():
        gm = make_fx(lambda x, *rest: value(tree, x, list(rest)), tracing_mode="fake")(*args)
    autofuse.rewrite(gm)
    return gm, args


@drawn(150)
@given(TREES)
@example((("reduction", "bias"), (("reduction", "row"), "residual")))
@example(((("reduction", "bias"), "number"), "reduction"))
def test_all_reductions_of_a_sum_become_one(tree: Tree) -> None:
    """The value stays, as far as one rank can tell: the fake all_reduce returns its input."""
    with fake_group(2):
        gm, args = merged(tree)
        ops = list(
            gm.graph.find_nodes(op="call_function", target=torch.ops.autofuse.matmul_all_reduce.default)
        )
        assert sum(op.args[0][0].meta["val"].shape[0] == M for op in ops) == 1, gm.graph
        for node in gm.graph.nodes:  # shapes are those of what the nodes compute
            if node.target is torch.ops.aten.add.Tensor:
                shapes = [n.meta["val"].shape for n in node.all_input_nodes]
                assert node.meta["val"].shape == torch.broadcast_shapes(*shapes)
        torch.testing.assert_close(gm(*args), value(tree, args[0], args[1:]))


@pytest.mark.parametrize(("dtype", "ops"), [(torch.bfloat16, 1), (torch.float16, 2)])
def test_dtypes(dtype: torch.dtype, ops: int) -> None:
    with fake_group(2):
        gm, _ = merged((("reduction", "bias"), ("reduction", "bias")), dtype)
    assert str(gm.graph).count("autofuse.matmul_all_reduce.default") == ops
