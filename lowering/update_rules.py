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

_KEEP, _DECAY, _TAKE1, _KEEP2, _TAKE2, _ROOT, _EPS, _STEP, LR, ADAPTS, SIGN, SEAL = range(12)
_MOST = 0
_SGD_LR, _SGD_DECAY, _M_KEEP, _M_TAKE, _OF_G, _OF_M = range(6)

EXCLUDED, GUARDED, UNGUARDED = 0.0, 1.0, 2.0
"""How LAMB adapts a tensor."""

Row: TypeAlias = Sequence[float] | Sequence[Tensor]


@dataclass(frozen=True)
class Rule:
    """A rule. `update(p, g, states, row)` changes p and states in place; that of LAMB returns u instead.

    row: numbers, or tensors of no dims where p lies, for which nobody waits.
    """

    code: int
    states: tuple[str, ...]
    update: Callable[[Tensor, Tensor, Sequence[Tensor], Row], Tensor | None]
    by_norms: bool = False


@dataclass(frozen=True)
class Term:
    """A number as it depends on the update: (constant + of_lr * lr) / (1 - beta^t)^power, or `first` in the
    first update if that is no nan. t: number of the update, from 1 on; power: 0, 1/2 or 1."""

    constant: float
    of_lr: float = 0.0
    beta: float = 0.0
    power: float = 0.0
    first: float = math.nan

    def at(self, t: int, lr: float) -> float:
        if t == 1 and not math.isnan(self.first):
            return self.first
        value = self.constant + self.of_lr * lr
        return value if not self.power else value / (1 - self.beta**t) ** self.power


def numbers_at(terms: Sequence[Term], t: int, lr: float) -> list[float]:
    """The row of a tensor for update t, with this learning rate."""
    return [term.at(t, lr) for term in terms]


_NONE, _LR = Term(0.0), Term(0.0, 1.0)


def adam_terms(
    betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool, maximize: bool = False
) -> list[Term]:
    """Those of `adam` and `amsgrad`."""
    keep, decay = (-weight_decay, 0.0) if decoupled else (0.0, weight_decay)
    step = Term(0.0, 1.0, betas[0], 1.0)
    return [Term(1.0, keep), Term(decay), *_moments(betas, eps), step, _LR, _NONE, _sign(maximize), _NONE]


def lamb_terms(
    betas: tuple[float, float], eps: float, weight_decay: float, adapts: bool, maximize: bool = False
) -> list[Term]:
    """Those of `lamb`. `adapts`: the tensor is not excluded."""
    how, first = Term(GUARDED if adapts else EXCLUDED), Term(1.0, 0.0, betas[0], 1.0)
    most = Term(math.inf)
    return [most, Term(weight_decay), *_moments(betas, eps), first, _LR, how, _sign(maximize), _NONE]


def sgd_terms(
    momentum: float, dampening: float, weight_decay: float, nesterov: bool, maximize: bool = False
) -> list[Term]:
    """Those of `sgd` and `momentum`."""
    keep, take = Term(momentum, first=0.0), Term(1 - dampening, first=1.0)
    of_g, of_m = (Term(1.0), Term(momentum)) if nesterov else (_NONE, Term(1.0))
    return [
        _LR, Term(weight_decay), keep, take, of_g, of_m, _NONE, _NONE, _LR, _NONE, _sign(maximize), _NONE
    ]  # fmt: skip


def _sign(maximize: bool) -> Term:
    return Term(-1.0 if maximize else 1.0)


def _moments(betas: tuple[float, float], eps: float) -> list[Term]:
    root = Term(1.0, 0.0, betas[1], 0.5)
    return [Term(1 - betas[0]), Term(betas[1]), Term(1 - betas[1]), root, Term(eps)]


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


def _adam(p: Tensor, g: Tensor, states: Sequence[Tensor], row: Row) -> None:
    second = _advance(_plus(g, p, row[_DECAY]), states, row)
    if len(states) > 2:
        second = torch.maximum(states[2], second, out=states[2])
    divisor, step = second.sqrt().mul_(row[_ROOT]).add_(row[_EPS]), row[_STEP]
    p.mul_(row[_KEEP])
    if isinstance(step, Tensor):
        p.sub_(states[0] / divisor * step)
    else:
        p.addcdiv_(states[0], divisor, value=-step)


def _lamb(p: Tensor, g: Tensor, states: Sequence[Tensor], row: Row) -> Tensor:
    second = _advance(g, states, row)
    u = row[_STEP] * states[0] / (second.sqrt() * row[_ROOT] + row[_EPS])
    return _add(u, p, row[_DECAY])


def _advance(g: Tensor, states: Sequence[Tensor], row: Row) -> Tensor:
    (m, v), take = states[:2], row[_TAKE2]
    m.lerp_(g, row[_TAKE1])
    v.mul_(row[_KEEP2])
    return v.add_(g * g * take) if isinstance(take, Tensor) else v.addcmul_(g, g, value=take)


def _sgd(p: Tensor, g: Tensor, states: Sequence[Tensor], row: Row) -> None:
    _add(p, _plus(g, p, row[_SGD_DECAY]), -row[_SGD_LR])


def _momentum(p: Tensor, g: Tensor, states: Sequence[Tensor], row: Row) -> None:
    (m,) = states
    g = _plus(g, p, row[_SGD_DECAY])
    _add(m.mul_(row[_M_KEEP]), g, row[_M_TAKE])
    _add(p, g * row[_OF_G] + m * row[_OF_M], -row[_SGD_LR])


def _plus(a: Tensor, b: Tensor, times: float | Tensor) -> Tensor:
    """a + times * b"""
    return a + b * times if isinstance(times, Tensor) else a.add(b, alpha=times)


def _add(a: Tensor, b: Tensor, times: float | Tensor) -> Tensor:
    """a += times * b"""
    return a.add_(b * times) if isinstance(times, Tensor) else a.add_(b, alpha=times)


RULES = {
    "adam": Rule(0, ("exp_avg", "exp_avg_sq"), _adam),
    "amsgrad": Rule(1, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), _adam),
    "sgd": Rule(2, (), _sgd),
    "momentum": Rule(3, ("momentum_buffer",), _momentum),
    "lamb": Rule(4, ("exp_avg", "exp_avg_sq"), _lamb, by_norms=True),
}
