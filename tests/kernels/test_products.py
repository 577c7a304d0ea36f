"""Which products kernels take, and what torch makes of them; on a CPU, where tails are torch ops."""

from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from autofuse.lowering.gpu.dense import factors
from autofuse.lowering.gpu.dense.factors import BIASED, MADE, MULTIPLIED, SCALED, Factors
from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce
from autofuse.lowering.reference.product import dtype_of, product_reference, with_kept

BF16, FP32 = torch.bfloat16, torch.float32
M, K, N = 6, 16, 8
RANDOM = torch.Generator().manual_seed(3)


def new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=RANDOM).to(dtype)


PLACES, TABLE, MASK = torch.arange(M)[:, None], new(10, N), torch.arange(M)[:, None] % 2 == 0
X, W = [new(M, K)], [new(K, N)]
CASES = {
    "one": (X, W, [], "mm", False, MULTIPLIED),
    "four": (X * 4, W * 4, [], "mm", False, MULTIPLIED),
    "five": (X * 5, W * 5, [], "mm", False, MADE),
    "returned": (X, W, [], "mm", True, MADE),
    "float32": ([new(M, K, dtype=FP32)], [new(K, N, dtype=FP32)], [], "mm", False, MADE),
    "a row": (X, W, [new(N)], "addmm %0", False, BIASED),
    "a row of one": (X, W, [new(1, N)], "addmm %0", False, BIASED),
    "one number": (X, W, [new(1)], "addmm %0", False, MADE),
    "a column": (X, W, [new(M, 1)], "addmm %0", False, MADE),
    "a matrix": (X, W, [new(M, N)], "addmm %0", False, MADE),
    "a row, returned": (X, W, [new(N)], "addmm %0", True, MADE),
    "a row times a number": (X, W, [new(N)], "addmm %0 0.5 2", False, MADE),
    "a product": (X, W, [], "mm; mul 0.5", False, SCALED),
    "a quotient": (X * 2, W * 2, [], "mm; div 3", False, SCALED),
    "times 0": (X, W, [], "mm; mul 0", False, MADE),
    "times a tensor": (X, W, [new(M, 1)], "mm; mul %0", False, MADE),
    "scaled and cast": (X, W, [], "mm; mul 0.5; to float32", False, MADE),
    "times a tensor, read before": (X, W, [new(M, 1)], "mm; keep; mul %0", True, MADE),
    "a sum": (X, W, [], "mm; add 0.5", False, MADE),
    "masked rows": ([PLACES], [TABLE], [MASK], "rows; masked_fill %0 0.0; to float16", False, MADE),
}


@pytest.mark.parametrize("case", CASES)
def test_a_product(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, operands, text, keep, kind = CASES[case]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # so that torch runs tails
    end: Any = ("sum", keep, [], "", "", "g", "direct", "s")
    found = Factors.of(MatmulAllReduce(x, w, operands, text, *end), x)
    assert found.kind == kind
    wanted = product_reference(x, w, operands, text)
    assert found.dtype == wanted.dtype == dtype_of(text, w[0].dtype, operands)
    out = torch.full_like(wanted, torch.nan)
    computed, kept = found.computed()
    torch.testing.assert_close(kept, with_kept(x, w, operands, text)[1], rtol=2e-2, atol=2e-2)
    for product in (found.product(), found.product(out), computed.product(), computed.x[0]):
        torch.testing.assert_close(product, wanted, rtol=2e-2, atol=2e-2)
        assert product.is_contiguous()
    assert torch.equal(out, found.product())
    bias = found.bias
    assert (bias is not None) == (kind == BIASED)
    assert bias is None or bias.shape == (N,)
    assert found.scale == ({"a product": 0.5, "a quotient": 1 / 3}.get(case))


def test_a_kind_is_one_of_those_that_ways_know() -> None:
    assert {case[-1] for case in CASES.values()} == {
        getattr(factors, name) for name in ("MULTIPLIED", "BIASED", "SCALED", "MADE")
    }
