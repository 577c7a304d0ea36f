"""Sums behind an all_reduce move before it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import autofuse

from .dense import group
from .harness import fake_group
from .test_graphs import rewritten

E, T, K, N = 4, 6, 8, 10

X, W = (E, T, K), (E, K, N)


def reduced(x: Tensor, op: str = "sum") -> Tensor:
    return funcol.all_reduce(x, op, group())


def every_expert(x: Tensor, w: Tensor) -> Tensor:
    return reduced(torch.bmm(x, w).view(-1, N)).view(E, T, N).sum(0)


def average(x: Tensor, w: Tensor) -> Tensor:
    return reduced(torch.bmm(x, w), "avg").permute(1, 0, 2).sum(1)


def everything(x: Tensor, w: Tensor) -> Tensor:
    return reduced(torch.bmm(x, w)).sum((0, 1, 2))


def kept_dim(x: Tensor, w: Tensor) -> Tensor:
    return reduced(torch.bmm(x, w)).transpose(0, 2).sum(2, keepdim=True)


def maximum(x: Tensor, w: Tensor) -> Tensor:
    return reduced(torch.bmm(x, w), "max").sum(0)


def read_twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = reduced(torch.bmm(x, w))
    return y.sum(0), y


def activated(x: Tensor, w: Tensor) -> Tensor:
    return reduced(torch.bmm(x, w)).relu().sum(0)


def wider(x: Tensor, w: Tensor) -> Tensor:
    return reduced(torch.bmm(x, w)).sum(0, dtype=torch.float64)


def repeated(x: Tensor, w: Tensor) -> Tensor:
    return reduced(torch.bmm(x, w))[0, 0].expand(100, N).sum(1)


def own_part(x: Tensor, w: Tensor) -> Tensor:
    """Another part on each rank."""
    return reduced(torch.bmm(x, w))[dist.get_rank()].sum(0)


def own_chunk(x: Tensor, w: Tensor) -> Tensor:
    return reduced(torch.bmm(x, w)).chunk(2)[dist.get_rank()].sum(0)


def own_slice(x: Tensor, w: Tensor) -> Tensor:
    return reduced(torch.bmm(x, w)).narrow(0, dist.get_rank(), 1).sum(0)


MOVED = (every_expert, average, everything, kept_dim)
STAYING = (maximum, read_twice, activated, wider, repeated, own_part, own_chunk, own_slice)


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(X).to(dtype), torch.randn(W).to(dtype)


def is_moved(fn: Callable[..., object], dtype: torch.dtype = torch.float32) -> bool:
    lines = rewritten(fn, *operands(dtype)).splitlines()
    sums = [i for i, line in enumerate(lines) if "aten.sum.dim_IntList" in line]
    reductions = [i for i, line in enumerate(lines) if "all_reduce" in line]
    return not sums or sums[0] < reductions[0]


def test_experts_that_are_added_up_behind_their_reduction() -> None:
    """As Llama-4 of Hugging Face has it."""
    text = rewritten(every_expert, torch.zeros(X), torch.zeros(W))
    assert "autofuse.matmul_all_reduce" in text
    assert "'grouped; fold 4'" in text
    assert "c10d" not in text


@pytest.mark.parametrize("fn", MOVED)
def test_what_moves(fn: Callable[..., Tensor]) -> None:
    """The value stays, as far as one rank can tell: the fake all_reduce returns its input. A fused op would
    divide an average by the number of ranks."""
    assert is_moved(fn)
    assert not is_moved(fn, torch.float16)
    with fake_group(2), torch.no_grad(), autofuse.config.patch(patterns="all_gather_matmul"):
        args = operands(torch.float32)
        gm = make_fx(fn, tracing_mode="fake")(*args)
        autofuse.rewrite(gm)
        torch.testing.assert_close(gm(*args), fn(*args))


@pytest.mark.parametrize("fn", STAYING)
def test_what_stays(fn: Callable[..., object]) -> None:
    assert not is_moved(fn)


def test_the_order_of_collectives_stays() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        first = reduced(x.relu())
        second = funcol.all_gather_tensor(w.sin(), 0, group())
        return first.sum(0).sum() + second.sum()

    lines = [line for line in rewritten(fn, *operands(torch.float32)).splitlines() if "c10d" in line]
    names = [line.split("_c10d_functional.")[1].split(".")[0].strip("_") for line in lines]
    assert names == ["all_reduce", "all_gather_into_tensor", "wait_tensor", "wait_tensor"], lines
