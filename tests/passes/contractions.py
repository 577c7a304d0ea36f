"""Spellings of the matmul itself, and several matmuls on one side of a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dense import AG, AR, BF16, RS, D, H, fuses, gathered, plain, reduced, scattered, stays
from .gathered_products import MG
from .harness import Program

# --- matmul -> all_reduce, reduce_scatter -------------------------------------------------------------


def einsum(equation: str) -> Callable[..., Tensor]:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return reduced(torch.einsum(equation, x, w))

    return fn


def einsum_scattered(equation: str, dim: int) -> Callable[..., Tensor]:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return scattered(torch.einsum(equation, x, w), dim)

    return fn


def batched(x: Tensor, w: Tensor) -> Tensor:
    return reduced(torch.bmm(x, w))


def baddbmm(beta: float, alpha: float) -> Callable[..., Tensor]:
    def fn(b: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return reduced(torch.baddbmm(b, x, w, beta=beta, alpha=alpha))

    return fn


def addmm(beta: float, alpha: float) -> Callable[..., Tensor]:
    def fn(b: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return reduced(torch.addmm(b, x, w, beta=beta, alpha=alpha))

    return fn


def linear(x: Tensor, w: Tensor) -> Tensor:
    return reduced(F.linear(x, w))


def scaled_rows(collective: Callable[[Tensor], Tensor], bias: bool = False) -> Callable[..., Tensor]:
    """Dynamic quantisation to float8 with a scale for each row of x and of w, as torchao has it."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        (x8, a), (w8, b) = (_to_float8(t) for t in (x.view(-1, x.shape[-1]), w))
        added = w[:, 0].contiguous() if bias else None
        y = torch._scaled_mm(x8, w8.t(), a, b.t().contiguous(), added, out_dtype=x.dtype)
        return collective(y.view(*x.shape[:-1], -1))

    return fn


def _to_float8(t: Tensor) -> tuple[Tensor, Tensor]:
    scale = t.float().abs().amax(-1, keepdim=True) / 448
    return (t / scale).to(torch.float8_e4m3fn), scale


def matrix_vector(w: Tensor, x: Tensor) -> Tensor:
    return reduced(torch.mv(w, x))


def transposed_input(x: Tensor, w: Tensor) -> Tensor:
    """Torch makes this a batch of matmuls whose weight is expanded."""
    return reduced(F.linear(x.transpose(0, 1), w))


def transposed_input_scattered(x: Tensor, w: Tensor) -> Tensor:
    return scattered(F.linear(x.transpose(0, 1), w), 1)


def under_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        return reduced(F.linear(x, w))


# --- all_gather -> matmul -----------------------------------------------------------------------------


def gathered_einsum(equation: str, dim: int) -> Callable[..., Tensor]:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.einsum(equation, gathered(x, dim), w)

    return fn


def gathered_einsum_right(w: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("nk,bsk->bsn", w, gathered(x))


def gathered_addmm(b: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(b, gathered(x), w, beta=0.5, alpha=2)


def gathered_plus_matrix(b: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(b, gathered(x), w)


def gathered_transposed(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(gathered(x).transpose(0, 1), w)


def gathered_contracted(x: Tensor, w: Tensor) -> Tensor:
    return gathered(x).t() @ w


def gathered_right(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a weight."""
    return grad.t() @ gathered(x)


def gathered_weight(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, gathered(w))


def gathered_weight_columns(x: Tensor, w: Tensor) -> Tensor:
    return (x @ gathered(w, 1)).relu()


def gathered_weight_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, gathered(w), b)


def gathered_both_sides(x: Tensor) -> Tensor:
    whole = gathered(x)
    return whole @ whole.t()


def weight_of_gathered(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The first weight depends on the collective, the second does not."""
    whole = gathered(x)
    return whole @ (w * whole.mean()), whole @ v


def only_weight_of_gathered(x: Tensor, w: Tensor) -> Tensor:
    whole = gathered(x)
    return whole @ (w * whole.mean())


def part_of_gathered(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(gathered(x)[:-1], w)


def packed_qkv(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    q, k, v = F.linear(gathered(x, 1), w).split([8, 4, 4], -1)
    return q.relu(), k * 2, v


def gate_and_up(x: Tensor, w: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(gathered(x, 1), w).chunk(2, -1)
    return scattered(F.linear(F.silu(gate) * up, down), 1)


def three_gathers(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(gathered(x, 1), q), F.linear(gathered(x, 1), k).relu(), F.linear(gathered(x, 1), v)


def heads_of_one_weight(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    whole = gathered(x, 1)
    return tuple(F.linear(whole, part).unflatten(-1, (4, 2)).transpose(1, 2) for part in w.unbind(0))


def gathered_under_autocast(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", BF16):
        whole = gathered(x, 1)
        return F.linear(whole, q), F.linear(whole, k)


# --- both sides ---------------------------------------------------------------------------------------


def between_two(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return F.linear(reduced(F.linear(x, v)), w)


def gather_scatter(x: Tensor, w: Tensor) -> Tensor:
    return scattered(F.linear(gathered(x), w))


def gather_two_scatter(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return scattered(F.linear(F.linear(gathered(x), v).relu(), w))


X2, X3, W2, WT = (8, H), (2, 8, H), (D, H), (H, D)
G2, G3 = (4, H), (3, 5, H)
F8, F8W = (2, 8, 32), (48, 32)
BOTH = {"inference": [AG, RS]}


def scaled(fn: Callable[..., Tensor], pattern: str, **options: Any) -> Program:
    build = plain(fn, F8, F8W, dtype=BF16)
    return Program(build, {"inference": [pattern]}, tolerance=0.02, **options)


PROGRAMS: dict[str, Program] = {
    "einsum, transposed": fuses(AR, einsum("bsk,kn->nbs"), X3, WT),
    "einsum, heads": fuses(AR, einsum("bshd,ohd->bso"), (2, 8, 4, 6), (D, 4, 6)),
    "einsum, weight first": fuses(AR, einsum("kn,bsk->bsn"), WT, X3),
    "einsum, batch": stays("no_compute", einsum("emk,ekn->emn"), (3, 8, H), (3, H, D)),
    "einsum, scattered": fuses(RS, einsum_scattered("bshd,hdo->bso", 1), (2, 8, 4, 6), (4, 6, D)),
    "einsum, transposed and scattered": fuses(RS, einsum_scattered("bsk,nk->sbn", 0), X3, W2),
    "bmm of one": fuses(AR, batched, (1, 8, H), (1, H, D)),
    "bmm of three": stays("no_compute", batched, (3, 8, H), (3, H, D)),
    "baddbmm": fuses(AR, baddbmm(1, 1), (1, 1, D), (1, 8, H), (1, H, D)),
    "baddbmm, beta and alpha": fuses(AR, baddbmm(0.5, 2), (1, 8, D), (1, 8, H), (1, H, D)),
    "baddbmm of three": stays("unsupported_variant", baddbmm(1, 1), (3, 1, D), (3, 8, H), (3, H, D)),
    "addmm, beta and alpha": fuses(AR, addmm(0.5, 2), (D,), X2, WT),
    "addmm, beta 0": fuses(AR, addmm(0, 2), (D,), X2, WT),
    "addmm, column": fuses(AR, addmm(1, 1), (8, 1), X2, WT),
    "float8, scaled rows": scaled(scaled_rows(reduced), AR, worlds=(2, 4)),
    "float8, scaled rows, dynamic": scaled(scaled_rows(reduced), AR, dynamic=True),
    "float8, scaled rows, scattered": scaled(scaled_rows(lambda y: scattered(y, 1)), RS, worlds=(2, 4)),
    "float8, scaled rows, columns scattered": scaled(
        scaled_rows(lambda y: scattered(y.unflatten(-1, (3, 16)), -1)), RS
    ),
    "float8, scaled rows, gathered": scaled(scaled_rows(lambda y: gathered(y, 1)), MG),
    "float8, scaled rows, bias": Program(
        plain(scaled_rows(reduced, bias=True), F8, F8W, dtype=BF16),
        kept={"inference": ["unsupported_variant"]},
        tolerance=0.02,
    ),
    "vector": fuses(AR, linear, (H,), W2),
    "matrix times vector": stays("no_compute", matrix_vector, W2, (H,)),
    "transposed input": fuses(AR, transposed_input, X3, W2),
    "transposed input, scattered": fuses(RS, transposed_input_scattered, (8, 3, H), W2),
    "under autocast": fuses(AR, under_autocast, X3, W2, tolerance=0.02),
    "gathered einsum": fuses(AG, gathered_einsum("bsk,khe->bhse", 1), G3, (H, 4, 2)),
    "gathered einsum, heads": fuses(AG, gathered_einsum("bshd,hdo->bso", 1), (3, 5, 4, 6), (4, 6, D)),
    "gathered einsum, weight first": fuses(AG, gathered_einsum_right, W2, G3),
    "gathered addmm, beta and alpha": stays("unsupported_variant", gathered_addmm, (D,), G2, WT),
    "gathered plus matrix": fuses(AG, gathered_plus_matrix, lambda w: (4 * w, D), G2, WT),
    "gathered plus column": fuses(AG, gathered_plus_matrix, lambda w: (4 * w, 1), G2, WT),
    "gathered, transposed": fuses(AG, gathered_transposed, G3, W2),
    "gathered, contracted": fuses(AG, gathered_contracted, G2, lambda w: (4 * w, D)),
    "gathered on the right": fuses(AG, gathered_right, G2, lambda w: (4 * w, D)),
    "gathered weight": fuses(AG, gathered_weight, (5, H), W2, worlds=(2, 4)),
    "gathered weight, columns": fuses(AG, gathered_weight_columns, (5, H), WT),
    "gathered weight, bias": fuses(AG, gathered_weight_bias, (5, H), W2, lambda w: (D * w,), worlds=(2, 4)),
    "gathered on both sides": stays("extra_users", gathered_both_sides, G2),
    "weight of the gathered": stays("extra_users", only_weight_of_gathered, G2, WT),
    "one weight of the gathered": fuses(AG, weight_of_gathered, G2, WT, WT),
    "part of the gathered": stays("layout", part_of_gathered, G2, W2),
    "packed q k v": fuses(AG, packed_qkv, G3, W2),
    "gate and up": Program(plain(gate_and_up, (2, 4, H), (2 * D, H), WT), BOTH),
    "three gathers": fuses(AG, three_gathers, G3, W2, W2, (4, H), times=3),
    "heads of one weight": fuses(AG, heads_of_one_weight, G3, (3, 8, H)),
    "gathered, autocast": fuses(AG, gathered_under_autocast, G3, W2, W2, tolerance=0.02),
    "between two matmuls": fuses(AR, between_two, X3, W2, WT),
    "gather, matmul, scatter": Program(plain(gather_scatter, G2, W2), BOTH),
    "gather, two matmuls, scatter": Program(plain(gather_two_scatter, G2, W2, WT), BOTH),
}
