"""Reductions bitwise against an fp32 sum in rank order; all conversions, exhaustively."""

import pytest
import torch

from autofuse.native_kernels import cpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _reference(parts: list[torch.Tensor], scale: float, dtype: torch.dtype) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return (total * scale).to(dtype)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("part_dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_reduce_rows_is_bitwise_the_sum_in_rank_order(
    world: int, part_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(world)
    for rows, cols in ((1, 1), (3, 255), (5, 257), (7, 1000), (64, 16), (0, 4), (4, 0)):
        whole = [torch.randn(rows, cols + 5 * p, generator=generator).to(part_dtype) for p in range(world)]
        parts = [t[:, :cols] for t in whole]
        wide = torch.full((rows, cols + 3), torch.nan, dtype=out_dtype)
        for scale in (1.0, 1.0 / world):
            cpu.reduce_rows(wide[:, :cols], parts, scale)
            assert torch.equal(wide[:, :cols], _reference(parts, scale, out_dtype))
            assert bool(wide[:, cols:].isnan().all())
            packed = torch.full((rows, cols), torch.nan, dtype=out_dtype)  # and parts that are not
            cpu.reduce_rows(packed, parts, scale)
            assert torch.equal(packed, _reference(parts, scale, out_dtype))


def test_vectors_and_in_place() -> None:
    a, b = torch.randn(1001), torch.randn(1001)
    expected = a + b
    cpu.reduce_rows(a, [a, b])
    assert torch.equal(a, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_rows(dtype: torch.dtype) -> None:
    received, part = torch.randn(9, 301), torch.randn(9, 301).to(dtype)
    out = torch.full((9, 301), torch.nan)
    cpu.accumulate_rows(out, received, part)
    assert torch.equal(out, received + part.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_read_exactly(dtype: torch.dtype) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    out = torch.full(x.shape, torch.nan)
    cpu.reduce_rows(out, [x])
    torch.testing.assert_close(out, x.float(), rtol=0, atol=0, equal_nan=True)
    back = torch.full(x.shape, torch.nan, dtype=dtype)
    cpu.reduce_rows(back, [x.float()])
    torch.testing.assert_close(back, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even_over_all_exponents(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=generator).to(torch.int32)
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    halfway = torch.where(x[1:].isfinite() & x[:-1].isfinite(), (x[1:] + x[:-1]) / 2, 0.0)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.99, 65520.0, 2**-25, 3e38])
    numbers = torch.cat([bits.view(torch.float32), halfway, special])
    out = torch.full(numbers.shape, torch.nan, dtype=dtype)
    cpu.reduce_rows(out, [numbers])
    expected = numbers.to(dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit()[~out.isnan()], expected.signbit()[~out.isnan()])


def test_what_it_does_not_take() -> None:
    x = torch.randn(4, 6)
    for out, parts in (
        (x, []),
        (x, [torch.randn(4, 5)]),
        (x, [torch.randn(6, 4).t()]),
        (x.double(), [x]),
        (x, [x.double()]),
        (x.view(2, 2, 6), [x.view(2, 2, 6)]),
    ):
        with pytest.raises(ValueError, match=r"one part|expected tensors"):
            cpu.reduce_rows(out, parts)
    with pytest.raises(ValueError, match="sums in float32"):
        cpu.accumulate_rows(x.half(), x, x)


def test_a_library_without_a_function_says_so_when_it_is_called() -> None:
    assert cpu.available()
    assert cpu.why_not() == ""
    missing = cpu.function("af_no_such_kernel", None, [])
    with pytest.raises(RuntimeError, match=r"lack af_no_such_kernel.*reinstall"):
        missing()
