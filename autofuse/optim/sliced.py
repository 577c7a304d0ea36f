"""What all optimizers of `autofuse.optim` share: arguments, batches, the step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, suppress
from typing import Any, TypedDict

import torch
from torch import Tensor

from autofuse.groups import Group, group_name
from autofuse.lowering import agreement
from autofuse.lowering.torch_internals import group_size
from autofuse.lowering.update_rules import NUMBERS, Term
from autofuse.optim.batch import Batch, dense, with_names
from autofuse.optim.differences import Told, lines_of, raise_difference, rates_of
from autofuse.optim.in_backward import Backward, cut
from autofuse.optim.numbers import Row, check_rules, numbers_of, rows_on_host
from autofuse.optim.on_device import is_captured
from autofuse.optim.state import IMPLEMENTATIONS, State
from autofuse.optim.traced import constant_in_graphs, number_of, optimizer_step


class Common(TypedDict, total=False):
    """Arguments of every optimizer besides those that torch's optimizer of the name has.

    Attributes:
        group: the data parallel group; None: all ranks.
        average: whether gradients are averaged over the ranks, as DDP does, or summed.
        max_norm: gradients are clipped by their global norm, which `grad_norm` then has; None: they are not.
        error_if_nonfinite: a step raises on all ranks, and changes nothing, if the norm is not finite.
        master_weights: parameters are also kept in float32, a slice on each rank, and rounded anew each step.
        in_backward: parameters are updated as soon as their gradients are there, and gradients are freed.
        capturable: numbers of updates are kept on the device, so that CUDA graphs can replay a step.
    """

    group: Group
    average: bool
    max_norm: float | None
    error_if_nonfinite: bool
    master_weights: bool
    in_backward: bool
    capturable: bool


class SlicedOptimizer(State, torch.optim.Optimizer):
    """The base class. All ranks of the group hold the same parameters in one order, and step together."""

    _step_supports_amp_scaling = True  # so that a GradScaler calls step() in any case, which then refuses it

    grad_norm: Tensor | None = None
    """Of the last step, before clipping: fp32 [] where the parameters are, with `max_norm` or
    `error_if_nonfinite`."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], common: Common) -> None:
        unknown = common.keys() - Common.__annotations__.keys()
        if unknown & IMPLEMENTATIONS:
            raise TypeError(
                f"{type(self).__name__}: {sorted(unknown & IMPLEMENTATIONS)} choose between "
                "implementations of torch; this optimizer has one, in which rates may change and steps be "
                "compiled: leave them out"
            )
        if unknown:
            raise TypeError(f"{type(self).__name__}: unexpected arguments {sorted(unknown)}")
        self._group_name = group_name(common.get("group"), type(self).__name__)
        self._average = common.get("average", True)
        max_norm = common.get("max_norm")
        if max_norm is not None and (isinstance(max_norm, bool) or not 0 < max_norm < math.inf):
            raise ValueError(f"max_norm={max_norm!r}: expected a positive number or None")
        self._max_norm = float(max_norm or 0)
        self._error_if_nonfinite = common.get("error_if_nonfinite", False)
        self._master_weights = common.get("master_weights", False)
        self._in_backward = common.get("in_backward", False)
        self._batches: list[Batch] = []
        self._met = False
        self._waiting: list[Tensor] = []
        self._known = 0
        self._every: list[Tensor] = []
        self._names: dict[Tensor, str] = {}
        if self._in_backward and self._wants_norm:
            raise ValueError(
                f"{type(self).__name__}: max_norm and error_if_nonfinite need all gradients before the first "
                "update; leave in_backward out"
            )
        self._capturable = common.get("capturable", False)
        if self._capturable and (self._in_backward or self._error_if_nonfinite):
            raise ValueError(
                f"{type(self).__name__}: no step with in_backward or error_if_nonfinite can be capturable"
            )
        self._begin()
        self._refuse_set(params)
        super().__init__(params, defaults)
        if self._in_backward:
            self._place()

    def _begin(self) -> None:
        """What no copy of this optimizer shares with it."""
        self._number = number_of(self)
        self._problem: Exception | None = None
        self._digest = (-1, 0)
        self._backward = Backward(self._run_in_backward) if self._in_backward else None
        if self._backward is not None:
            self._backward.watch(self._batches)

    @property
    def _wants_norm(self) -> bool:
        return self._max_norm > 0 or self._error_if_nonfinite

    @abstractmethod
    def _rule(self, options: dict[str, Any]) -> str:
        """The rule of a param group."""

    @abstractmethod
    def _terms(self, options: dict[str, Any]) -> Sequence[Term]:
        """The numbers of its parameters."""

    def _refuse_set(self, params: Any) -> None:
        if isinstance(params, (set, frozenset)):
            raise TypeError(
                f"{type(self).__name__}: the order of a set differs from rank to rank; give a list"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Its parameters are updated from the next step on."""
        params = param_group["params"]
        self._refuse_set(params)
        given = [params] if isinstance(params, Tensor) else list(params)
        names = with_names(given, self._names, type(self).__name__)
        super().add_param_group({**param_group, "params": given})
        self._names = names
        self._every = [p for options in self.param_groups for p in options["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchanges the gradients and updates the parameters; all ranks of the group call it together.

        With `in_backward` the backward has done it; call this all the same, for schedulers, for parameters
        that are new or no longer frozen, and for gradients that no backward has used. Parameters without a
        gradient on any rank stay as they are. Raises the same error on all ranks, before anything has
        changed, if ranks have gradients of other parameters, sparse ones, or other rates.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ready()
        if torch.compiler.is_compiling():
            # Reads make guards: other parameters are another graph. Rates must not be read.
            _ = len(self._every), [p.requires_grad for p in self._waiting]
            params = [p for batch in self._batches for p in batch.params]
            states = [s for batch in self._batches for s in batch.states]
            grads = [p.grad for p in params]
            optimizer_step(params, grads, states, self._wants_norm, self._number)
        else:
            params = [p for batch in self._batches for p in batch.params]
            self.run(params, [p.grad for p in params], [s for b in self._batches for s in b.states])
        if self._in_backward:
            self.zero_grad()
        return loss

    def run(self, params: list[Tensor], grads: list[Tensor | None], states: list[Tensor]) -> Tensor:
        """The step with these in place of the parameters of all batches, of their gradients and states."""
        grads = [*map(dense, params, grads)]
        if self._backward is None or not self._batches:
            return self._run(self._batches, params, grads, states)
        # If the backward has updated no batch on this rank, it may have on other ranks: this rank makes the
        # calls for which they wait. Batches that were made since the backward are new on all ranks.
        known, self._backward.known = self._backward.known, 0
        at, own = 0, 0
        for number, batch in enumerate(self._batches):
            end, last = at + len(batch.params), own + len(batch.states)
            if number >= known:
                self._run([batch], params[at:end], grads[at:end], states[own:last])
            at, own = end, last
        return torch.empty(0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; part of a graph in a compiled step."""
        if not torch.compiler.is_compiling():
            super().zero_grad(set_to_none)
            return
        for param in self._every:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def no_sync(self) -> AbstractContextManager[None]:
        """With `in_backward`: backwards in this context add up gradients, and update nothing."""
        if self._backward is None:
            raise RuntimeError(
                f"{type(self).__name__}: without in_backward, gradients add up until step() is called"
            )
        return self._backward.no_sync()

    @constant_in_graphs
    def _ready(self, frozen: Set[Tensor] = frozenset()) -> None:
        """As `_place`. What is wrong is told to all ranks where they meet."""
        with suppress(ValueError):
            self._place(frozen)

    def _run_in_backward(self, batch: Batch) -> None:
        self._run([batch], batch.params, [dense(p, p.grad) for p in batch.params], batch.states)

    def _run(
        self,
        batches: Sequence[Batch],
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        states: Sequence[Tensor],
    ) -> Tensor:
        """Updates batches, all or none. The first exchange tells the other ranks of all of them."""
        self._refuse_scaler()
        if is_captured(self._batches, self._capturable and self._met, type(self).__name__):
            return self._captured(batches, params, grads, states)
        self._meet()
        norm = None
        rows: list[list[Row]] = []
        problem = self._problem
        try:
            at = 0
            for batch in batches:
                end = at + len(batch.params)
                rows.append(self._rows(batch, grads[at:end]))
                at = end
        except Exception as error:
            problem = problem or error
        first = len(batches[0].params) if batches else 0
        later = [*zip(params[first:], grads[first:], strict=True)]
        codes = [agreement.code(p, g) for p, g in later]
        refused = problem is not None or agreement.WRONG in codes
        if refused and batches:
            batches, rows = batches[:1], [[[0.0] * NUMBERS] * len(batches[0].params)]
        at, own = 0, 0
        try:
            if refused and group_size(self._group_name) == 1:
                raise agreement.Disagreement(str(problem))
            for batch, each in zip(batches, rows, strict=True):
                end, last = at + len(batch.params), own + len(batch.states)
                norm = batch.step(
                    list(params[at:end]), list(grads[at:end]), list(states[own:last]),
                    numbers_of(each, self._seal(refused, rows, codes, later)), self._average,
                    self._max_norm, self._error_if_nonfinite, self._site,
                )  # fmt: skip
                batch.advance(grads[at:end])
                at, own = end, last
        except agreement.Disagreement as error:
            told = Told(
                str(problem or ""),
                lines_of(self._batches, self._sharing),
                rates_of(self._batches, self.param_groups),
                [agreement.code(p, g) for p, g in zip(params, grads, strict=True)],
            )
            names = [name for batch in self._batches for name in batch.names]
            raise_difference(type(self).__name__, told, names, self._group_name, problem or error)
        if self._wants_norm and norm is not None:
            self.grad_norm = norm
            return norm
        return torch.empty(0)

    def _captured(
        self,
        batches: Sequence[Batch],
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        states: Sequence[Tensor],
    ) -> Tensor:
        """Updates batches with numbers that are read on the device. Ranks compare nothing in replays."""
        norm = torch.empty(0)
        at, own = 0, 0
        for batch in batches:
            end, last = at + len(batch.params), own + len(batch.states)
            norm = batch.step(
                list(params[at:end]), list(grads[at:end]), list(states[own:last]),
                self._on_device(batch, grads[at:end], True), self._average, self._max_norm, False, self._site,
            )  # fmt: skip
            at, own = end, last
        if self._wants_norm:
            self.grad_norm = norm
        return norm

    def _on_device(self, batch: Batch, grads: Sequence[Tensor | None], counts: bool) -> Tensor:
        """The rows of a batch, on its device. counts: the update is counted, too."""
        assert batch.on_device is not None
        batch.on_device.prepare([g is not None for g in grads])
        if batch.on_device.counts.is_cuda:
            return batch.on_device.rows(self.param_groups, self._terms, counts)
        numbers = numbers_of(rows_on_host(batch, self.param_groups, self._terms), 0.0)
        if counts:
            batch.on_device.advance()
        return numbers

    @property
    def _site(self) -> str:
        return f"autofuse.optim.{type(self).__name__}"

    def _rows(self, batch: Batch, grads: Sequence[Tensor | None]) -> list[Row]:
        check_rules(batch, self.param_groups, self._rule)
        if batch.on_device is None:
            return rows_on_host(batch, self.param_groups, self._terms)
        kinds: dict[Row, Row] = {}
        every = [tuple(row) for row in self._on_device(batch, grads, False).tolist()]
        return [kinds.setdefault(row, row) for row in every]

    def _seal(
        self,
        refused: bool,
        rows: list[list[Row]],
        codes: list[int],
        later: Sequence[tuple[Tensor, Tensor | None]],
    ) -> float:
        """A number that is equal on all ranks if they can make this step, as far as the first batch does not
        tell by itself."""
        if refused:
            return -1.0 - torch.distributed.get_rank()
        if not later:
            return _seal_of(self._kind)
        dtypes = [None if g is None else g.dtype for _, g in later]
        of_rows = [[*{id(row): row for row in each}.values()] for each in rows[1:]]
        return _seal_of(self._kind, of_rows, codes, dtypes)

    def _refuse_scaler(self) -> None:
        if getattr(self, "found_inf", None) is not None:
            self.found_inf = None
            raise RuntimeError(
                f"{type(self).__name__}: a GradScaler decides on every rank by itself whether to step; "
                "train in bfloat16, or scale the loss by a constant"
            )

    def _place(self, frozen: Set[Tensor] = frozenset()) -> None:
        """Makes batches of the parameters that have none yet and require gradients, and of those in `frozen`.
        No communication."""
        if len(self._every) != self._known:
            placed = {id(p) for batch in self._batches for p in batch.params}
            self._waiting = [p for p in self._every if id(p) not in placed]
            self._known = len(self._every)
        ready, waiting = list[Tensor](), list[Tensor]()
        for param in self._waiting:
            (ready if param.requires_grad or param in frozen else waiting).append(param)
        if not ready:
            return
        group_of = {id(p): i for i, options in enumerate(self.param_groups) for p in options["params"]}
        kinds: dict[tuple[Any, ...], list[Tensor]] = {}
        for param in ready:
            rule = self._rule(self.param_groups[group_of[id(param)]])
            kinds.setdefault((rule, param.device, param.dtype == torch.float64), []).append(param)
        if self._wants_norm and len(self._batches) + len(kinds) > 1:
            other = self._names[[*kinds.values()][-1][0]]
            self._problem = ValueError(
                "max_norm and error_if_nonfinite need parameters of one device, all of them float64 or none, "
                f"of one rule, and given from the first step on, and not {other}"
            )
            raise self._problem
        self._waiting = waiting
        for (rule, *_), params in kinds.items():
            for part in cut(params) if self._backward is not None else [params]:
                names = [self._names[p] for p in part]
                groups = [group_of[id(p)] for p in part]
                made = Batch(
                    part, names, groups, rule, self._group_name, self._master_weights, self._capturable
                )
                self._batches.append(made)
                if self._backward is not None:
                    self._backward.watch([made])

    def _meet(self, again: bool = False) -> None:
        """Raises ValueError on all ranks if they have other parameters. Later steps tell by their seal."""
        if again or not self._met:
            told = Told(
                "" if self._batches else str(self._problem or ""),
                lines_of(self._batches, self._sharing),
                [],
                [],
            )
            raise_difference(type(self).__name__, told, [], self._group_name, None)
            self._met = bool(self._batches)

    @property
    def _sharing(self) -> str:
        return f"master {self._master_weights}, average {self._average}, max_norm {self._max_norm}"

    @property
    def _kind(self) -> int:
        """Digest of all parameters."""
        if self._digest[0] != len(self._batches):
            self._digest = len(self._batches), agreement.digest(*lines_of(self._batches, self._sharing))
        return self._digest[1]


def _seal_of(*values: object) -> float:
    return float(agreement.digest(*values) >> 11)  # a float64 has 53 bits
