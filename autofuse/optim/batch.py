"""Parameters that one call of `reduce_update_gather` updates, with this rank's slice of their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

import autofuse.lowering.ops  # noqa: F401  (defines torch.ops.autofuse)
from autofuse.lowering.buckets import buckets_of
from autofuse.lowering.direct import PLAIN, direct
from autofuse.lowering.torch_internals import has_values, nobody_intervenes, placements, resolve_group
from autofuse.lowering.update_rules import RULES
from autofuse.optim.on_device import OnDevice

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MASTER = "master"


class Batch:
    """Attributes:
    params, names: in one order on all ranks. groups: number of the param group of each.
    keys: names of the states, in the order of `states`; the last one is "master" if there is one.
    states: flat, of the elements that this rank owns.
    on_device: their numbers of updates and rates, if steps may be captured; else None.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        groups: Sequence[int],
        rule: str,
        group_name: str,
        master: bool,
        capturable: bool,
    ) -> None:
        self.groups = list(groups)
        self.params, self.names, self.group_name = list(params), list(names), group_name
        group = resolve_group(group_name)
        self.buckets = buckets_of(tuple(p.numel() for p in params), group.size())
        self.rank, self._steps = group.rank(), [0] * len(params)
        self._on_gpu = all(p.is_cuda and type(p) in PLAIN for p in params)
        self.on_device = OnDevice(self.groups, self.params[0]) if capturable else None
        self.follow(rule, master)

    def follow(self, rule: str, master: bool) -> None:
        """Makes the states of a rule, before any update."""
        self.rule, self.keys = rule, (*RULES[rule].states, *([MASTER] if master else ()))
        wide = self.params[0].dtype == torch.float64
        dtype, device = torch.float64 if wide else torch.float32, self.params[0].device
        owned = self.buckets.owned(self.rank)
        self.states = [torch.zeros(owned, dtype=dtype, device=device) for _ in RULES[rule].states]
        if master:
            self.states.append(torch.empty(owned, dtype=dtype, device=device))
            for number in range(len(self.params)):
                self.renew_master(number)

    @property
    def steps(self) -> list[int]:
        """How often each parameter has been updated. Waits for the device if steps may be captured."""
        return self._steps if self.on_device is None else [int(t) for t in self.on_device.counts.tolist()]

    @steps.setter
    def steps(self, counts: list[int]) -> None:
        self._steps = counts
        if self.on_device is not None:
            self.on_device.counts.copy_(torch.tensor(counts))

    def part(self, number: int) -> tuple[int, int]:
        """The elements [start, stop) of a parameter that this rank owns."""
        return self.buckets.part(self.rank, number)

    def slices(self, number: int) -> dict[str, Tensor]:
        """This rank's state of a parameter: views of the elements that it owns."""
        start, stop = self.part(number)
        at = self.buckets.offsets[number] + start - self.buckets.starts[self.rank] if start < stop else 0
        return {key: state[at : at + stop - start] for key, state in zip(self.keys, self.states, strict=True)}

    def renew_master(self, number: int) -> None:
        """The master weights become the parameter."""
        start, stop = self.part(number)
        self.slices(number)[MASTER].copy_(self.params[number].detach().reshape(-1)[start:stop])

    def step(
        self,
        params: list[Tensor],
        grads: list[Tensor | None],
        states: list[Tensor],
        numbers: Tensor,
        average: bool,
        max_norm: float,
        error_if_nonfinite: bool,
        site: str,
    ) -> Tensor:
        """Updates all that have gradients; the caller counts it. params, states: those of the batch, or what
        stands for them in a compiled step. numbers: the row of each parameter."""
        # All tensors that need gradients are changed without one: only what is no plain tensor intervenes.
        plain = self._on_gpu and nobody_intervenes()
        update = direct("reduce_update_gather") if plain else torch.ops.autofuse.reduce_update_gather
        norm: Tensor = update(
            params, grads, states, numbers, self.rule, "avg" if average else "sum", max_norm,
            error_if_nonfinite, self.names, self.group_name, "direct", site,
        )  # fmt: skip
        return norm

    def advance(self, grads: Sequence[Tensor | None]) -> None:
        """Counts an update with these gradients."""
        if self.on_device is None:
            self._steps = [t + (g is not None) for t, g in zip(self._steps, grads, strict=True)]
        else:
            self.on_device.advance()


def with_names(given: Sequence[Any], others: Mapping[Tensor, str], op: str) -> dict[Tensor, str]:
    """The names of other parameters, and of these: tensors, or pairs of a name and a tensor. ValueError for
    what cannot be a parameter of a batch besides the others."""
    names = dict(others)
    for each in given:
        name, param = each if isinstance(each, tuple) else (None, each)
        if not isinstance(param, Tensor):
            continue  # torch says what is wrong with it
        name = name or f"parameter {len(names)} {list(param.shape)}"
        if param in names:
            raise ValueError(f"{op}: {names[param]} is given twice, the second time as {name}")
        if problem := _misfit(param):
            raise ValueError(f"{op}: {name} is {problem}")
        names[param] = name
    spans = sorted((*span, name) for param, name in names.items() if (span := _span(param)) is not None)
    for (_, end, one), (start, _, two) in pairwise(spans):
        if start < end:
            # Two ranks may own the same element then, and each would write its own result to it.
            first, second = sorted((one, two), key=list(names.values()).index)
            raise ValueError(
                f"{op}: {first} and {second} share memory; make them one parameter, or give each memory of "
                "its own"
            )
    return names


def _misfit(param: Tensor) -> str:
    """Why a tensor cannot be a parameter of a batch, and what can; empty if it can."""
    if placements(param) is not None:
        return "a DTensor, which only the optimizers of torch update; expected plain tensors"
    if param.dtype not in DTYPES or param.layout != torch.strided:
        return f"{param.dtype} and {param.layout}; expected a dense tensor of {', '.join(map(str, DTYPES))}"
    return ""


def _span(param: Tensor) -> tuple[int, int] | None:
    """The addresses where its memory starts and ends; None if it has none, none yet, or gaps in it."""
    if is_lazy(param) or not has_values(param) or not param.numel():
        return None
    start, last = param.data_ptr(), sum((n - 1) * s for n, s in zip(param.shape, param.stride(), strict=True))
    return (start, start + param.nbytes) if last + 1 == param.numel() else None


def dense(param: Tensor, grad: Tensor | None) -> Tensor | None:
    """The gradient. A sparse one, which no op takes, is replaced by one that all ranks refuse."""
    if grad is not None and grad.layout != torch.strided:
        return param.new_empty(param.numel() + 1)
    return grad
