"""Products: parsing, tiles with the roundings of the whole, gradients."""

import pytest
import torch
from torch import Tensor

from autofuse.lowering.reference.product import (
    evaluate,
    parse,
    product_backward,
    product_reference,
    with_kept,
)
from tests.ops.dense import seeded


def test_parse() -> None:
    p = parse("addmm %1; mul %0; div 4; add 0.5; neg; to bfloat16")
    assert (p.contraction, p.inputs, p.out_dtype) == ("addmm", (1,), None)
    assert [stage.name for stage in p.stages] == ["mul", "div", "add", "neg", "to"]
    assert p.stages[0].operand == 0
    assert (p.stages[1].number, p.stages[2].number) == (4, 0.5)
    assert p.stages[4].dtype == torch.bfloat16
    assert parse("scaled_mm %0 %1 bfloat16").out_dtype == torch.bfloat16
    assert parse("mm; mul -1e-05").stages[0].number == -1e-05
    scaled = parse("addmm %0 0.5 2; where %1 %2; relu")
    assert (scaled.inputs, scaled.beta, scaled.alpha) == ((0,), 0.5, 2)
    assert (scaled.stages[0].mask, scaled.stages[0].operand) == (1, 2)
    assert parse("mm; keep; neg").keep
    assert [stage.name for stage in parse("mm; keep; neg").stages] == ["neg"]


@pytest.mark.parametrize(
    "product",
    [
        "",
        "add %0",
        "addmm",
        "mm %0",
        "addmm %0 1",
        "addmm %0 1 x",
        "mm; where %0",
        "mm; where 0 %1",
        "mm; relu %0",
        "mm; pow 2",
        "mm; add",
        "mm; add x",
        "mm; mul %x",
        "mm; masked_fill %0",
        "mm; to float33",
        "mm;",
        "mm; keep",
        "mm; relu; keep; neg",
        "mm; keep %0; neg",
        "grouped %0; keep; sum 2",
    ],
)
def test_malformed(product: str) -> None:
    with pytest.raises(ValueError, match="malformed product"):
        parse(product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "product",
    [
        "mm",
        "addmm %0",
        "mm; add %0; mul %1; sub 0.5; neg; div 3",
        "mm; to float32; add %0",
        "addmm %1; mul %0; to bfloat16",
        "addmm %0 0.5 -2; relu",
        "mm; where %2 %0; masked_fill %2 %3; neg",
        "mm; masked_fill %2 %0; to float32; relu",
        "mm; masked_fill %2 0.5; where %2 -1; add %0",
        "mm; masked_fill %2 -1e-05; where %2 3",
        "mm; keep; mul %1; neg; sub 0.5",
        "addmm %0; keep; where %2 -1; to float32",
    ],
)
@pytest.mark.parametrize("terms", [1, 3])
def test_evaluate_has_the_bits_of_the_graph(product: str, dtype: torch.dtype, terms: int) -> None:
    x = [seeded(i, 6, 4 + i, dtype=dtype) for i in range(terms)]
    w = [seeded(i + 5, 4 + i, 7, dtype=dtype) for i in range(terms)]
    operands = [seeded(8, 7, dtype=dtype), seeded(9, 6, 1, dtype=dtype), seeded(3, 6, 1) > 0]
    operands.append(torch.tensor(-1.0, dtype=dtype))
    expected = product_reference(x, w, operands, product)
    out = torch.full_like(expected, torch.nan)
    kept = evaluate(out, x, w, operands, product)
    assert torch.equal(out, expected)
    assert torch.equal(kept, with_kept(x, w, operands, product)[1])


def test_promotion_by_an_operand() -> None:
    """A float32 operand widens a bfloat16 product, as it does in the graph."""
    x, w = [seeded(0, 3, 4, dtype=torch.bfloat16)], [seeded(1, 4, 5, dtype=torch.bfloat16)]
    residual = [seeded(2, 3, 5)]
    expected = torch.mm(x[0], w[0]) + residual[0]
    assert expected.dtype == torch.float32
    out = torch.full_like(expected, torch.nan)
    evaluate(out, x, w, residual, "mm; add %0")
    assert torch.equal(out, expected)


def test_gradients() -> None:
    product = "addmm %0 0.5 1; neg; where %3 %2; mul %2; sub %1; masked_fill %4 %2; div 4; add %1"
    leaves = [
        seeded(i, *s, dtype=torch.float64)
        for i, s in enumerate([(3, 4), (3, 2), (4, 5), (2, 5), (5,), (3, 1)])
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    masks = [torch.tensor([[True], [False], [True]]), torch.tensor([False, True, False, False, True])]
    x, w, operands = leaves[:2], leaves[2:4], [*leaves[4:], seeded(9, 3, 5, dtype=torch.float64), *masks]
    p = product_reference(x, w, operands, product)
    grad = seeded(7, 3, 5, dtype=torch.float64)
    expected = torch.autograd.grad(p, leaves, grad)
    needs = [[True, True], [True, True], [True, True, False, False, False]]
    dx, dw, rest = product_backward(grad, x, w, operands, product, needs)
    assert rest[2:] == [None] * 3
    found: list[Tensor | None] = [*dx, *dw, *rest[:2]]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("product", "message"),
    [
        ("mm; mul %0", "no gradient for its operand %0"),
        ("mm; relu", "relu does not keep its input"),
        ("addmm %0 1 2", "scales the matmul"),
        ("mm; keep; neg", "for graphs behind autograd"),
    ],
)
def test_no_gradient(product: str, message: str) -> None:
    x, w, factor = torch.ones(2, 2), torch.ones(2, 2), torch.ones(2)
    with pytest.raises(RuntimeError, match=message):
        product_backward(torch.ones(2, 2), [x], [w], [factor], product, [[True], [True], [True]])
