"""Training of tables whose backward has the optimizer in it: on real ranks, compiled, fused and not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autofuse
from tests.ranks import RankPool

from .harness import fake_group, passes_only
from .recommendation import DIM, FORWARD, ROWS, exchange, tables

Ranks = Callable[[int], RankPool]

UPDATE = "all_to_all_embedding_bag_update"
STEPS, EPS = 4, 1e-6


class Model(nn.Module):
    """Tables whose exchanged bags feed a matmul; `build`: as the programs of `recommendation`."""

    def __init__(self, build: Callable[..., Any], world: int, rank: int) -> None:
        super().__init__()
        self.bags, self.inputs = build(world, rank)
        width = self.bags(*self.inputs).flatten(1).shape[1]
        torch.manual_seed(7)
        self.dense = nn.Linear(width, 3)

    def forward(self, *inputs: list[Tensor]) -> Tensor:
        return self.dense(self.bags(*inputs).flatten(1))


def rate(step: int) -> float:
    return 0.1 * (step + 1)


def inputs_at(model: Model, step: int) -> tuple[list[Tensor], ...]:
    """Some rows are hot, and some bags empty."""
    indices, offsets, weights = model.inputs
    indices = [torch.where(i % 5 < 2, 3, (i * (2 * step + 1) + step) % ROWS) for i in indices]
    empty = [torch.cat([o[:1], o[2:3], o[2:]]) for o in offsets]
    return indices, empty, weights


def run(model: Model, step: Callable[..., Tensor], number: int) -> None:
    torch.manual_seed(number)
    out = step(*inputs_at(model, number))
    model.dense.zero_grad()
    out.backward(torch.randn(out.shape).to(out.dtype))
    with torch.no_grad():
        for parameter in model.dense.parameters():
            parameter -= 0.1 * parameter.grad


def by_hand(model: Model, rowwise: bool) -> list[Tensor]:
    """Dense gradients, and in fp64 what becomes of the tables."""
    bags = [m for m in model.modules() if isinstance(m, nn.EmbeddingBag)]
    sums = [torch.zeros(len(b.weight), dtype=torch.float64) for b in bags]
    for number in range(STEPS):
        run(model, model, number)
        for bag, s in zip(bags, sums, strict=True):
            assert bag.weight.grad is not None
            grad, lr = bag.weight.grad.double(), torch.tensor(rate(number)).double()
            touched = grad.any(1)
            s += grad.square().mean(1)
            step = lr / (s.sqrt() + EPS) if rowwise else lr.expand(len(s))
            moved = bag.weight.double() - step[:, None] * grad
            bag.weight.data = torch.where(touched[:, None], moved, bag.weight.double()).to(bag.weight.dtype)
            bag.weight.grad = None
    return [*model.parameters(), *sums] if rowwise else list(model.parameters())


def updated(model: Model, rowwise: bool, how: dict[str, Any] | None) -> list[Tensor]:
    bags = [m for m in model.modules() if isinstance(m, nn.EmbeddingBag)]
    optimizer = autofuse.RowwiseAdagrad(rate(0), EPS) if rowwise else autofuse.SGD(rate(0))
    autofuse.optimizer_in_backward(bags, optimizer)
    places = [b.weight.data_ptr() for b in bags]
    step = compiled(model, how)
    for number in range(STEPS):
        optimizer.lr = rate(number)
        run(model, step, number)
    assert all(b.weight.grad is None for b in bags)
    assert places == [b.weight.data_ptr() for b in bags]
    states = [b.table_state for b in bags] if rowwise else []
    return [*model.parameters(), *states]


def compiled(model: nn.Module, how: dict[str, Any] | None) -> Callable[..., Tensor]:
    """By torch.compile with `how`; a backend of None is the graph that Inductor would compile."""
    if how is None:
        return model
    if how["backend"] is None:
        how = {**how, "backend": passes_only(**how["options"]), "options": None}
    step: Callable[..., Tensor] = torch.compile(model, **how)
    return step


def train(rank: int, world: int, options: dict[str, Any], rowwise: bool, how: dict[str, Any] | None) -> Any:
    torch._dynamo.reset()
    expected = by_hand(Model(tables(**options), world, rank), rowwise)
    with autofuse.debug() as report:
        found = updated(Model(tables(**options), world, rank), rowwise, how)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-5)
    return [site.pattern if site.fused else site.detail for site in report.sites]


AUTOFUSE: dict[str, Any] = {"backend": "autofuse", "options": {"policy": "always"}}
GRAPH: dict[str, Any] = {**AUTOFUSE, "backend": None}
CASES: dict[str, dict[str, Any]] = {
    "flat": {"how": "flat"},
    "rows": {"how": "rows", "dims": [4, 8, 20]},
    "mean, padding, last offset": {
        "how": "rows", "mode": "mean", "padding_idx": 3, "include_last_offset": True,
    },
    "weighted, int32": {"how": "flat", "weighted": True, "index": torch.int32},
    "stacked": {"how": "stacked_tables_first"},
    "uneven": {"how": "uneven"},
}  # fmt: skip
GENERATED = ("flat", "rows")
"""Compiled to the end in the fast tier, too."""


def _tiers(cases: Sequence[str]) -> list[Any]:
    """Each case with both rules, which take turns in the fast tier."""
    return [
        pytest.param(case, rowwise, marks=[] if rowwise == bool(i % 2) else pytest.mark.full)
        for i, case in enumerate(cases)
        for rowwise in (False, True)
    ]


@pytest.mark.parametrize(("name", "rowwise"), _tiers(list(CASES)))
def test_fused(ranks: Ranks, name: str, rowwise: bool) -> None:
    how = AUTOFUSE if name in GENERATED else GRAPH
    found = ranks(2).run(train, CASES[name], rowwise, how, timeout=200)
    assert found == [[FORWARD, UPDATE]] * 2


@pytest.mark.full
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_generated(ranks: Ranks, name: str, rowwise: bool) -> None:
    found = ranks(2).run(train, CASES[name], rowwise, AUTOFUSE, timeout=200)
    assert found == [[FORWARD, UPDATE]] * 2


@pytest.mark.parametrize(("order", "rowwise"), _tiers(["ring", "oblivious"]))
def test_orders(ranks: Ranks, order: str, rowwise: bool) -> None:
    how = {**GRAPH, "options": {"policy": "always", "order": order}}
    found = ranks(4).run(train, {"how": "rows", "dims": [8, 4]}, rowwise, how, timeout=200)
    assert found == [[FORWARD, UPDATE]] * 4


@pytest.mark.parametrize("how", [None, {"backend": "inductor"}], ids=["eager", "inductor"])
def test_unfused(ranks: Ranks, how: dict[str, Any] | None) -> None:
    found = ranks(2).run(train, CASES["mean, padding, last offset"], True, how, timeout=200)
    assert found == [[]] * 2


def test_cast_on_the_wire(ranks: Ranks) -> None:
    found = ranks(2).run(train, {"how": "rows_wire_bf16"}, True, GRAPH, timeout=200)
    assert found == [[FORWARD, UPDATE]] * 2


def test_sizes_that_vary(ranks: Ranks) -> None:
    how = {**GRAPH, "dynamic": True}
    assert ranks(2).run(train, CASES["rows"], True, how, timeout=200) == [[FORWARD, UPDATE]] * 2


def test_explained_without_an_update() -> None:
    with fake_group(2):
        model = Model(tables("rows"), 2, 0)
        bags = [m for m in model.modules() if isinstance(m, nn.EmbeddingBag)]
        autofuse.optimizer_in_backward(bags, autofuse.RowwiseAdagrad(0.1))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        report = autofuse.explain(model, backward=True)(*model.inputs)
        assert [site.pattern for site in report.fused] == [FORWARD, UPDATE]
        assert all(site.plan is not None for site in report.fused)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Odd(nn.Module):
    """Two bags, exchanged together; the second one is what a test makes of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(2))
        self.kind, optimizer = kind, autofuse.SGD(0.1)
        self.more = nn.Parameter(torch.randn(8, DIM))
        if kind == "none of rank 1" and dist.get_rank() == 1:
            return
        if kind != "the other is dense":
            other = autofuse.RowwiseAdagrad(0.1) if kind == "two rules" else optimizer
            autofuse.optimizer_in_backward(self.bags[1], other)
        autofuse.optimizer_in_backward(self.bags[0], optimizer)

    def forward(self, indices: Tensor) -> Tensor:
        first, second = self.bags
        pooled = [first(indices), (first if self.kind == "one table twice" else second)(indices + 1)]
        if self.kind == "gradient also read":
            pooled[0] = pooled[0] + self.more
        return exchange(torch.cat(pooled, 1)).sin()


def odd(rank: int, world: int, kind: str, how: dict[str, Any]) -> list[tuple[str | None, str]]:
    """Compiled it does what eager does; the sites of the backward."""
    torch._dynamo.reset()
    found = []
    indices = torch.randint(0, ROWS - 1, (4 * world, 3), generator=torch.Generator().manual_seed(rank))
    with autofuse.debug() as report:
        for each in (None, how):
            model = Odd(kind)
            step = compiled(model, each)
            for _ in range(2):
                step(indices).sum().backward()
            found.append([*model.state_dict().values(), *(p.grad for p in model.parameters())])
    for got, want in zip(*found, strict=True):
        if want is None:
            assert got is None
        else:
            torch.testing.assert_close(got, want)
    return [(s.reason and s.reason.value, s.detail) for s in report.sites if s.graph.startswith("backward")]


@pytest.mark.parametrize(
    "how", [pytest.param(GRAPH, id="graph"), pytest.param(AUTOFUSE, id="generated", marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("kind", "reason", "detail"),
    [
        ("the other is dense", None, ""),
        ("none of rank 1", None, ""),
        ("two rules", None, "torch computes what 1 of 2 tables"),
        ("one table twice", None, "torch computes what 1 of 2 tables"),
        ("gradient also read", None, ""),
    ],
)
def test_odd_tables(ranks: Ranks, kind: str, reason: str | None, detail: str, how: dict[str, Any]) -> None:
    for sites in ranks(2).run(odd, kind, how, timeout=200):
        assert [s[0] for s in sites] == [reason], sites
        assert detail in sites[0][1]
