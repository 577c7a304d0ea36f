"""What lies between all_reduces is computed on slices: random streams, in one process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autofuse.passes.schedules import split
from autofuse.passes.schedules.joint import reschedule
from autofuse.passes.schedules.layouts import REPLICATED, Input
from autofuse.passes.schedules.schedule import Basis
from tests.passes import lockstep
from tests.passes.harness import fake_group
from tests.passes.test_chains import drawn

from .streams import NAMES, SAME, Drawn, arguments, program, streams

REDUCE = ("reduce", -1, -1)
aten = torch.ops.aten


def traced(stream: Drawn) -> fx.GraphModule:
    with torch.no_grad():
        return make_fx(program(stream), tracing_mode="fake")(*arguments(stream, 0))


def inputs_of(gm: fx.GraphModule, world: int) -> dict[fx.Node, Input]:
    everyone = frozenset(range(world))
    found = {}
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), NAMES, strict=False):
        found[node] = Input(name, ((everyone, REPLICATED),) if name in SAME else ())
    return found


def test_random_streams_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    monkeypatch.setattr(split, "MOST_GATHERED", math.inf)  # also what is legal, but not worth it

    @drawn(250)
    @example(Drawn(4, (1, 4), (REDUCE, ("pairs", -1, -1), ("rms", -1, -1), REDUCE, ("add", -1, -2)), ()))
    @example(Drawn(4, (7,), (REDUCE, ("log", -1, -1), ("rms", -1, -1), ("weigh", -1, -1), REDUCE), (-2,)))
    @given(streams())
    def check(stream: Drawn) -> None:
        with fake_group(stream.world):
            gm = traced(stream)
            args = [arguments(stream, rank) for rank in range(stream.world)]
            before = lockstep.run(gm, args)
            basis = Basis(lambda _: inputs_of(gm, stream.world))
            told = reschedule(gm.graph, basis)
            gm.recompile()
            for ours, theirs in zip(lockstep.run(gm, args), before, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        counts.append(sum(each.reductions for each in told))
        assert all(bool(p.digest) == (t.reductions > 0) for p, t in zip(basis.proofs, told, strict=True))

    check()
    assert sum(count > 0 for count in counts) > len(counts) / 8


@pytest.mark.parametrize(
    ("world", "rows", "padded"), [(2, 7, True), (4, 7, True), (2, 1, False), (4, 5, False)]
)
def test_rows_that_have_no_equal_parts(world: int, rows: int, padded: bool) -> None:
    """They are padded, if that adds little: NaN in the padding reaches no sum over rows, and no result."""
    steps = (REDUCE, ("log", -1, -1), ("weigh", -1, -1), REDUCE, ("mix", -1, -1), ("rms", -1, -1), REDUCE)
    stream = Drawn(world, (rows,), (*steps, ("add", -1, -2)), (-2,))
    with fake_group(world):
        gm = traced(stream)
        args = [arguments(stream, rank) for rank in range(world)]
        before = lockstep.run(gm, args)
        (told,) = reschedule(gm.graph, Basis(lambda _: inputs_of(gm, world)))
        gm.recompile()
        assert told.name == ("split" if padded else "unchanged")
        assert padded or f"its rows cannot be cut into {world} parts" in told.refused[0]
        if padded:  # before a matmul, so that it stays beside the collective
            targets = [node.target for node in gm.graph.nodes]
            scatter = targets.index(torch.ops._c10d_functional.reduce_scatter_tensor.default)
            assert targets[scatter - 2 : scatter] == [aten.constant_pad_nd.default, aten.mm.default]
        for ours, theirs in zip(lockstep.run(gm, args), before, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
