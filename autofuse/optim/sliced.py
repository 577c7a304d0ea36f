"""What all optimizers of `autofuse.optim` share: arguments, batches, the step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.groups import Group, group_name
from autofuse.lowering.torch_internals import resolve_group
from autofuse.optim.batch import Batch
from autofuse.optim.in_backward import Backward, cut
from autofuse.optim.state import State

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Common(TypedDict, total=False):
    """Arguments of every optimizer besides those that torch's optimizer of the name has.

    Attributes:
        group: the data parallel group; None: all ranks.
        average: whether gradients are averaged over the ranks, as DDP does, or summed.
        max_norm: gradients are clipped by their global norm, which `grad_norm` then has; None: they are not.
        error_if_nonfinite: a step raises on all ranks, and changes nothing, if the norm is not finite.
        master_weights: parameters are also kept in float32, a slice on each rank, and rounded anew each step.
        in_backward: parameters are updated as soon as their gradients are there, and gradients are freed.
    """

    group: Group
    average: bool
    max_norm: float | None
    error_if_nonfinite: bool
    master_weights: bool
    in_backward: bool


class SlicedOptimizer(State, torch.optim.Optimizer):
    """The base class. All ranks of the group hold the same parameters in one order, and step together."""

    _step_supports_amp_scaling = True  # so that a GradScaler calls step() in any case, which then refuses it

    grad_norm: Tensor | None = None
    """Of the last step, before clipping: fp32 [], with `max_norm` or `error_if_nonfinite`."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], common: Common) -> None:
        unknown = common.keys() - Common.__annotations__.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__}: unexpected arguments {sorted(unknown)}")
        self._group_name = group_name(common.get("group"), type(self).__name__)
        self._average = common.get("average", True)
        self._max_norm = common.get("max_norm") or 0.0
        self._error_if_nonfinite = common.get("error_if_nonfinite", False)
        self._master_weights = common.get("master_weights", False)
        if isinstance(self._max_norm, bool) or not 0 <= self._max_norm < math.inf:
            raise ValueError(f"max_norm={self._max_norm!r}: expected a positive number or None")
        self._batches: list[Batch] = []
        self._met = 0
        self._waiting: list[Tensor] = []
        self._known = 0
        self._names: dict[Tensor, str] = {}
        self._backward = Backward(self._run, self._meet) if common.get("in_backward") else None
        if self._backward is not None and (self._max_norm or self._error_if_nonfinite):
            raise ValueError(
                f"{type(self).__name__}: max_norm and error_if_nonfinite need all gradients before the first "
                "update; leave in_backward out"
            )
        super().__init__(params, defaults)
        if self._backward is not None:
            self._place()

    @abstractmethod
    def _rule(self, options: dict[str, Any]) -> str:
        """The rule of a param group."""

    @abstractmethod
    def _numbers(self, options: dict[str, Any], t: int) -> list[float]:
        """The row of its parameters for update t."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Its parameters are updated from the next step on."""
        params = param_group["params"]
        given = [params] if isinstance(params, Tensor) else list(params)
        param_group = {**param_group, "params": given}
        pairs = [each if isinstance(each, tuple) else (None, each) for each in given]
        for name, param in pairs:
            if not isinstance(param, Tensor):
                continue  # torch says what is wrong with it
            name = name or f"parameter {len(self._names)} {list(param.shape)}"
            if param in self._names:
                raise ValueError(
                    f"{type(self).__name__}: {self._names[param]} is given twice, the second time as {name}"
                )
            if param.dtype not in DTYPES or param.layout != torch.strided:
                raise ValueError(f"{type(self).__name__}: {name} is {param.dtype} and {param.layout}")
            self._names[param] = name
        super().add_param_group(param_group)

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchanges the gradients and updates the parameters; all ranks of the group call it together.

        With `in_backward` the backward has done it; call this all the same, for schedulers and for parameters
        that are new or no longer frozen. Parameters without a gradient on any rank stay as they are. Raises
        the same error on all ranks, before anything has changed, if ranks have gradients of other parameters,
        sparse ones, or other rates.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "found_inf", None) is not None:
            raise RuntimeError(
                f"{type(self).__name__}: a GradScaler decides on every rank by itself whether to step; "
                "train in bfloat16, or scale the loss by a constant"
            )
        self._place()
        if self._backward is None:
            self._meet()
            for batch in self._batches:
                self._run(batch)
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        """With `in_backward`: backwards in this context add up gradients, and update nothing."""
        if self._backward is None:
            raise RuntimeError(
                f"{type(self).__name__}: without in_backward, gradients add up until step() is called"
            )
        return self._backward.no_sync()

    def _run(self, batch: Batch) -> None:
        known: dict[tuple[int, int], list[float]] = {}
        rows = []
        for param, group, t in zip(batch.params, batch.groups, batch.steps, strict=True):
            key = group, t + 1
            if key not in known:
                options = self.param_groups[group]
                if self._rule(options) != batch.rule:
                    raise ValueError(
                        f"{type(self).__name__}: the group of {self._names[param]} was made for the rule "
                        f"{batch.rule}; its options now ask for {self._rule(options)}"
                    )
                known[key] = self._numbers(options, t + 1)
            rows.append(known[key])
        site = f"autofuse.optim.{type(self).__name__}"
        norm = batch.step(rows, self._average, self._max_norm, self._error_if_nonfinite, site)
        self.grad_norm = norm if norm.dim() == 0 else None

    def _place(self) -> None:
        """Makes batches of the parameters that have none yet and require gradients. No communication."""
        count = sum(len(options["params"]) for options in self.param_groups)
        if count != self._known:
            self._known = count
            placed = {id(p) for batch in self._batches for p in batch.params}
            every = (p for options in self.param_groups for p in options["params"])
            self._waiting = [p for p in every if id(p) not in placed]
        if not any(p.requires_grad for p in self._waiting):
            return
        group_of = {id(p): i for i, options in enumerate(self.param_groups) for p in options["params"]}
        kinds: dict[tuple[Any, ...], list[Tensor]] = {}
        for param in self._waiting:
            if param.requires_grad:
                rule = self._rule(self.param_groups[group_of[id(param)]])
                kinds.setdefault((rule, param.device, param.dtype == torch.float64), []).append(param)
        self._waiting = [p for p in self._waiting if not p.requires_grad]
        for (rule, *_), params in kinds.items():
            for part in cut(params) if self._backward is not None else [params]:
                names = [self._names[p] for p in part]
                groups = [group_of[id(p)] for p in part]
                made = Batch(part, names, groups, rule, self._group_name, self._master_weights)
                self._batches.append(made)
                if self._backward is not None:
                    self._backward.watch([made])
        if len(self._batches) > 1 and (self._max_norm or self._error_if_nonfinite):
            raise ValueError(
                f"{type(self).__name__}: max_norm and error_if_nonfinite need parameters of one device, "
                "all of them float64 or none, of one rule, and given from the first step on"
            )

    def _meet(self) -> None:
        """Raises ValueError on all ranks if they have other parameters."""
        new = self._batches[self._met :]
        if not new:
            return
        sharing = f"master {self._master_weights}, average {self._average}, max_norm {self._max_norm}"
        mine = [
            f"{name} {list(p.shape)} {p.dtype} on {p.device.type} ({batch.rule}, {sharing})"
            for batch in new
            for p, name in zip(batch.params, batch.names, strict=True)
        ]
        group = resolve_group(self._group_name)
        told: list[Any] = [None] * group.size()
        dist.all_gather_object(told, mine, group)
        for rank, theirs in enumerate(told):
            longest = max(len(told[0]), len(theirs))
            for i in range(longest):
                pair = [lines[i] if i < len(lines) else "no parameter" for lines in (told[0], theirs)]
                if pair[0] != pair[1]:
                    self._known = 0
                    del self._batches[self._met :]
                    raise ValueError(
                        f"{type(self).__name__}: the ranks have other parameters: rank 0 has {pair[0]}, rank "
                        f"{rank} has {pair[1]}"
                    )
        self._met = len(self._batches)
