"""The optimizers: arguments and defaults as in `torch.optim`, and `sliced.Common`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from typing_extensions import Unpack

from autofuse.lowering import update_rules
from autofuse.lowering.update_rules import Term
from autofuse.optim.sliced import Common, SlicedOptimizer

# Options seldom change, and every step asks for their terms. Arguments are floats and bools: equal ones have
# equal terms.
adam_terms = lru_cache(maxsize=256)(update_rules.adam_terms)
lamb_terms = lru_cache(maxsize=256)(update_rules.lamb_terms)
sgd_terms = lru_cache(maxsize=256)(update_rules.sgd_terms)


class Adam(SlicedOptimizer):
    """As `torch.optim.Adam`. `params`: parameters, named parameters, or param groups.

    Weight decay is added to the gradient; with `decoupled_weight_decay` it is that of AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        **common: Unpack[Common],
    ) -> None:
        _check(lr=lr, eps=eps, weight_decay=weight_decay)
        _check_betas(betas)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults, common)

    def _rule(self, options: dict[str, Any]) -> str:
        return "amsgrad" if options["amsgrad"] else "adam"

    def _terms(self, options: dict[str, Any]) -> Sequence[Term]:
        return adam_terms(
            _betas(options), float(options["eps"]), float(options["weight_decay"]),
            bool(options["decoupled_weight_decay"]), bool(options["maximize"]),
        )  # fmt: skip


class AdamW(Adam):
    """As `torch.optim.AdamW`: weight decay does not pass through the moments."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True,
            **common,
        )  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's: states of Adam may be loaded."""
        super().__setstate__(state)
        for options in self.param_groups:
            options["decoupled_weight_decay"] = True


class SGD(SlicedOptimizer):
    """As `torch.optim.SGD`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        _check(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, common)

    def _rule(self, options: dict[str, Any]) -> str:
        return "momentum" if options["momentum"] else "sgd"

    def _terms(self, options: dict[str, Any]) -> Sequence[Term]:
        return sgd_terms(
            float(options["momentum"]), float(options["dampening"]), float(options["weight_decay"]),
            bool(options["nesterov"]), bool(options["maximize"]),
        )  # fmt: skip


class LAMB(SlicedOptimizer):
    """LAMB (You et al., 2020): the direction of AdamW, scaled to the norm of the parameter.

    With u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * p: p -= lr * |p| / |u| * u. The
    factor is 1 where a norm is 0, and in param groups with `adapt=False` (usual for biases and norms).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
        *,
        maximize: bool = False,
        **common: Unpack[Common],
    ) -> None:
        _check(lr=lr, eps=eps, weight_decay=weight_decay)
        _check_betas(betas)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt,
            "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, common)

    def _rule(self, options: dict[str, Any]) -> str:
        return "lamb"

    def _terms(self, options: dict[str, Any]) -> Sequence[Term]:
        return lamb_terms(
            _betas(options), float(options["eps"]), float(options["weight_decay"]), bool(options["adapt"]),
            bool(options["maximize"]),
        )  # fmt: skip


def _betas(options: dict[str, Any]) -> tuple[float, float]:
    first, second = options["betas"]
    return float(first), float(second)


def _check(**numbers: Any) -> None:
    for name, value in numbers.items():
        if not float(value) >= 0:
            raise ValueError(f"Invalid {name}: {value}")


def _check_betas(betas: tuple[float, float]) -> None:
    for beta in betas:
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid betas: {betas}")
