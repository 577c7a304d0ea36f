"""Fits constants to measurements: damped Gauss-Newton on logarithms of predicted over measured values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FAR_OFF = 0.3
"""Errors of the logarithm beyond this count linearly, so that one disturbed measurement has little weight."""
MOST_STEPS = 60
SMALL = 1e-4
"""A step along a constant, for slopes."""


def nearest(
    residuals: Callable[[Tensor], Tensor],
    slopes: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    prior: Tensor,
    guess: Tensor | None = None,
) -> Tensor:
    """The logarithms of the constants with the least residuals.

    Args:
        residuals: returns the logarithms of predicted over measured times, given those of the constants.
        slopes: returns their derivatives, given the constants and the residuals there.
        start: the constants to which the fit is drawn.
        prior: how strongly each is drawn there, in units of one measurement that is off by as much.
        guess: where the search begins, by default at `start`.
    """

    def cost(r: Tensor, logs: Tensor) -> float:
        huber = torch.nn.functional.huber_loss(r, torch.zeros_like(r), reduction="sum", delta=FAR_OFF)
        return float(huber + ((prior * (logs - start)).square()).sum() / 2)

    logs, damping = start if guess is None else guess, 1e-2
    count = len(start)
    r = residuals(logs)
    best = cost(r, logs)
    for _ in range(MOST_STEPS):
        weights = (FAR_OFF / r.abs().clamp(min=FAR_OFF)).sqrt()
        rows = [weights[:, None] * slopes(logs, r), torch.diag(prior)]
        right = [-weights * r, prior * (start - logs)]
        improved = False
        while not improved and damping < 1e6:
            a = torch.cat([*rows, damping * torch.eye(count, dtype=torch.float64)])
            b = torch.cat([*right, torch.zeros(count, dtype=torch.float64)])
            step = torch.linalg.lstsq(a, b[:, None]).solution[:, 0].clamp(-1, 1)
            new = residuals(logs + step)
            value = cost(new, logs + step)
            improved = value < best
            damping = damping / 5 if improved else damping * 5
        if not improved:
            break
        gained = best - value
        logs, r, best = logs + step, new, value
        if gained < 1e-6 * best:
            break
    return logs
