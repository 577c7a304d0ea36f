"""The rules by which an optimizer changes a parameter, and the numbers that a rule takes a tensor.

    p: parameter   g: gradient   m, v, most: states, initially 0   t: number of the update, from 1 on

    adam      g += decay * p;  m += (1 - b1) * (g - m);  v = b2 * v + (1 - b2) * g^2
              p = keep * p - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)
              Adam: keep = 1, decay = weight decay.  AdamW: keep = 1 - lr * weight decay, decay = 0
    amsgrad   most = max(most, v), which stands in place of v in the update of p
    sgd       p -= lr * (g + decay * p)
    momentum  g += decay * p;  m = keep * m + take * g;  p -= lr * (of_g * g + of_m * m)
              t = 1: keep = 0, take = 1.  Later: keep = momentum, take = 1 - dampening
              Nesterov: of_g = 1, of_m = momentum.  Else: of_g = 0, of_m = 1
    lamb      m, v as in adam without decay
              u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay * p
              p -= lr * trust * u,  trust = min(|p|, most) / |u| of the tensor
              EXCLUDED: trust = 1.  GUARDED: 1 if a norm is 0.  UNGUARDED: as division by 0 has it

All is computed in float32 (float64 for parameters of float64). `sign`, by which every rule multiplies the
gradient before all else, is -1 to maximize, and any other factor where a graph has one. The
last number of a row is for nothing but the comparison of rows over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

NUMBERS = 12
"""Length of the row of a tensor."""

LIMITS = 4
"""How many numbers `factor` takes."""

_KEEP, _DECAY, _TAKE1, _KEEP2, _TAKE2, _ROOT, _EPS, _STEP, LR, ADAPTS, SIGN, SEAL = range(12)
_MOST = 0
_SGD_LR, _SGD_DECAY, _M_KEEP, _M_TAKE, _OF_G, _OF_M = range(6)

EXCLUDED, GUARDED, UNGUARDED = 0.0, 1.0, 2.0
"""How LAMB adapts a tensor."""


@dataclass(frozen=True)
class Rule:
    """A rule. `update(p, g, states, row)` changes p and states in place; that of LAMB returns u instead."""

    code: int
    states: tuple[str, ...]
    update: Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[float]], Tensor | None]
    by_norms: bool = False


Number: TypeAlias = float | Tensor
"""Or fp64 tensors of as many elements as there are parameters."""


def adam_numbers(
    t: Number,
    lr: Number,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool = False,
) -> list[Number]:
    """The row of a tensor, for `adam` and `amsgrad`."""
    keep: Number = 1 - lr * weight_decay if decoupled else 1.0
    return [
        keep,
        0.0 if decoupled else weight_decay,
        *_moments(t, betas, eps),
        lr / (1 - betas[0] ** t),
        lr,
        0.0,
        -1.0 if maximize else 1.0,
        0.0,
    ]


def lamb_numbers(
    t: Number,
    lr: Number,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adapts: bool,
    maximize: bool = False,
) -> list[Number]:
    """The row of a tensor, for `lamb`. `adapts`: it is not excluded."""
    first = 1 / (1 - betas[0] ** t)
    sign = -1.0 if maximize else 1.0
    how = GUARDED if adapts else EXCLUDED
    return [math.inf, weight_decay, *_moments(t, betas, eps), first, lr, how, sign, 0.0]


def sgd_numbers(
    t: Number,
    lr: Number,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool = False,
) -> list[Number]:
    """The row of a tensor, for `sgd` and `momentum`."""
    keep, take = _first(t, 0.0, momentum), _first(t, 1.0, 1 - dampening)
    of_g, of_m = (1.0, momentum) if nesterov else (0.0, 1.0)
    return [lr, weight_decay, keep, take, of_g, of_m, 0.0, 0.0, lr, 0.0, -1.0 if maximize else 1.0, 0.0]


def _first(t: Number, value: float, later: float) -> Number:
    if isinstance(t, Tensor):
        return torch.where(t == 1, value, later)
    return value if t == 1 else later


def _moments(t: Number, betas: tuple[float, float], eps: float) -> list[Number]:
    rest = 1 - betas[1] ** t
    root = rest.sqrt() if isinstance(rest, Tensor) else math.sqrt(rest)
    return [1 - betas[0], betas[1], 1 - betas[1], 1 / root, eps]


def trust(row: Sequence[float], of_p: float, of_u: float) -> float:
    """That of LAMB, from the squares of two norms."""
    if row[ADAPTS] == EXCLUDED or (row[ADAPTS] == GUARDED and not (of_p > 0 and of_u > 0)):
        return 1.0
    norm = min(math.sqrt(of_p), row[_MOST])
    return norm / math.sqrt(of_u) if of_u else norm * math.inf


def clip(norm: float, max_norm: float) -> float:
    """The factor of all gradients, as in `torch.nn.utils.clip_grad_norm_`; a `max_norm` of 0 clips
    nothing."""
    return factor((max_norm, 1e-6, 0.0, 1.0), norm) if max_norm else 1.0


def factor(limits: Sequence[float], norm: float) -> float:
    """That of all gradients by their norm: `min(most, bound / (max(norm, floor) + eps))`, of limits
    `(bound, eps, floor, most)`."""
    bound, eps, floor, most = limits
    divisor = max(norm, floor) + eps
    found = bound / divisor if divisor else bound * math.inf
    return math.nan if math.isnan(norm) or math.isnan(found) else min(most, found)


def _adam(p: Tensor, g: Tensor, states: Sequence[Tensor], row: Sequence[float]) -> None:
    second = _advance(g.add(p, alpha=row[_DECAY]), states, row)
    if len(states) > 2:
        second = torch.maximum(states[2], second, out=states[2])
    p.mul_(row[_KEEP]).addcdiv_(states[0], second.sqrt().mul_(row[_ROOT]).add_(row[_EPS]), value=-row[_STEP])


def _lamb(p: Tensor, g: Tensor, states: Sequence[Tensor], row: Sequence[float]) -> Tensor:
    second = _advance(g, states, row)
    u = row[_STEP] * states[0] / (second.sqrt() * row[_ROOT] + row[_EPS])
    return u.add_(p, alpha=row[_DECAY])


def _advance(g: Tensor, states: Sequence[Tensor], row: Sequence[float]) -> Tensor:
    m, v = states[:2]
    m.lerp_(g, row[_TAKE1])
    return v.mul_(row[_KEEP2]).addcmul_(g, g, value=row[_TAKE2])


def _sgd(p: Tensor, g: Tensor, states: Sequence[Tensor], row: Sequence[float]) -> None:
    p.sub_(g.add(p, alpha=row[_SGD_DECAY]), alpha=row[_SGD_LR])


def _momentum(p: Tensor, g: Tensor, states: Sequence[Tensor], row: Sequence[float]) -> None:
    (m,) = states
    g = g.add(p, alpha=row[_SGD_DECAY])
    m.mul_(row[_M_KEEP]).add_(g, alpha=row[_M_TAKE])
    p.sub_(g * row[_OF_G] + m * row[_OF_M], alpha=row[_SGD_LR])


RULES = {
    "adam": Rule(0, ("exp_avg", "exp_avg_sq"), _adam),
    "amsgrad": Rule(1, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), _adam),
    "sgd": Rule(2, (), _sgd),
    "momentum": Rule(3, ("momentum_buffer",), _momentum),
    "lamb": Rule(4, ("exp_avg", "exp_avg_sq"), _lamb, by_norms=True),
}
