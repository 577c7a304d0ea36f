"""Whole models on real ranks: split schedules against eager, and what ranks that disagree do."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autofuse
from autofuse.passes.choice.device_table import shipped
from tests.ops.dense import seeded
from tests.passes.chains import ReduceBackward, ReduceForward
from tests.passes.harness import passes_only
from tests.ranks import RankPool

from .model import Transformer, loss_of, transformer

Ranks = Callable[[int], RankPool]
OPTIONS = {"policy": "always", "schedule": "split"}
MATMULS = 4
"""All_reduces of the forward; the backward has as many."""


def tokens_of(shape: tuple[int, int]) -> Tensor:
    return torch.randint(0, 24, shape, generator=torch.Generator().manual_seed(5))


def trained(
    model: nn.Module, tokens: Tensor, schedule: str | None, prefer: str = "time"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, eagerly or under a schedule."""
    torch._dynamo.reset()
    backend = passes_only(policy="always", schedule=schedule, prefer=prefer)
    step = loss_of if schedule is None else torch.compile(loss_of, backend=backend)
    model.zero_grad()
    loss = step(model, tokens)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _train(rank: int, world: int, shape: tuple[int, int], norm: str) -> None:
    model, tokens = transformer(rank, world, getattr(nn, norm)), tokens_of(shape)
    loss, expected = trained(model, tokens, None)
    saved = []
    # First without a declaration: what is compiled then must not be found again.
    for declared in (False, True):
        if declared:
            autofuse.replicated(model, parameters=Transformer.SAME, inputs=["tokens"], gradients=True)
        with autofuse.debug() as report:
            found, grads = (
                trained(model, tokens, "auto", "memory") if declared else trained(model, tokens, "split")
            )
        saved.append(report.graphs[0].saved_bytes)
        torch.testing.assert_close(found, loss)
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)
        (told,) = report.graphs[0].schedules
        kinds = [site.pattern for site in report.fused]
        if declared:
            assert (told.name, told.reductions, told.gathers, told.refused) == (
                "split",
                2 * MATMULS,
                2 * MATMULS + 1,
                (),
            )
            assert kinds.count("matmul_reduce_scatter") == 2 * MATMULS
            assert kinds.count("all_gather_matmul") == 2 * MATMULS
        else:
            assert told.name == "unchanged"
            assert "autofuse.replicated(model" in told.refused[0]
            assert kinds.count("matmul_all_reduce") == 2 * MATMULS
    whole, sliced = saved
    assert 0 < sliced < whole


@pytest.mark.parametrize(
    ("world", "shape", "norm"),
    [
        (2, (1, 6), "RMSNorm"),
        (2, (3, 8), "LayerNorm"),
        (2, (1, 7), "LayerNorm"),
        pytest.param(4, (1, 7), "RMSNorm", marks=pytest.mark.full),
        pytest.param(2, (5, 3), "RMSNorm", marks=pytest.mark.full),
        pytest.param(4, (4, 3), "RMSNorm", marks=pytest.mark.full),
    ],
)
def test_training(ranks: Ranks, world: int, shape: tuple[int, int], norm: str) -> None:
    ranks(world).run(_train, shape, norm, timeout=120)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.up, self.down = nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(ReduceBackward.apply(self.norm(x))).relu()
        return x + ReduceForward.apply(self.down(h), "sum")


def _returned(rank: int, world: int) -> list[str]:
    """The fused ops of the backward of a graph that returns the stream, not a loss."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    model, grads = nn.Sequential(_Block(), _Block()), []
    autofuse.replicated(model, parameters=["*.norm.*"], inputs=["input"], gradients=True)
    with autofuse.debug() as report:
        for call in (model, torch.compile(model, backend=passes_only(schedule="split"))):
            x = seeded(1, 4, 16).requires_grad_()
            model.zero_grad()
            (call(x) * seeded(2, 4, 16)).sum().backward()
            grads.append([x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6)
    kinds = {graph.name: graph.kind for graph in report.graphs}
    return [str(site.pattern) for site in report.fused if kinds[site.graph] == "backward"]


def test_a_backward_runs_no_reduction_of_its_forward(ranks: Ranks) -> None:
    """The gradient of the result is cut, and what torch finds behind the cut it puts into the backward."""
    for fused in ranks(2).run(_returned, timeout=120):
        assert fused.count("matmul_reduce_scatter") == 2


def _any_lengths(rank: int, world: int, lengths: list[int]) -> list[tuple[str, int, int]]:
    """Losses and gradients at several numbers of tokens: of each graph the schedule, how many all_reduces of
    its forward and backward scatter, and how many of these are fused."""
    torch._dynamo.reset()
    model = transformer(rank, world)
    autofuse.replicated(model, parameters=Transformer.SAME, inputs=["tokens"], gradients=True)
    backend = passes_only(policy="always", schedule="split")
    step = torch.compile(loss_of, backend=backend, dynamic=True)
    with autofuse.debug() as report:
        for length in lengths:
            tokens = tokens_of((1, length))
            model.zero_grad()
            loss = loss_of(model, tokens)
            loss.backward()
            expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            found = step(model, tokens)
            found.backward()
            torch.testing.assert_close(found, loss)
            for name, p in model.named_parameters():
                if name in expected:
                    torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    found = []
    for graph in report.graphs:
        fused = [site.pattern for site in report.fused if site.graph == graph.name]
        if graph.schedules:
            assert graph.saved_bytes
            (told,) = graph.schedules
            found.append((told.name, told.reductions, fused.count("matmul_reduce_scatter")))
    return found


@pytest.mark.parametrize(
    ("world", "lengths", "graphs"),
    [
        (2, [4, 5, 6, 7], 2),
        pytest.param(4, [9, 8, 20, 7, 3, 2], 3, marks=pytest.mark.full),
    ],
)
def test_lengths_that_are_symbols(ranks: Ranks, world: int, lengths: list[int], graphs: int) -> None:
    """One graph serves all multiples of the number of ranks, one all other numbers, and one fewer rows than
    ranks."""
    for told in ranks(world).run(_any_lengths, lengths, timeout=240):
        assert told == [("split", 2 * MATMULS, MATMULS)] * graphs


EVERYTHING, NORMS, NOTHING = Transformer.SAME, ("*norm*",), ()


def _forms(rank: int, world: int, schedule: str, declared: tuple[str, ...]) -> list[str]:
    """The forms of the tails of a forward and a backward, which compute what eager does."""
    torch._dynamo.reset()
    model, tokens = transformer(rank, world), tokens_of((2, 3))
    loss, expected = trained(model, tokens, None)
    if declared:
        autofuse.replicated(model, parameters=declared, inputs=["tokens"])
    with autofuse.debug() as report:
        found, grads = trained(model, tokens, schedule)
    torch.testing.assert_close(found, loss)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    return [site.tail_form for site in report.graphs[0].sites]


@pytest.mark.parametrize(
    ("schedule", "declared", "form"),
    [
        ("owner", EVERYTHING, "owner"),
        ("owner", NORMS, "every"),  # of residuals nothing is known
        ("owner", NOTHING, "every"),
        ("every", EVERYTHING, "every"),
        ("unchanged", EVERYTHING, ""),
    ],
)
def test_forms_of_tails(ranks: Ranks, schedule: str, declared: tuple[str, ...], form: str) -> None:
    for forms in ranks(2).run(_forms, schedule, declared, timeout=120):
        assert forms == [form] * MATMULS


def _auto(rank: int, world: int, table: str) -> tuple[str, list[str]]:
    """An odd number of tokens under `auto`, by a table in which the ops that split needs cost least."""
    torch._dynamo.reset()
    model, tokens = transformer(rank, world), tokens_of((1, 7))
    autofuse.replicated(model, parameters=Transformer.SAME, inputs=["tokens"])
    options = {"policy": "always", "table": table}
    with torch.no_grad(), autofuse.debug() as report:
        found = torch.compile(model, backend="autofuse", options=options)(tokens)
        torch.testing.assert_close(found, model(tokens), rtol=1e-4, atol=1e-5)
    (graph,) = report.graphs
    (told,) = graph.schedules
    return told.name, [site.pattern or "" for site in graph.sites if site.fused]


def test_auto_splits_what_is_predicted_to_gain(ranks: Ranks, tmp_path: Path) -> None:
    quick = dict.fromkeys(("fused.reduce_scatter.2.start_us", "fused.all_gather.2.start_us"), 1.0)
    cpu = next(table for table in shipped() if table.device == "cpu")
    table = tmp_path / "table.json"
    table.write_text(replace(cpu, constants={**cpu.constants, **quick}).to_json())
    for name, fused in ranks(2).run(_auto, str(table), timeout=120):
        assert name == "split"
        assert fused == ["matmul_reduce_scatter", "all_gather_matmul"] * MATMULS


def _declared_wrongly(rank: int, world: int) -> list[str]:
    model, tokens = transformer(rank, world), tokens_of((2, 4))
    torch._dynamo.reset()
    autofuse.replicated(model, parameters=Transformer.SAME, inputs=["tokens"], check_every=2)
    compiled = torch.compile(model, backend="autofuse", options=OPTIONS)
    told = []
    with torch.no_grad():
        for call in range(4):
            if call == 1 and rank == 1:
                model.blocks[0].norm2.weight += 1
            try:
                compiled(tokens)
                told.append("")
            except RuntimeError as error:
                told.append(str(error))
    return told


def test_values_that_differ_raise_on_all_ranks(ranks: Ranks) -> None:
    for told in ranks(2).run(_declared_wrongly, timeout=120):
        assert told[:2] == ["", ""]  # it is compared in every second call
        assert "blocks.0.norm2.weight was declared to be the same on all ranks" in told[2]
        assert "rank 1 of the group has other values than rank 0" in told[2]


def _found_in_the_cache(rank: int, world: int, directory: str) -> tuple[list[str], int]:
    """What two compilations raise, of which the second one finds the code of the first, and its hits."""
    torch._inductor.config.cpp_cache_precompile_headers = False  # which takes longer than the code does
    model, tokens = transformer(rank, world), tokens_of((2, 4))
    autofuse.replicated(model, parameters=Transformer.SAME, inputs=["tokens"])
    told, counters = [], torch._dynamo.utils.counters
    with torch.no_grad(), patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=f"{directory}/{rank}"):
        for differs in (False, True):
            torch._dynamo.reset()
            counters.clear()
            if differs and rank == 1:
                model.blocks[0].norm2.weight += 1
            try:
                torch.compile(model, backend="autofuse", options=OPTIONS | {"schedule": "owner"})(tokens)
                told.append("")
            except RuntimeError as error:
                told.append(str(error))
    return told, counters["inductor"]["fxgraph_cache_hit"]


@pytest.mark.full
def test_values_are_compared_where_the_code_was_in_the_cache(ranks: Ranks, tmp_path: Path) -> None:
    for told, hits in ranks(2).run(_found_in_the_cache, str(tmp_path), timeout=120):
        assert hits == 1
        assert told[0] == ""
        assert "blocks.0.norm2.weight was declared to be the same on all ranks" in told[1]


def _other_constants(rank: int, world: int, constants: list[float], declaring: list[int]) -> tuple[str, str]:
    """A constant that only the code of a rank knows."""
    torch._dynamo.reset()
    model, tokens = transformer(rank, world), tokens_of((2, 4))
    constant = constants[rank]

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, tokens: Tensor) -> Tensor:
            h = model.words(tokens)
            for block in model.blocks:
                h = block(h) + constant
            return model.head(model.norm(h))

    shifted = Shifted()
    names = [f"inner.{name}" for name in ("words.*", "*norm*", "head.*")]
    if rank in declaring:
        autofuse.replicated(shifted, parameters=names, inputs=["tokens"])
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autofuse.agreeing").addHandler(handler)
    with torch.no_grad(), autofuse.debug() as report:
        found = torch.compile(shifted, backend="autofuse", options=OPTIONS)(tokens)
        torch.testing.assert_close(found, shifted(tokens), rtol=1e-4, atol=1e-5)
    logging.getLogger("autofuse.agreeing").removeHandler(handler)
    return report.graphs[0].schedules[0].name, "".join(warnings)


@pytest.mark.parametrize(
    ("constants", "declaring", "names"),
    [
        ([0.5, 0.5], [0, 1], ["split", "split"]),
        ([0.5, 0.75], [0, 1], ["split", "split"]),
        ([0.5, 0.5], [1], ["unchanged", "split"]),
    ],
    ids=["equal", "another constant", "one rank declares"],
)
def test_ranks_agree_first(
    ranks: Ranks, constants: list[float], declaring: list[int], names: list[str]
) -> None:
    found = ranks(2).run(_other_constants, constants, declaring, timeout=120)
    assert [name for name, _ in found] == names
    agree = constants[0] == constants[1] and declaring == [0, 1]
    for _, warning in found:
        assert ("its ranks have different constants" in warning) != agree
