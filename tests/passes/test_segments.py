"""Indices that move segments as a whole are known to be permutations; others like them are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autofuse.passes.graph.permutation import is_permutation

WORLD, LOCAL = 4, 3
Index = Callable[[Tensor, int], Tensor]


def begins(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0) - sizes


def across(vector: Tensor) -> Tensor:
    """From rank by rank to expert by expert."""
    return vector.view(WORLD, LOCAL).t().reshape(-1)


def segment(sizes: Tensor, total: int) -> Tensor:
    return torch.arange(sizes.shape[0]).repeat_interleave(sizes, output_size=total)


def counted(counts: Tensor, total: int) -> Tensor:
    """As torchtitan's dispatcher has it."""
    sizes, starts = across(counts), across(begins(counts))
    s = segment(sizes, total)
    return starts[s] + torch.arange(total) - begins(sizes)[s]


def shifted(counts: Tensor, total: int) -> Tensor:
    """The shift of a segment is repeated."""
    sizes = across(counts)
    shifts = across(begins(counts)) - begins(sizes)
    return torch.arange(total) + shifts.repeat_interleave(sizes, output_size=total)


def chosen(counts: Tensor, total: int) -> Tensor:
    sizes = counts.reshape(WORLD, LOCAL).permute(1, 0).flatten()
    s = torch.repeat_interleave(sizes, output_size=total)
    return (torch.arange(total) - begins(sizes).index_select(0, s)) + across(begins(counts)).index_select(
        0, s
    )


def in_other_orders(counts: Tensor, total: int) -> Tensor:
    """Segments begin where those of another order do."""
    sizes, starts = across(counts), begins(counts)
    s = segment(sizes, total)
    return starts[s] + torch.arange(total) - begins(sizes)[s]


def not_from_their_begin(counts: Tensor, total: int) -> Tensor:
    sizes = across(counts)
    s = segment(sizes, total)
    return across(begins(counts))[s] + torch.arange(total) - sizes.cumsum(0)[s]


def of_other_segments(counts: Tensor, total: int) -> Tensor:
    sizes = across(counts)
    s = segment(counts, total)
    return across(begins(counts))[s] + torch.arange(total) - begins(sizes)[s]


def scaled(counts: Tensor, total: int) -> Tensor:
    sizes = across(counts)
    s = segment(sizes, total)
    return torch.add(across(begins(counts))[s], torch.arange(total), alpha=2) - begins(sizes)[s]


def of_a_part(counts: Tensor, total: int) -> Tensor:
    """Not all of the segments, one of them twice."""
    table = torch.cat([counts.view(WORLD, LOCAL)[1:], counts.view(WORLD, LOCAL)[1:2]])
    starts = torch.cat([begins(counts).view(WORLD, LOCAL)[1:], begins(counts).view(WORLD, LOCAL)[1:2]])
    sizes = table.t().reshape(-1)
    s = segment(sizes, total)
    return starts.t().reshape(-1)[s] + torch.arange(total) - begins(sizes)[s]


def known(fn: Index, counts: Tensor, total: int) -> bool:
    graph = make_fx(lambda c: fn(c, total), tracing_mode="fake")(counts).graph
    (result,) = graph.output_node().all_input_nodes
    return is_permutation(result)


def permutes(fn: Index, counts: Tensor) -> bool:
    total = int(counts.sum())
    found = fn(counts, total)
    return found.shape == (total,) and torch.equal(found.sort().values, torch.arange(total))


CASES = [torch.randint(0, 5, (WORLD * LOCAL,), generator=torch.Generator().manual_seed(i)) for i in range(20)]
CASES += [torch.zeros(WORLD * LOCAL, dtype=torch.int64), torch.ones(WORLD * LOCAL, dtype=torch.int64)]


@pytest.mark.parametrize("fn", [counted, shifted, chosen])
def test_segments_that_move_as_a_whole(fn: Index) -> None:
    assert all(permutes(fn, counts) for counts in CASES)
    assert known(fn, CASES[0], int(CASES[0].sum()))


@pytest.mark.parametrize("fn", [in_other_orders, not_from_their_begin, of_other_segments, scaled])
def test_what_is_no_permutation(fn: Index) -> None:
    assert not all(permutes(fn, counts) for counts in CASES)
    assert not known(fn, CASES[0], int(CASES[0].sum()))


def test_some_segments_alone() -> None:
    table = CASES[0].view(WORLD, LOCAL)
    assert not known(of_a_part, CASES[0], int(table[1:].sum() + table[1].sum()))
