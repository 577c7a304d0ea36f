"""The choice whether a legal site is fused: the prediction of the cost model, and the rule of policy `auto`.

All ranks must decide alike, without communication. Static sizes, the ranges of the graph's symbols and the
device table are equal on all ranks. The values that dynamic sizes have while tracing may differ. Hence the
rule is:

- static sizes: fuse if the fused op is predicted to be faster;
- dynamic sizes: one compilation serves all sizes, and no size may become slower. Fuse if the fused op is
  predicted to be faster somewhere in the range of the symbols, and nowhere slower by more than `MARGIN`. The
  margin is smaller than the error of the model; without it, far ends of a range that never occur would
  decide. A site that is kept is reported with the condition for a gain;
  `torch._dynamo.mark_dynamic(x, dim, min=, max=)` narrows the range;
- sizes that depend on data, and parts of an all_to_all that differ between ranks: fuse. Ranks share no sizes
  here, and fused ops gain most where latency dominates.

Sizes seen while tracing affect only the report.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import sympy
import torch
from torch import fx

from autofuse.lowering import torch_internals
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.graph.follow import expression, tensor
from autofuse.passes.graph.layout import prod
from autofuse.passes.matchers.match import Match
from autofuse.passes.reasons import Reason, Reject
from autofuse.passes.report import Prediction, listening
from autofuse.passes.settings import Settings

from . import ways
from .cost_model import PLAIN, Expressions, Model, Numbers, Task
from .crossover import Known, Sample, wins
from .device_table import DeviceTable, table_for
from .evaluate import at_values
from .ways import predictor_on, product_of

if TYPE_CHECKING:
    from autofuse.lowering.gpu.choice.correction import Predictor

Symbols: TypeAlias = Mapping[sympy.Symbol, Known]

_COEFFICIENT = re.compile(r"\d+\.\d+(e[+-]?\d+)?")

TORCH_MARGIN = 0.1
"""On GPUs, a site of static size is kept if the computation that it replaces is predicted to be the fastest
of all ways, and our fastest kernel to take longer by more than this part. A measurement is then not expected
to reverse the order. For an all_reduce_update the margin is 0: its calls cannot go back to the code that
Inductor generates, so any predicted loss keeps the site."""

MARGIN = 0.05
"""A site is fused despite a predicted loss of up to this part at some sizes, if other sizes gain."""


@dataclass(frozen=True)
class Choice:
    """The prediction for a site, and whether policy `auto` fuses the site, which is equal on all ranks."""

    prediction: Prediction
    fuse: bool
    apart_us: float | None = None
    """Time of compute and collective apart, if all sizes are static."""
    why: str = ""
    """Why a site on GPUs is kept."""


def symbols_of(graph: fx.Graph) -> Symbols:
    """The symbols of the graph whose values are known when the graph is called."""
    for node in graph.nodes:
        val = node.meta.get("val")
        for size in val.shape if isinstance(val, torch.Tensor) else (val,):
            if isinstance(size, torch.SymInt):
                hints, ranges = torch_internals.symbol_hints(size), torch_internals.symbol_ranges(size)
                integers = {
                    s: int(hint) for s, hint in hints.items() if isinstance(hint, (int, sympy.Integer))
                }
                return {s: Known(*ranges[s], hint) for s, hint in integers.items() if s in ranges}
    return {}


def choose(
    anchor: Anchor, match: Match, world: int, settings: Settings, symbols: Symbols
) -> tuple[Prediction, Reject | None]:
    """The prediction for a legal match, and why the policy keeps the match; None if it is fused."""
    device = anchor.node.meta["val"].device
    table = table_for(settings.tables, device)
    predictor = predictor_on(device)
    given = anchor, match, world, settings.order, table, symbols, listening(), predictor
    choice = predict(*given)
    if device.type == "cuda":
        choice = on_gpu(choice)
    product = PLAIN if predictor is None else product_of(match.arguments)
    shown = choice if product == PLAIN else predict(*given, product)
    return shown.prediction, _why_kept(choice, settings.policy)


def saved_us(anchor: Anchor, match: Match, world: int, settings: Settings, symbols: Symbols) -> float | None:
    """Microseconds that the fused op is predicted to save, at least 0; None if a size is not static."""
    device = anchor.node.meta["val"].device
    table = table_for(settings.tables, device)
    choice = predict(anchor, match, world, settings.order, table, symbols, False, predictor_on(device))
    known = choice.prediction
    if choice.apart_us is None or known.fused_us is None:
        return None
    return max(0.0, choice.apart_us - known.fused_us)


def _why_kept(choice: Choice, policy: str) -> Reject | None:
    if policy == "never":
        return Reject(Reason.POLICY_NEVER, "")
    if policy != "auto" or choice.fuse:
        return None
    if choice.why:
        return Reject(Reason.NOT_PROFITABLE, choice.why)
    known = choice.prediction
    times = f"{known.fused_us} us fused, {known.unfused_us} us apart"
    return Reject(Reason.NOT_PROFITABLE, times if known.wins == "never" else f"gains only for {known.wins}")


def predict(
    anchor: Anchor, match: Match, world: int, order: str, table: DeviceTable, symbols: Symbols, text: bool,
    predictor: Predictor | None = None, product: str = PLAIN,
) -> Choice:  # fmt: skip
    """The prediction of the cost model for a legal match; on GPUs that of a predictor of ways, for sites that
    it knows. `text`: with expressions in symbols, whose construction takes longer than all other steps
    together. `product`: its kind, which ranks need not have in common: no decision may depend on it.
    """
    task = task_of(anchor, match, world, order)
    free = frozenset(chain.from_iterable(s.free_symbols for s in task.sizes if isinstance(s, sympy.Expr)))
    known = tuple((s, symbols[s]) for s in sorted(free, key=str) if s in symbols)
    uneven = anchor.kind == "all_to_all" and not anchor.even
    if predictor is not None and len(known) == len(free) and not uneven:
        choice = _predict_ways(replace(task, product=product), predictor, known, text)
        if choice is not None:
            return choice
    # The number of cores, not the affinity of this process: all ranks must decide alike.
    return _predict(task, table, os.cpu_count() or 1, known, len(known) == len(free), uneven, text)


def on_gpu(choice: Choice) -> Choice:
    """The choice for a site on GPUs.

    The unfused program is one of the ways of a fused op, and every call takes the fastest way. So the site is
    fused, except where the unfused program is known to be the fastest.
    """
    return choice if choice.why else replace(choice, fuse=True)


def task_of(anchor: Anchor, match: Match, world: int, order: str) -> Task:
    """The compute and the collective of a match, for the cost model."""
    source = tensor(anchor.input)
    assert source is not None
    work = match.work
    of_anchor = prod(expression(size) for size in source.shape) * source.element_size()
    sent = of_anchor if work.sent is None else work.sent
    dtype = str(source.dtype).removeprefix("torch.")
    task = Task(
        match.pattern, world, dtype, order, sent, work.matmuls, work.count, work.bytes_read, work.bytes_kept,
        step=work.step,
    )  # fmt: skip
    return task.map(match.shapes.meaning)


@functools.lru_cache(maxsize=1024)
def _predict(
    task: Task,
    table: DeviceTable,
    cores: int,
    known: tuple[tuple[sympy.Symbol, Known], ...],
    complete: bool,
    uneven: bool,
    text: bool,
) -> Choice:
    model, symbols = Model(table, cores), dict(known)

    def times(values: Mapping[sympy.Symbol, int], arithmetic: Numbers) -> tuple[float, float]:
        numbers = at_values(task, values)
        return model.fused(numbers, arithmetic), model.apart(numbers, arithmetic)

    def gain(values: Mapping[sympy.Symbol, int], margin: float = 0.0) -> Sample:
        arithmetic = Numbers()
        fused, apart = times(values, arithmetic)
        return apart * (1 + margin) - fused, tuple(arithmetic.taken)

    if complete and not uneven:
        condition = wins(gain, symbols)
        fuse = condition == "always"
        if symbols and condition != "never":
            fuse = fuse or wins(functools.partial(gain, margin=MARGIN), symbols) == "always"
    else:
        condition, fuse = "not known", True
    fused = unfused = ""
    if text or (complete and not symbols):
        expressions = Expressions(functools.partial(_decide, symbols))
        fused, unfused = (_text(f(task, expressions)) for f in (model.fused, model.apart))
    hints = {s: k.hint for s, k in known if k.hint is not None}
    if not complete or len(hints) < len(known):
        return Choice(Prediction(None, None, fused, unfused, condition, table.name), fuse)
    key = at_values(task, hints).key
    point = table.by_task.get(key)
    fused_us, unfused_us = (round(time, 1) for time in times(hints, Numbers()))
    prediction = Prediction(
        fused_us,
        unfused_us,
        fused,
        unfused,
        condition,
        table.name,
        None if point is None else point.fused_us,
        None if point is None else point.unfused_us,
        key,
    )
    return Choice(prediction, fuse, None if symbols or uneven else times({}, Numbers())[1])


@functools.lru_cache(maxsize=1024)
def _predict_ways(
    task: Task, predictor: Predictor, known: tuple[tuple[sympy.Symbol, Known], ...], text: bool
) -> Choice | None:
    """The prediction by the ways of a GPU; None for a site that has no ways.

    The fused op has torch's ways, too, and is never predicted to be slower than what it replaces. So the
    condition is for kernels of ours; nobody decides by it, and without a report it is not looked for. A site
    of static size is kept where what it replaces is the fastest by far.
    """

    def at(values: Mapping[sympy.Symbol, int]) -> tuple[float, float, float] | None:
        return ways.times(at_values(task, values), predictor)

    def gain(values: Mapping[sympy.Symbol, int]) -> Sample:
        found = at(values)
        return (0.0 if found is None else found[2] - found[1]), (found is None,)

    hints = {s: k.hint for s, k in known if k.hint is not None}
    found = at(hints) if len(hints) == len(known) else None
    if found is None:
        return None
    condition = wins(gain, dict(known)) if text or not known else "always"
    fused, apart = round(found[0], 1), round(found[2], 1)
    texts = ("", "") if known else (str(fused), str(apart))
    key = at_values(task, hints).key
    prediction = Prediction(fused, apart, *texts, condition, predictor.model.gpu.name, task=key)
    margin = 0.0 if task.step else TORCH_MARGIN
    if known or found[0] < found[2] or found[1] <= found[2] * (1 + margin):
        return Choice(prediction, True, None if known else apart)
    why = f"as torch: what it replaces is the fastest here, {apart} us; our fastest kernel {found[1]:.1f} us"
    return Choice(prediction, False, apart, why)


def _decide(symbols: Symbols, difference: sympy.Expr) -> bool | None:
    """Whether a difference that is linear in one symbol is positive in its whole range; None if it is not
    known."""
    free = difference.free_symbols
    if len(free) != 1 or not free <= symbols.keys():
        return None
    (symbol,) = free
    slope = difference.coeff(symbol)
    if not slope.is_number or (rest := difference - slope * symbol).has(symbol):
        return None
    ends = {bool(rest + slope * end > 0) for end in (symbols[symbol].least, symbols[symbol].most)}
    return ends.pop() if len(ends) == 1 else None


def _text(time: object) -> str:
    """The expression as text, with coefficients of three digits."""
    if not isinstance(time, sympy.Expr):
        return f"{time:.1f}"
    # Coefficients are shortened in the text: replacing them in the expression takes milliseconds.
    return _COEFFICIENT.sub(lambda number: f"{float(number[0]):.3g}", str(time))
