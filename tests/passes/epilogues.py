"""What may lie between a matmul and the reduction behind it, and sums of several matmuls."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .dense import AR, BF16, RS, D, H, fuses, plain, reduced, scattered, stays
from .harness import Program


def after(epilogue: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`AR(epilogue(x @ w, ...))`."""

    def fn(x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        return reduced(epilogue(F.linear(x, w), *rest))

    return fn


# --- pointwise ----------------------------------------------------------------------------------------


def masked_rows(y: Tensor, m: Tensor) -> Tensor:
    return y.masked_fill((m > 0)[..., None], 0.0)


def masked_rows_scattered(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return scattered(masked_rows(F.linear(x, w), m), 1)


def masked_elements(y: Tensor, m: Tensor) -> Tensor:
    return y.masked_fill(m > 0, -1.0)


def where_else_zero(y: Tensor, m: Tensor) -> Tensor:
    return torch.where((m > 0)[..., None], y, 0.0)


def where_else_residual(y: Tensor, m: Tensor, r: Tensor) -> Tensor:
    return torch.where((m > 0)[..., None], r, y) * 2


def masked_by_what_is_wider(y: Tensor, m: Tensor) -> Tensor:
    """The mask is no row, column or matrix of the matmul."""
    return torch.where(m > 0, y, 0.0)


def dropout_of_0(y: Tensor) -> Tensor:
    return F.dropout(y, 0.0, True)


def mask_times(y: Tensor, m: Tensor) -> Tensor:
    return y * (m > 0) * 2.0


def times_scalar(y: Tensor, s: Tensor) -> Tensor:
    return y * s


def residual_minus(y: Tensor, r: Tensor) -> Tensor:
    return r - y


def one_minus(y: Tensor) -> Tensor:
    return 1.0 - y


def plus_twice(y: Tensor, r: Tensor) -> Tensor:
    return torch.add(y, r, alpha=2)


def to_bf16_and_back(y: Tensor) -> Tensor:
    return y.bfloat16().float()


def softmax(y: Tensor) -> Tensor:
    return y.softmax(-1)


# --- sums of matmuls ----------------------------------------------------------------------------------


def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return reduced(F.linear(x, w) + F.linear(F.linear(x, a), b) * 0.5)


def lora_first(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return reduced(F.linear(F.linear(x, a) * 2, b) + F.linear(x, w))


def lora_with_bias(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return scattered(F.linear(x, w, bias) + 0.5 * F.linear(F.linear(x, a), b))


def tree(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return reduced((F.linear(x, a) + F.linear(x, b)) + (F.linear(x, c) + F.linear(x, d)))


def biased_sum(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return reduced(F.linear(x, a, bias) + F.linear(x, b, bias))


def weighted_sum(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return reduced(F.linear(x, a) * 0.25 + F.linear(x, b) * 0.75)


def difference(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return reduced(F.linear(x, a) - F.linear(x, b))


def gated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return reduced(F.linear(x, a) * F.linear(x, b))


def loop_with_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return reduced(torch.stack([x[i] @ w[i] + b[i] for i in range(3)]))


def top_k_sum(x: Tensor, w: Tensor, weights: Tensor) -> Tensor:
    return reduced((F.linear(x, w).unflatten(0, (4, 2)) * weights[..., None]).sum(1))


def moved_residual(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    """The batch comes behind the sequence, as in the residual."""
    return scattered(F.linear(x, w).transpose(0, 1) + residual)


def moved_rows_masked(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    return reduced(F.linear(x, w).transpose(1, 2).masked_fill(mask[..., :1].transpose(1, 2) > 0, 0.0))


def moved_heads_scaled(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return reduced(F.linear(x, w).unflatten(-1, (4, D // 4)).transpose(1, 2) * scale)


def squared(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    return reduced(y * y)


def squared_and_read(x: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Values from the matmul on are factors, and are read elsewhere."""
    y = F.linear(x, w)
    z = y + residual
    return reduced((z - y) * z), y.cos()


def half(x: Tensor, w: Tensor) -> Tensor:
    return reduced(F.linear(x, w)[:4])


def reordered_rows(x: Tensor, w: Tensor, order: Tensor) -> Tensor:
    return reduced(F.linear(x, w)[order.argsort()])


# --- sums of reductions -------------------------------------------------------------------------------


def two_reduced(x: Tensor, a: Tensor, z: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return r + reduced(F.linear(x, a, r[0, 0])) + reduced(F.linear(z, b, r[1, 1]))


def three_scattered(x: Tensor, a: Tensor, z: Tensor, b: Tensor) -> Tensor:
    first = scattered(F.linear(x, a), 1) + scattered(F.linear(z, b), 1)
    return first.relu() + first + scattered(F.linear(x, b), 1)


def one_is_read(x: Tensor, a: Tensor, z: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    first = reduced(F.linear(x, a))
    return first + reduced(F.linear(z, b)), first.relu()


def one_is_read_inside(x: Tensor, a: Tensor, z: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    first = F.linear(x, a)
    return reduced(first + r) + reduced(F.linear(z, b)), first.relu()


def sum_plus_mean(x: Tensor, a: Tensor, z: Tensor, b: Tensor) -> Tensor:
    return reduced(F.linear(x, a)) + reduced(F.linear(z, b), "avg")


def chained(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    first = reduced(F.linear(x, a))
    return first + reduced(F.linear(first, b))


X2, X3, W2, Y3, ROWS = (8, H), (2, 8, H), (D, H), (2, 8, D), (2, 8)
LORA = ((4, H), (D, 4))

PROGRAMS: dict[str, Program] = {
    "masked rows": fuses(AR, after(masked_rows), X3, W2, ROWS, worlds=(2, 4)),
    "masked rows, scattered": fuses(RS, masked_rows_scattered, X3, W2, ROWS, worlds=(2, 4)),
    "masked elements": fuses(AR, after(masked_elements), X3, W2, Y3),
    "where, else 0": fuses(AR, after(where_else_zero), X3, W2, ROWS),
    "where, else a residual": fuses(AR, after(where_else_residual), X3, W2, ROWS, Y3),
    "mask that is wider": stays("layout", after(masked_by_what_is_wider), X3, W2, (3, 2, 8, D)),
    "dropout of 0": fuses(AR, after(dropout_of_0), X3, W2),
    "mask times": fuses(AR, after(mask_times), X3, W2, Y3),
    "times a scalar": fuses(AR, after(times_scalar), X3, W2, lambda _: ()),
    "relu before": fuses(AR, after(torch.relu), X3, W2),
    "silu before": stays("extra_users", after(F.silu), X3, W2),  # a graph of several ops
    "softmax before": stays("no_compute", after(softmax), X3, W2),
    "neg": fuses(AR, after(torch.neg), X3, W2),
    "residual minus": fuses(AR, after(residual_minus), X3, W2, Y3),
    "one minus": fuses(AR, after(one_minus), X3, W2),
    "plus with alpha": stays("unsupported_variant", after(plus_twice), X3, W2, Y3),
    "to bf16 and back": fuses(AR, after(to_bf16_and_back), X3, W2, tolerance=0.01),
    "lora": fuses(AR, lora, X3, W2, *LORA),
    "lora first": fuses(AR, lora_first, X3, W2, *LORA),
    "lora with bias": fuses(RS, lora_with_bias, (8, 5, H), W2, *LORA, (D,)),
    "lora, bf16": Program(plain(lora, X3, W2, *LORA, dtype=BF16), {"inference": [AR]}, tolerance=0.02),
    "sum of four": fuses(AR, tree, X3, W2, W2, W2, W2),
    "biased sum": fuses(AR, biased_sum, X3, W2, W2, (D,)),
    "weighted sum": fuses(AR, weighted_sum, X3, W2, W2),
    "difference": fuses(AR, difference, X3, W2, W2),
    "gated": fuses(AR, gated, X3, W2, W2),
    "loop with bias": stays("no_compute", loop_with_bias, (3, 8, H), (3, H, D), (3, D)),
    "sum of the top k": stays("no_compute", top_k_sum, X2, W2, (4, 2)),
    "moved, residual": fuses(RS, moved_residual, X3, W2, (8, 2, D)),
    "moved, masked rows": fuses(AR, moved_rows_masked, X3, W2, Y3),
    "moved, scaled heads": stays("layout", moved_heads_scaled, X3, W2, (4, 1, 1)),
    "squared": stays("extra_users", squared, X3, W2),
    "squared and read": stays("extra_users", squared_and_read, X3, W2, Y3),
    "half of the rows": stays("layout", half, X2, W2),
    "reordered rows": stays("no_compute", reordered_rows, X2, W2, (8,)),
    "two reduced": fuses(AR, two_reduced, X3, W2, X3, W2, Y3, times=2, worlds=(2, 4)),
    "three scattered": fuses(RS, three_scattered, X3, W2, X3, W2, times=3),
    "two reduced, one is read": fuses(AR, one_is_read, X3, W2, X3, W2, times=2),
    "two reduced, one is read inside": fuses(AR, one_is_read_inside, X3, W2, X3, W2, Y3, times=2),
    "sum plus mean": fuses(AR, sum_plus_mean, X3, W2, X3, W2, times=2),
    "two reduced, chained": fuses(AR, chained, X3, (H, H), (H, H), times=2),
}
