"""`optimizer_in_backward` on one rank: the rules, exactly, eager and compiled; modules; what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import autofuse
from autofuse.lowering.ops import embedding_bag_update
from autofuse.native_kernels import cpu

ROWS, DIM = 40, 24
EPS = 1e-3

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def bag_of(dtype: torch.dtype = FP32, **options: Any) -> nn.EmbeddingBag:
    torch.manual_seed(0)
    return nn.EmbeddingBag(ROWS, DIM, **{"mode": "sum", **options}).to(dtype)


def inputs_of(index: torch.dtype = torch.int64, last: bool = False) -> tuple[Tensor, Tensor]:
    """Hot rows, rows that nothing names, empty bags at both ends and between."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([0, 5, 1, 0, 0, 30, 2, 7, 0])
    ends = sizes.cumsum(0)
    indices = torch.randint(0, ROWS // 2, (int(ends[-1]),), generator=generator)
    indices[::3] = 4
    offsets = torch.cat([ends.new_zeros(1), ends])[: None if last else -1]
    return indices.to(index), offsets.to(index)


def exact(
    bag: nn.EmbeddingBag, state: Tensor, inputs: tuple[Tensor, ...], grad: Tensor, lr: float, rowwise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """In fp64: the new rows, the new state, and which rows are touched."""
    weight = bag.weight.detach().double().requires_grad_()
    indices, offsets, *samples = inputs
    pooled = F.embedding_bag(
        indices.long(), weight, offsets.long(), mode=bag.mode, padding_idx=bag.padding_idx,
        include_last_offset=bag.include_last_offset,
        per_sample_weights=samples[0].double() if samples else None,
    )  # fmt: skip
    pooled.backward(grad.double())
    assert weight.grad is not None
    touched = torch.zeros(ROWS, dtype=torch.bool)
    touched[indices.long()] = True
    if bag.padding_idx is not None:
        touched[bag.padding_idx] = False
    state = state.double() + weight.grad.square().mean(1)
    rates = torch.tensor([lr, EPS]).double()
    step = rates[0] / (state.sqrt() + rates[1]) if rowwise else rates[0].expand(ROWS)
    return weight.detach() - step[:, None] * weight.grad, state, touched


def check(
    name: str, bag: Any, rowwise: bool, forward: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> None:
    """Some steps, each from where the last one left the table."""
    optimizer = autofuse.RowwiseAdagrad(1.0, EPS) if rowwise else autofuse.SGD(1.0)
    plain = copy.deepcopy(bag)
    autofuse.optimizer_in_backward(bag, optimizer)
    for step in range(4):
        optimizer.lr = 0.5 / (1 + step)
        before, state = bag.weight.clone(), torch.zeros(ROWS) if bag.table_state is None else bag.table_state
        plain.weight.data.copy_(before)
        out = forward(*inputs)
        torch.testing.assert_close(out, plain(*inputs))
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(step)).to(out.dtype)
        rows, sums, touched = exact(plain, state.clone(), inputs, grad, optimizer.lr, rowwise)
        out.backward(grad)
        assert torch.equal(bag.weight[~touched], before[~touched]), name
        # One rounding of the row; and what fp32 adds up, terms below 4 of at most 40 entries.
        small = 64 * 40 * torch.finfo(FP32).eps
        eps = torch.finfo(bag.weight.dtype).eps
        error = (bag.weight.double() - rows).abs()[touched]
        assert bool((error <= eps * rows.abs()[touched] + small).all()), (name, error.max())
        if rowwise:
            assert bag.table_state.dtype is FP32
            torch.testing.assert_close(bag.table_state.double(), sums, rtol=1e-5, atol=0)
        assert bag.weight.grad is None


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "mean": ({"mode": "mean"}, {}),
    "padding": ({"padding_idx": 4}, {}),
    "mean, padding": ({"mode": "mean", "padding_idx": -36}, {"index": torch.int32}),
    "last offset": ({"include_last_offset": True}, {"last": True}),
    "bf16": ({"dtype": BF16}, {}),
    "fp16": ({"dtype": FP16, "mode": "mean"}, {"index": torch.int32}),
}


@pytest.mark.parametrize("rowwise", [False, True], ids=["sgd", "adagrad"])
@pytest.mark.parametrize(
    ("name", "weighted"),
    [(n, w) for n, (options, _) in CASES.items() for w in (False, True) if not (w and "mode" in options)],
)
def test_exact(name: str, weighted: bool, rowwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the native kernels and without."""
    options, given = CASES[name]
    for native in (True, False):
        if not native:
            monkeypatch.setattr(embedding_bag_update.cpu, "available", lambda: False)
        bag, inputs = bag_of(**options), inputs_of(**given)
        samples = (torch.rand(len(inputs[0])).to(bag.weight.dtype),) if weighted else ()
        check(f"{name}, native: {native}", bag, rowwise, bag, (*inputs, *samples))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "autofuse"])
@pytest.mark.parametrize("rowwise", [False, True], ids=["sgd", "adagrad"])
def test_compiled_once(rowwise: bool, backend: str) -> None:
    """In place, with a rate that changes."""
    torch._dynamo.reset()
    bag, counts = bag_of(), CompileCounterWithBackend(backend)
    place = bag.weight.data_ptr()
    compiled = torch.compile(bag, backend=counts, fullgraph=True)
    check(backend, bag, rowwise, compiled, inputs_of())
    assert counts.frame_count == 1
    assert bag.weight.data_ptr() == place


def test_matrix_of_indices() -> None:
    for last in (False, True):
        bag = bag_of(mode="mean", include_last_offset=last)
        plain = copy.deepcopy(bag)
        indices = torch.randint(0, ROWS, (6, 5))
        autofuse.optimizer_in_backward(nn.ModuleList([bag]), autofuse.SGD(0.5))
        bag(indices).square().sum().backward()
        plain(indices).square().sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(bag.weight, plain.weight - 0.5 * plain.weight.grad)


def test_a_bag_used_twice_is_updated_twice() -> None:
    for forward in ("eager", "inductor"):
        bag = bag_of()
        autofuse.optimizer_in_backward(bag, autofuse.SGD(0.5))
        inputs = inputs_of()

        def both(*inputs: Tensor, bag: nn.EmbeddingBag = bag) -> Tensor:
            return bag(*inputs).sum() + 2 * bag(*inputs).sum()

        before = bag.weight.clone()
        (both if forward == "eager" else torch.compile(both, backend=forward))(*inputs).backward()
        counts = inputs[0].bincount(minlength=ROWS)
        torch.testing.assert_close(bag.weight, before - 0.5 * 3 * counts[:, None], rtol=1e-5, atol=1e-5)


def test_other_parameters_learn_as_before() -> None:
    found = []
    for in_backward in (False, True):
        torch.manual_seed(3)
        bag, dense = bag_of(), nn.Linear(DIM, 2)
        if in_backward:
            autofuse.optimizer_in_backward(bag, autofuse.SGD(0.1))
        dense(bag(*inputs_of()).sin()).sum().backward()
        found.append(dense.weight.grad)
    assert torch.equal(*found)


def test_no_backward_no_update() -> None:
    bag = bag_of()
    autofuse.optimizer_in_backward(bag, autofuse.RowwiseAdagrad(0.1))
    before = bag.weight.clone()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = bag(*inputs_of())
        assert not out.requires_grad
    assert torch.equal(bag.weight, before)
    assert not bag.table_state.any()


def test_checkpoints_copies_and_casts() -> None:
    bag, optimizer = bag_of(), autofuse.RowwiseAdagrad(0.1)
    autofuse.optimizer_in_backward(bag, optimizer)
    bag(*inputs_of()).sum().backward()
    assert list(bag.state_dict()) == ["weight", "table_state"]
    again = bag_of()
    autofuse.optimizer_in_backward(again, optimizer)
    again.load_state_dict(bag.state_dict())
    for one in (again, copy.deepcopy(bag)):
        assert torch.equal(one.table_state, bag.table_state)
        one(*inputs_of()).sum().backward()
    assert torch.equal(again.weight, one.weight)
    bag.bfloat16()
    assert (bag.weight.dtype, bag.table_state.dtype, bag.table_rates.dtype) == (BF16, FP32, FP32)
    bag(*inputs_of()).sum().backward()
    optimizer.lr = 0.25
    assert bag.table_rates[0] == again.table_rates[0] == 0.25
    assert list(bag.parameters()) == [bag.weight]


def two_that_share() -> list[nn.EmbeddingBag]:
    bags = [bag_of(), bag_of()]
    bags[1].weight = bags[0].weight
    return bags


def transposed() -> nn.EmbeddingBag:
    bag = bag_of()
    bag.weight = nn.Parameter(torch.randn(DIM, ROWS).t())
    return bag


def updated_before() -> nn.EmbeddingBag:
    bag = bag_of()
    autofuse.optimizer_in_backward(bag, autofuse.SGD(0.1))
    return bag


class Own(nn.EmbeddingBag):
    pass


@pytest.mark.parametrize(
    ("bags", "says"),
    [
        (lambda: bag_of(mode="max"), "mode 'max'; use 'sum' or 'mean'"),
        (lambda: bag_of(scale_grad_by_freq=True), "scale_grad_by_freq"),
        (lambda: bag_of(sparse=True), "sparse=True"),
        (lambda: bag_of(max_norm=1.0), "max_norm"),
        (lambda: bag_of(torch.float64), "torch.float64; use float32"),
        (transposed, "not contiguous"),
        (two_that_share, "bags 0 and 1 share the memory"),
        (updated_before, "set optimizer.lr"),
        (lambda: Own(3, 4, mode="sum"), "bag 0 is Own; expected torch.nn.EmbeddingBag"),
        (lambda: [bag_of(), nn.Linear(2, 2)], "bag 1 is Linear"),
        (lambda: nn.Linear(2, 2), "bag 0 is Linear"),
    ],
)
def test_refused(bags: Callable[[], Any], says: str) -> None:
    given = bags()
    with pytest.raises(ValueError, match=says):
        autofuse.optimizer_in_backward(given, autofuse.SGD(0.1))
    if isinstance(given, list):
        assert all(type(bag) is not autofuse.table_optimizers.UpdatedEmbeddingBag for bag in given)


def test_bad_arguments() -> None:
    for lr in (-1, float("nan"), float("inf"), "0.1", True):
        with pytest.raises(ValueError, match="lr="):
            autofuse.SGD(lr)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eps="):
        autofuse.RowwiseAdagrad(0.1, eps=-1.0)
    with pytest.raises(ValueError, match="expected autofuse"):
        autofuse.optimizer_in_backward(bag_of(), torch.optim.SGD(bag_of().parameters(), 0.1))  # type: ignore[arg-type]
    bag = bag_of()
    autofuse.optimizer_in_backward(bag, autofuse.SGD(0.1))
    indices, offsets = inputs_of()
    for samples, says in (
        (torch.rand(len(indices), requires_grad=True), "detach them"),
        (torch.rand(3), "shape"),
    ):
        with pytest.raises(ValueError, match=says):
            bag(indices, offsets, samples)
        with pytest.raises(ValueError, match=says):
            torch.compile(bag, backend="eager")(indices, offsets, samples)
    with pytest.raises(ValueError, match="offsets"):
        bag(indices)


@pytest.mark.skipif(not cpu.available(), reason="without the native kernels torch finds it")
def test_bad_index() -> None:
    bag, (indices, offsets) = bag_of(), inputs_of()
    autofuse.optimizer_in_backward(bag, autofuse.SGD(0.1))
    with pytest.raises(RuntimeError, match=f"index {ROWS} of table 0 is outside of its {ROWS} rows"):
        torch.ops.autofuse.embedding_bag_update(
            bag.weight, None, bag.table_rates, torch.ones(len(offsets), DIM), indices + ROWS - 4, offsets,
            None, 0, False, -1,
        )  # fmt: skip
