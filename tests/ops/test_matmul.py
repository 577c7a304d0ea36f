"""The matmul of few rows against float64: every count of rows, odd sizes, strides, and when it is used."""

import pytest
import torch

from autofuse.lowering.cpu.matmul import multiply
from autofuse.native_kernels.cpu.linear import linear, linear_is_faster


@pytest.mark.parametrize("m", [0, 1, 2, 3, 4, 5, 6, 7, 13, 16])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (15, 4), (64, 9), (1037, 30)])
def test_linear_is_the_product(m: int, k: int, n: int) -> None:
    generator = torch.Generator().manual_seed(m * k + n)
    x = torch.randn(m, k + 3, generator=generator)[:, :k]
    weight = torch.randn(n, k + 5, generator=generator)[:, :k]
    wide = torch.full((m, n + 2), float("nan"))
    linear(wide[:, :n], x, weight.t())
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(wide[:, :n].double(), exact, rtol=0, atol=1e-6 * k**0.5)
    assert wide[:, n:].isnan().all()


def test_linear_does_not_read_behind_the_rows() -> None:
    x, weight = torch.ones(3, 20), torch.ones(5, 20)
    x[:, 17:], weight[:, 17:] = float("nan"), float("nan")
    out = torch.empty(3, 5)
    linear(out, x[:, :17], weight[:, :17].t())
    assert (out == 17).all()


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (torch.randn(2, 64), torch.randn(64, 8)),  # not transposed
        (torch.randn(64, 2).t(), torch.randn(8, 64).t()),
        (torch.randn(64, 64), torch.randn(8, 64).t()),  # many rows
        (torch.randn(2, 64).bfloat16(), torch.randn(8, 64).bfloat16().t()),
    ],
)
def test_others_are_left_to_torch(x: torch.Tensor, w: torch.Tensor) -> None:
    out = torch.full((x.shape[0], w.shape[1]), float("nan"), dtype=x.dtype)
    assert not linear_is_faster(out, x, w)
    multiply(out, x, w)
    torch.testing.assert_close(out, x @ w, rtol=0, atol=0)


def test_a_bias_is_added() -> None:
    x, w, bias = torch.randn(2, 64), torch.randn(8, 64).t(), torch.randn(8)
    out = torch.full((2, 8), float("nan"))
    multiply(out, x, w, bias)
    torch.testing.assert_close(out, torch.addmm(bias, x, w), rtol=0, atol=0)
