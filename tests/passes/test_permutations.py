"""An index that is put together as the inverse of a permutation is known to be a permutation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autofuse.passes.graph.permutation import inverse_of, is_permutation

COUNT = 6
Index = Callable[[Tensor], Tensor]


def numbers() -> Tensor:
    return torch.arange(COUNT)


def put(keys: Tensor) -> Tensor:
    p = keys.argsort()
    return torch.empty_like(p).index_put((p,), numbers())


def scattered(keys: Tensor) -> Tensor:
    p = keys.sort(stable=True)[1]
    return torch.zeros_like(p).scatter(0, p, numbers())


def twice(keys: Tensor) -> Tensor:
    inverse = put(keys)
    return torch.empty_like(inverse).index_put((inverse,), numbers())


def of_keys(keys: Tensor) -> Tensor:
    return torch.zeros_like(keys).index_put((keys,), numbers())


def of_other_numbers(keys: Tensor) -> Tensor:
    p = keys.argsort()
    return torch.zeros_like(p).index_put((p,), keys)


def of_one_number(keys: Tensor) -> Tensor:
    p = keys.argsort()
    return torch.zeros_like(p).index_put((p,), torch.arange(1))


def into_more(keys: Tensor) -> Tensor:
    p = keys.argsort()
    return p.new_zeros(COUNT + 1).index_put((p,), numbers())


def added(keys: Tensor) -> Tensor:
    p = keys.argsort()
    return p.index_put((p,), numbers(), accumulate=True)


def index_of(fn: Index) -> torch.fx.Node:
    graph = make_fx(fn, tracing_mode="fake")(torch.tensor([2, 0, 1, 5, 4, 4])).graph
    return next(n for n in graph.nodes if n.op == "output").args[0]


@pytest.mark.parametrize("fn", [put, scattered, twice])
def test_inverses(fn: Index) -> None:
    keys = torch.tensor([2, 0, 1, 5, 4, 4])
    assert fn(keys).sort()[0].equal(numbers())
    index = index_of(fn)
    assert is_permutation(index)
    assert inverse_of(index) is not None


@pytest.mark.parametrize("fn", [of_keys, of_other_numbers, of_one_number, into_more, added])
def test_what_is_none(fn: Index) -> None:
    assert not is_permutation(index_of(fn))
