"""The C++ kernel of tails against eager torch: pointwise stages bit by bit, norms against float64."""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autofuse.lowering.cpu.recipes import State, spec
from autofuse.lowering.cpu.tails import ApplyTail, tail_of
from autofuse.lowering.cpu.tiles import Run
from autofuse.lowering.reference.tail import tail_reference
from autofuse.native_kernels.cpu.tail import bits
from tests.ops.dense import DTYPES, seeded

SHAPES = ["", "n", "1n", "m1", "mn"]


class Given:
    """A matrix that is at hand."""

    def __init__(self, t: Tensor) -> None:
        self.dtype, self.stride, self._t = t.dtype, t.stride(0), t
        self.shape = (t.shape[0], t.shape[1])

    def tensor(self, s: State) -> Tensor:
        return self._t

    def address(self, s: State) -> int:
        return self._t.data_ptr()


def _apply(tail: str, parts: list[Tensor], scale: float, operands: list[Tensor]) -> list[Tensor]:
    """The kernel's results, with the columns in three runs and into memory that is NaN."""
    m, n = parts[0].shape
    dims = tuple((t.dim(), t.dtype) for t in operands)
    found = tail_of(tail, parts[0].dtype, n, dims)
    assert found.stages is not None, tail
    cuts = sorted({0, n // 3, n // 2, n})
    source = [[Given(p[:, a:b]) for p in parts] for a, b in pairwise(cuts)]
    results = [torch.full((m, width), math.nan, dtype=dtype) for dtype, width in found.results]
    state = cast(State, SimpleNamespace(tail_operands=operands))
    ApplyTail(found, Run(0, m), scale, source, spec(operands), [Given(t) for t in results])(state)
    return results


@st.composite
def _stage(draw: st.DrawFn, operands: list[tuple[str, torch.dtype]], dtype: torch.dtype) -> str:
    """One pointwise stage; it adds its operands. Those without dims have the dtype of V."""

    def operand(mask: bool = False) -> str:
        shape = draw(st.sampled_from(SHAPES))
        of = torch.bool if mask else dtype if not shape else draw(st.sampled_from(DTYPES))
        operands.append((shape, of))
        return f"%{len(operands) - 1}"

    number = str(draw(st.floats(-8, 8, width=32)))
    name = draw(
        st.sampled_from(["binary"] * 4 + ["neg", "relu", "to", "keep", "where", "masked_fill", "clamp"])
    )
    if name == "to":
        return f"to {str(draw(st.sampled_from(DTYPES))).removeprefix('torch.')}"
    if name == "binary":
        name = draw(st.sampled_from(["add", "sub", "rsub", "mul", "div"]))
        return f"{name} {number if draw(st.booleans()) else operand()}"
    if name == "clamp":
        return f"{draw(st.sampled_from(['clamp_min', 'clamp_max']))} {number}"
    if name in ("where", "masked_fill"):
        return f"{name} {operand(mask=True)} {number if draw(st.booleans()) else operand()}"
    return name


@st.composite
def _problem(draw: st.DrawFn) -> tuple[str, list[Tensor], float, list[Tensor]]:
    dtype = draw(st.sampled_from(DTYPES))
    m, n = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 15, 16, 17, 255, 256, 300, 600]))
    named: list[tuple[str, torch.dtype]] = []
    tail, value = "", torch.empty(1, 1, dtype=dtype)
    for _ in range(draw(st.integers(1, 6))):
        stage = draw(_stage(named, value.dtype))
        tail = f"{tail}; {stage}" if tail else stage
        blank = [torch.ones((1,) * len(shape), dtype=of) for shape, of in named]
        value = tail_reference(torch.empty(1, 1, dtype=dtype), blank, f"{tail}; neg")[0]
    seed = draw(st.integers(0, 1000))
    sizes = {"m": m, "n": n, "1": 1}
    operands = [
        seeded(seed + i, *(sizes[c] for c in shape)).to(of) if of != torch.bool else
        seeded(seed + i, *(sizes[c] for c in shape)) > 0
        for i, (shape, of) in enumerate(named)
    ]  # fmt: skip
    parts = [seeded(seed - r - 1, m, n, dtype=dtype) for r in range(draw(st.integers(1, 3)))]
    return f"{tail}; neg", parts, draw(st.sampled_from([1.0, 0.5, 1 / 3])), operands


@settings(max_examples=300)
@given(_problem())
def test_pointwise_stages_have_the_bits_of_torch(
    problem: tuple[str, list[Tensor], float, list[Tensor]],
) -> None:
    tail, parts, scale, operands = problem
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    wanted = tail_reference((total * scale).to(parts[0].dtype), operands, tail)
    torch.testing.assert_close(_apply(tail, parts, scale, operands), wanted, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=100)
@given(
    n=st.integers(1, 5000),
    shift=st.sampled_from([0.0, 1.0, 100.0]),
    eps=st.sampled_from([1e-6, 1e-5, 0.0]),
    seed=st.integers(0, 1000),
)
def test_norms(n: int, shift: float, eps: float, seed: int) -> None:
    """Sums are of 64 numbers at once, so that errors grow with the 64th part of the length."""
    value = seeded(seed, 3, n) + shift
    exact = value.double()
    tight = (n / 64 + 16) * torch.finfo(torch.float32).eps
    wanted = (exact.square().mean(1, True) + eps).rsqrt()
    normed, scale = _apply(f"rms {eps} keep", [value], 1.0, [])
    torch.testing.assert_close(scale.double(), wanted, rtol=tight, atol=0)
    torch.testing.assert_close(normed.double(), exact * wanted, rtol=tight, atol=0)
    if n > 1:
        var, mean = torch.var_mean(exact, 1, correction=0, keepdim=True)
        normed, of_mean, scale = _apply(f"standardize {eps} keep", [value], 1.0, [])
        wanted = (var + eps).rsqrt()
        off = tight * (exact.abs().amax() + 1)
        torch.testing.assert_close(of_mean.double(), mean, rtol=0, atol=off.item())
        torch.testing.assert_close(
            scale.double(), wanted, rtol=(off**2 * wanted**2).max().item() + tight, atol=0
        )
        allowed = (off * wanted).max().item() + 2 * tight
        torch.testing.assert_close(normed.double(), (exact - mean) * wanted, rtol=allowed, atol=allowed)


@settings(max_examples=60)
@given(
    n=st.integers(1, 3000),
    of=st.sampled_from(DTYPES),
    shapes=st.sampled_from(SHAPES),
    seed=st.integers(0, 1000),
)
def test_backward_of_norms(n: int, of: torch.dtype, shapes: str, seed: int) -> None:
    """Against float64, in units of the largest term."""
    value, r = seeded(seed, 3, n), seeded(seed + 2, 3, 1).abs()
    sizes = {"m": 3, "n": n, "1": 1}
    x = seeded(seed + 1, *(sizes[c] for c in shapes)).to(torch.float32 if not shapes else of)
    tight = (n / 64 + 16) * torch.finfo(torch.float32).eps
    exact, along = value.double(), x.double()
    for tail, wide, middle in (
        ("project %0 %1", along * r.double(), 0.0),
        ("project %0; mul %1", along, 0.0),
        ("centre %0; mul %1", along, exact.mean(1, True)),
    ):
        (found,) = _apply(tail, [value], 1.0, [x, r])
        wanted = exact - middle - wide * (exact * wide).mean(1, True)
        wanted = wanted * r.double() if "mul" in tail else wanted
        size = (1 + wide.abs().amax()) ** 2 * (1 + value.abs().amax()) * (1 + r.amax())
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=float(tight * size))


@pytest.mark.parametrize(
    ("tail", "operands"),
    [
        ("project %0", ((2, torch.float64),)),
        ("project %0 %1", ((2, torch.float32), (2, torch.float64))),
        ("silu", ()),
        ("gelu none", ()),
        ("to float64", ()),
        ("add %0", ((2, torch.float64),)),
        ("mul %0", ((0, torch.float32),)),
        ("mul %0", ((2, torch.int64),)),
        ("masked_fill %0 1e39", ((2, torch.bool),)),
    ],
)
def test_left_to_torch(tail: str, operands: tuple[tuple[int, torch.dtype], ...]) -> None:
    dtype = torch.float32 if tail.startswith("project") else torch.bfloat16
    assert tail_of(tail, dtype, 8, operands).stages is None


def test_operands_whose_columns_are_not_adjacent() -> None:
    value, other = seeded(0, 6, 5), seeded(1, 5, 6).t()
    (found,) = _apply("add %0", [value], 1.0, [other])
    assert torch.equal(found, value + other)


def test_numbers() -> None:
    assert bits(1.0) == 0x3F800000
    assert bits(-math.inf) == 0xFF800000
