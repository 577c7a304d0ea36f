"""Tails: parsing, references, and the op that has one over real ranks."""

import pytest
import torch

from autofuse.lowering.reference.tail import check_tail, parse, tail_reference
from tests.ops.dense import seeded


def test_parse() -> None:
    stages = parse(
        "add %0; keep; to float32; rms 1e-06 keep; standardize 1e-05; masked_fill %2 0.5; gelu tanh"
    )
    assert [s.name for s in stages] == ["add", "keep", "to", "rms", "standardize", "masked_fill", "gelu"]
    assert [s.kept for s in stages] == [0, 1, 0, 1, 0, 0, 0]
    assert parse("standardize 1e-05 keep; neg")[0].kept == 2
    assert (stages[3].number, stages[5].mask, stages[5].number) == (1e-06, 2, 0.5)
    assert parse("") == ()


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        ("pow 2", "unknown stage 'pow 2'"),
        ("add", "unknown stage 'add'"),
        ("add %x", "'%x' is not an operand"),
        ("add x", "'x' is neither a number nor an operand"),
        ("where 0 %1", "'0' is not an operand"),
        ("to float33", "'float33' is not a dtype"),
        ("gelu", "unknown stage 'gelu'"),
        ("rms", "unknown stage 'rms'"),
        ("project", "unknown stage 'project'"),
        ("project 2", "'2' is not an operand"),
        ("centre", "unknown stage"),
        ("centre %0 %1", "unknown stage"),
        ("rms %0", "neither a number"),
        ("rms 1e-6 keep keep", "unknown stage"),
        ("relu; keep", "it ends with keep"),
        ("relu;", "unknown stage ''"),
    ],
)
def test_malformed(tail: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"malformed tail .*{why}.*expected e.g."):
        parse(tail)


def test_operands_that_do_not_fit() -> None:
    one, mask = torch.ones(3, 4), torch.ones(4, dtype=torch.bool)
    check_tail((3, 4), [one, mask, torch.ones(3, 1)], "add %0; masked_fill %1 0; mul %2; rms 1", "op")
    with pytest.raises(ValueError, match="uses 2 operands, got 1"):
        check_tail((3, 4), [one], "add %0; mul %1", "op")
    with pytest.raises(ValueError, match="does not broadcast against"):
        check_tail((3, 1), [one], "add %0", "op")
    with pytest.raises(ValueError, match="expected bool"):
        check_tail((3, 4), [one, one], "where %0 %1", "op")
    with pytest.raises(ValueError, match="whole rows"):
        check_tail((3, 4), [], "rms 1", "op", whole_rows=False)
    with pytest.raises(ValueError, match="whole rows"):
        check_tail((3, 4), [one], "project %0", "op", whole_rows=False)
    with pytest.raises(ValueError, match="uses 2 operands, got 1"):
        check_tail((3, 4), [one], "project %0 %1", "op")
    with pytest.raises(ValueError, match=r"project takes float32, got torch\.bfloat16"):
        tail_reference(one.bfloat16(), [one], "project %0")
    with pytest.raises(ValueError, match=r"rms takes float32, got torch\.bfloat16"):
        tail_reference(one.bfloat16(), [], "rms 1")


def test_norms_are_those_of_torch() -> None:
    x, residual, weight, bias = (seeded(i, *s) for i, s in enumerate([(5, 16), (5, 16), (16,), (16,)]))
    normed, kept, scale = tail_reference(x, [residual, weight], "add %0; keep; rms 1e-06 keep; mul %1")
    assert torch.equal(kept, x + residual)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(kept, (16,), weight, 1e-6))
    torch.testing.assert_close(scale, (kept.square().mean(1, True) + 1e-6).rsqrt())
    normed, mean, scale = tail_reference(x, [weight, bias], "standardize 1e-05 keep; mul %0; add %1")
    wanted, *statistics = torch.native_layer_norm(x, [16], weight, bias, 1e-5)
    torch.testing.assert_close([normed, mean, scale], [wanted, *statistics])


def test_backwards_of_norms_are_those_of_torch() -> None:
    x, g, weight = seeded(0, 5, 16).requires_grad_(), seeded(1, 5, 16), seeded(2, 16)
    r = (x.detach().square().mean(1, True) + 1e-6).rsqrt()
    (wanted,) = torch.autograd.grad(torch.nn.functional.rms_norm(x, (16,), weight, 1e-6), x, g)
    (found,) = tail_reference(g, [weight, x.detach(), r], "mul %0; project %1 %2; mul %2")
    torch.testing.assert_close(found, wanted)
    _, mean, r = torch.native_layer_norm(x.detach(), [16], weight, None, 1e-5)
    (wanted,) = torch.autograd.grad(torch.nn.functional.layer_norm(x, (16,), weight, None, 1e-5), x, g)
    normed = (x.detach() - mean) * r
    (found,) = tail_reference(g, [weight, normed, r], "mul %0; centre %1; mul %2")
    torch.testing.assert_close(found, wanted)


def test_results_are_tensors_of_their_own() -> None:
    value, kept = tail_reference(seeded(0, 2, 3), [], "relu; keep; to float32")
    assert value.data_ptr() != kept.data_ptr()


@pytest.mark.parametrize(
    "tail", ["where %0 %1", "where %0 0.5", "rsub %1; keep; to bfloat16", "relu; add %1"]
)
def test_results_are_row_major(tail: str) -> None:
    """As kernels store them, whatever the strides of the operands."""
    mask, other = seeded(1, 4, 3).t() > 0, seeded(2, 4, 3).t()
    for t in tail_reference(seeded(0, 3, 4), [mask, other], tail):
        assert t.stride() == (4, 1)
