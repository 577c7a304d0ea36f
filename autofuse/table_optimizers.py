"""`autofuse.optimizer_in_backward`: the backward of embedding bags updates their tables, row by row.

The gradient of a table is never stored, and only rows that a bag names are read or written. Between ranks the
update is part of the exchange (`all_to_all_embedding_bag_update`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

import autofuse.lowering.ops  # noqa: F401  (defines torch.ops.autofuse)
from autofuse.native_kernels.cpu import DTYPES

_OP = "optimizer_in_backward"
_POOLINGS = {"sum": 0, "mean": 1}
_OWN = ("table_state", "table_rates")


class SGD:
    """`w[i] -= lr * g[i]` for every row i that a bag looks up. g[i] is the sum of all gradients of the row,
    in float32.

    `lr` may be set at any time. The new value holds from the next backward on, without another compilation.
    """

    rowwise = False

    def __init__(self, lr: float) -> None:
        self._modules: WeakSet[UpdatedEmbeddingBag] = WeakSet()
        self.eps = 0.0
        self.lr = lr

    @property
    def lr(self) -> float:
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._lr = _number("lr", lr)
        for module in self._modules:
            module.table_rates[0].fill_(self._lr)


class RowwiseAdagrad(SGD):
    """`s[i] += mean(g[i]^2)`, then `w[i] -= lr * g[i] / (sqrt(s[i]) + eps)`; s: float32 [V], initially 0.

    s is the buffer `table_state` of a bag, and part of the bag's `state_dict`.
    """

    rowwise = True

    def __init__(self, lr: float, eps: float = 1e-8) -> None:
        super().__init__(lr)
        self.eps = _number("eps", eps)


def optimizer_in_backward(
    bags: nn.EmbeddingBag | nn.ModuleList | Iterable[nn.EmbeddingBag], optimizer: SGD
) -> None:
    """From now on the backward of these bags updates their weights by `optimizer`, in place.

    The update is exact: all terms of a row are added in float32, then the row is updated once and rounded
    once. No other row changes. There is no `.grad`: `weight.requires_grad` becomes False, so that optimizers
    and DDP leave the weights alone. Every use of a bag in a forward is an update of its own. This works in
    eager and in `torch.compile` with any backend; with backend "autofuse" it is part of the exchange of
    gradients.

    Args:
        bags: one EmbeddingBag module or several, such as a ModuleList, of mode "sum" or "mean". Weights
            are contiguous, float32, bfloat16 or float16, each with memory of its own. Offsets,
            `include_last_offset`, `padding_idx` and `per_sample_weights` (without a gradient) as usual.
        optimizer: `autofuse.SGD` or `autofuse.RowwiseAdagrad`; several calls may share one.

    Raises ValueError for bags that cannot be updated in their backward; then none of them has changed.
    """
    found: list[Any] = list(bags) if isinstance(bags, Iterable) else [bags]
    if not isinstance(optimizer, SGD):
        raise ValueError(f"{_OP}: expected autofuse.SGD or autofuse.RowwiseAdagrad, got {optimizer!r}")
    owners: dict[int, int] = {}
    for i, bag in enumerate(found):
        _check(bag, i)
        first = owners.setdefault(bag.weight.untyped_storage().data_ptr(), i) if bag.weight.numel() else i
        if first != i:
            raise ValueError(
                f"{_OP}: bags {first} and {i} share the memory of their weights; call one module twice, or "
                "give each memory of its own"
            )
    for bag in found:
        optimizer._modules.add(UpdatedEmbeddingBag.of(bag, optimizer))


class UpdatedEmbeddingBag(nn.EmbeddingBag):
    """An `nn.EmbeddingBag` after `optimizer_in_backward`.

    table_state: float32 [V] with RowwiseAdagrad, None with SGD. table_rates: float32 [2], lr and eps.
    """

    table_state: Tensor | None
    table_rates: Tensor
    anchor: Tensor
    """Requires a gradient, so that autograd calls the backward. It never gets one."""

    @classmethod
    def of(cls, bag: nn.EmbeddingBag, optimizer: SGD) -> UpdatedEmbeddingBag:
        """The bag itself, whose class becomes this one."""
        weight = bag.weight
        weight.requires_grad_(False)
        weight.grad = None
        bag.__class__ = cls
        assert isinstance(bag, cls)
        state = (
            torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if optimizer.rowwise else None
        )
        rates = torch.tensor([optimizer.lr, optimizer.eps], dtype=torch.float32, device=weight.device)
        bag.register_buffer("table_state", state)
        bag.register_buffer("table_rates", rates, persistent=False)
        bag._renew_anchor()
        return bag

    def _renew_anchor(self) -> None:
        self.anchor = torch.zeros(0, device=self.weight.device, requires_grad=True)

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """As `nn.EmbeddingBag`."""
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise ValueError(
                f"{_OP}: per_sample_weights require a gradient, which there is none of; detach them"
            )
        if per_sample_weights is not None and (self.mode != "sum" or per_sample_weights.shape != input.shape):
            raise ValueError(
                f"{_OP}: per_sample_weights need mode 'sum' and the shape of indices, {list(input.shape)}; "
                f"got mode {self.mode!r} and {list(per_sample_weights.shape)}"
            )
        last = self.include_last_offset
        if input.dim() == 2 and offsets is None:
            last = False
            offsets = torch.arange(0, input.numel(), input.shape[1], dtype=input.dtype, device=input.device)
            input = input.reshape(-1)
        elif input.dim() != 1 or offsets is None or offsets.dim() != 1:
            raise ValueError(
                f"{_OP}: expected indices [B, L], or [n] with a vector of offsets; got indices "
                f"{list(input.shape)} and offsets {None if offsets is None else list(offsets.shape)}"
            )
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1)
        if offsets.dtype != input.dtype:
            input, offsets = input.long(), offsets.long()
        pooled: Tensor = torch.ops.autofuse.embedding_bag_with_update(
            self.anchor, self.weight, self.table_state, self.table_rates, input, offsets, per_sample_weights,
            _POOLINGS[self.mode], last, -1 if self.padding_idx is None else self.padding_idx,
        )  # fmt: skip
        return pooled

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> UpdatedEmbeddingBag:
        """State and rates move with the module, but stay float32."""
        own = {name: self._buffers.pop(name) for name in _OWN}
        super()._apply(fn, recurse)
        for name, tensor in own.items():
            moved = None if tensor is None else fn(tensor)
            if moved is not None and tensor is not None and moved.dtype != tensor.dtype:
                moved = tensor.to(moved.device)
            self._buffers[name] = moved
        self._renew_anchor()
        return self


def _check(bag: Any, number: int) -> None:
    """Raises ValueError for bags that cannot be updated in their backward."""
    if isinstance(bag, UpdatedEmbeddingBag):
        raise ValueError(
            f"{_OP}: bag {number} has an optimizer in its backward; to change lr, set optimizer.lr"
        )
    if type(bag) is not nn.EmbeddingBag:
        raise ValueError(f"{_OP}: bag {number} is {type(bag).__name__}; expected torch.nn.EmbeddingBag")
    weight = bag.weight
    problems = {
        f"mode {bag.mode!r}; use 'sum' or 'mean'": bag.mode not in _POOLINGS,
        "scale_grad_by_freq; leave it out": bag.scale_grad_by_freq,
        "sparse=True, but there will be no gradient; leave it out": bag.sparse,
        "max_norm, which changes rows in the forward; leave it out": bag.max_norm is not None,
        f"{weight.dtype}; use float32, bfloat16 or float16": weight.dtype not in DTYPES,
        "weight that is not contiguous; make it so": not weight.is_contiguous(),
        "weight without columns; leave the bag out": not weight.shape[1],
    }
    for text, holds in problems.items():
        if holds:
            raise ValueError(f"{_OP}: bag {number} has {text}")


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r}: expected a finite number that is not negative")
    return float(value)
