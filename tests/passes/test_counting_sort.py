"""Sorts of rows by their experts that become sums over counts."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autofuse.passes import counting_sort
from autofuse.passes.counting_sort import count_to_sort
from autofuse.passes.graph.permutation import is_permutation

aten, prims = torch.ops.aten, torch.ops.prims


def order(counts: Tensor, size: int, experts: int, start: int = 0, descending: bool = False) -> Tensor:
    """Of rows that came rank by rank: `counts: [ranks * experts]`."""
    options = {"dtype": torch.int64, "device": counts.device, "requires_grad": False}
    numbers = prims.iota.default(experts, start=start, step=1, **options).repeat(len(counts) // experts)
    rows = aten.repeat_interleave.Tensor(counts, output_size=size)
    return aten.sort.stable(numbers[rows], stable=True, descending=descending)[1]


def replaced(counts: Tensor, *how: int) -> tuple[fx.GraphModule, bool]:
    """The program behind the pass, and whether the pass has changed it."""
    size = int(counts.sum())
    found = make_fx(lambda c: order(c, size, *how), tracing_mode="fake")(counts)
    with patch.object(counting_sort, "find_anchors", lambda _: [type("", (), {"kind": "all_to_all"})]):
        count_to_sort(found.graph)
    found.graph.eliminate_dead_code()
    found.recompile()
    return found, not list(found.graph.find_nodes(op="call_function", target=aten.sort.stable))


@given(st.integers(1, 5), st.data())
def test_the_same_order(experts: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    drawn = data.draw(st.lists(st.integers(0, 4), min_size=ranks * experts, max_size=ranks * experts))
    counts = torch.tensor(drawn)
    found, changed = replaced(counts, experts)
    assert changed
    assert torch.equal(found(counts), order(counts, int(counts.sum()), experts))
    (result,) = found.graph.output_node().all_input_nodes
    assert is_permutation(result)


@pytest.mark.parametrize("how", [(1, False), (0, True)])
def test_other_sorts_stay(how: tuple[int, bool]) -> None:
    counts = torch.tensor([1, 2, 0, 3])
    found, changed = replaced(counts, 2, *how)
    assert not changed
    assert torch.equal(found(counts), order(counts, 6, 2, *how))
