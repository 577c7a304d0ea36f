"""Numbers of rows count from the start before fused ops read them, unless the graph shows that they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import Shapes
from autofuse.passes.graph.row_numbers import from_start

ROWS = 6
SCORES = torch.tensor([[0.1, 0.5, 0.2], [0.9, 0.3, 0.4]])
SIGNED = torch.tensor([0, 5, -1, -6, 3, 2])

Index = Callable[[Tensor, Tensor], Tensor]


def counted(fn: Index) -> tuple[fx.GraphModule, bool]:
    """`fn` with its result counted from the start, and whether nothing had to be done for it."""
    gm = make_fx(fn, tracing_mode="fake")(SCORES, SIGNED)
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    (index,) = output.all_input_nodes
    emitter = Emitter(output, Shapes())
    result = from_start(emitter, index, ROWS)
    output.replace_input_with(index, result)
    gm.recompile()
    return gm, result is index


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, i: s.argsort(-1).view(-1),
        lambda s, i: s.topk(2, -1).indices.flatten()[1:],
        lambda s, i: s.view(-1).sort(stable=True).indices // 2,
        lambda s, i: (s.flatten() > 0.2).nonzero().squeeze(1),
        lambda s, i: torch.arange(6).view(3, 2).t().reshape(-1) + 0 * (s.flatten() > 1),
        lambda s, i: torch.cat([torch.zeros(2, dtype=torch.int64), (i > 0).cumsum(0)[:3]]),
        lambda s, i: torch.where(i > 0, torch.arange(6), torch.full((), 5)),
        lambda s, i: torch.arange(3).repeat_interleave(2),
        lambda s, i: torch.arange(6)[s.view(-1).topk(3).indices] * 1,
    ],
)  # fmt: skip
def test_numbers_that_are_known_to_count_from_the_start(fn: Index) -> None:
    gm, untouched = counted(fn)
    assert untouched
    assert bool((gm(SCORES, SIGNED) >= 0).all())


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, i: i,
        lambda s, i: torch.arange(6) - 6,
        lambda s, i: torch.arange(-3, 3),
        lambda s, i: torch.arange(5, -1, -1) * -1,
        lambda s, i: torch.where(i > 0, torch.arange(6), -1),
        lambda s, i: torch.cat([torch.arange(2), i]),
        lambda s, i: torch.add(torch.arange(3), torch.arange(3), alpha=-1),
        lambda s, i: s.flatten().sort().values.long() - 1,
        lambda s, i: torch.full((3,), -2),
        lambda s, i: i[torch.arange(6)],
    ],
)  # fmt: skip
def test_others_are_counted(fn: Index) -> None:
    gm, untouched = counted(fn)
    table = torch.arange(ROWS)
    assert not untouched
    assert torch.equal(gm(SCORES, SIGNED), table[fn(SCORES, SIGNED)])
