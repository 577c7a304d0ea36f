"""The cost model: predicted times of a site with compute and collective apart, and with the fused op.

W is the number of ranks, of which `share = max(1, W / cores)` work on one core, and s is the number of bytes
of the collective's input on one rank. All other quantities are constants of a `DeviceTable`:

    matmul      start + max(2 M K N / rate, (K N + M K + M N) itemsize / memory)
                + K N itemsize / pack_rate, where a weight is packed for more than one row
    pooling     tables * start + (bytes + s) / rate
    collective  collectives * start + moved / rate; moved = s, of an all_gather s W
    apart       share * compute + collective
    fused       start + share * (compute + (linked + copied) / link) + waits * signal        (CPU)
                start + pipeline(compute, linked / link) + copied / memory + waits * signal  (else)

A CPU rank moves its data itself. On other devices data moves beside the compute, chunk by chunk for W chunks,
so that all but one chunk of the shorter of the two is hidden: `pipeline(c, x) = max(c, x) + min(c, x) / W`.
If the product is computed in one piece, nothing is hidden. The executors (`lowering/cpu/*_executor.py`)
determine the bytes:

    linked   bytes that one rank sends or receives, with a chunk of s / W:
             reduce_scatter    (W - 1) chunks, each of fp32 sums in ring order
             all_reduce        that and (W - 1) finished chunks; in one shot (W - 1) s
             all_gather        (W - 1) s
             all_to_all        (W - 1) chunks
    copied   other bytes that this rank reads or writes: partial tiles that it reduces, a product in one piece
             that it cuts up, received rows that it moves to their place, extra outputs
    waits    signals that a rank awaits one after another: 1, or 2 of an all_reduce; W - 1 times as many in
             ring order

In `oblivious` order all ranks store to the same peer at a time, so that one link carries the traffic of W - 1
links.

The formulas are written once and evaluated on numbers (`Numbers`) and on expressions (`Expressions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import sympy
import torch

from autofuse.lowering.cpu.gather_executor import FEW_ROWS as FEW_ROWS_A_PART
from autofuse.lowering.cpu.reduce_executor import ONE_SHOT_BYTES
from autofuse.lowering.cpu.support import FEW_ROWS, LONG_ROWS, VERY_FEW_ROWS
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.plan import EVERYWHERE, Family
from autofuse.passes.graph.layout import Size

from .device_table import DeviceTable

PLAIN = "mm"
"""The kind of a plain sum of matmuls. Tasks that reduce no product have it, too."""

Value: TypeAlias = Any
"""A number, or a sympy expression."""


@dataclass(frozen=True)
class Step:
    """An update of whole tensors by what is reduced, for the prices on GPUs. Sizes are those of all tensors;
    grad, param: dtypes."""

    rule: str
    grad: torch.dtype
    param: torch.dtype
    elements: int
    buckets: int
    tensors: int


@dataclass(frozen=True)
class Task:
    """The compute and the collective of a site. Sizes are those of one rank, as numbers or expressions."""

    op: str
    world: int
    dtype: str
    order: str
    sent: Size
    """Bytes of the collective's input."""
    matmuls: tuple[tuple[Size, Size, Size], ...] = ()
    """(M, K, N) of each."""
    count: Size = 1
    """Number of experts that the rows of a matmul are spread over, of tables that are pooled, or of
    all_reduces without matmuls."""
    pooled: Size = 0
    """Bytes that pooling reads."""
    kept: Size = 0
    """Bytes of extra outputs, which the fused op copies."""
    product: str = PLAIN
    """The kind of the product that the op reduces; `lowering/gpu/dense/factors.py` lists the kinds."""
    step: Step | None = None
    """No part of the key: formulas do not know it."""

    @property
    def key(self) -> str:
        """The task as text, `op=matmul_all_reduce world=2 ...`, which names a measured point."""
        matmuls = "+".join("x".join(map(str, sizes)) for sizes in self.matmuls)
        return " ".join(
            f"{f.name}={matmuls if f.name == 'matmuls' else getattr(self, f.name)}"
            for f in fields(self)
            if f.name != "step" and (f.name, self.product) != ("product", PLAIN)
        )

    @classmethod
    def parse(cls, key: str) -> Task:
        """The task of numbers that `key` names."""
        found = dict(part.split("=", 1) for part in key.split(" "))
        world, sent, count, pooled, kept = (
            int(found[k]) for k in ("world", "sent", "count", "pooled", "kept")
        )
        matmuls = []
        for text in filter(None, found["matmuls"].split("+")):
            m, k, n = map(int, text.split("x"))
            matmuls.append((m, k, n))
        return cls(
            found["op"], world, found["dtype"], found["order"], sent, tuple(matmuls), count, pooled, kept,
            found.get("product", PLAIN),
        )  # fmt: skip

    def map(self, f: Callable[[Size], Size]) -> Task:
        """The task with `f` applied to all sizes."""
        matmuls = tuple((f(m), f(k), f(n)) for m, k, n in self.matmuls)
        sent, count, pooled, kept = map(f, (self.sent, self.count, self.pooled, self.kept))
        return replace(self, sent=sent, matmuls=matmuls, count=count, pooled=pooled, kept=kept)

    @property
    def sizes(self) -> tuple[Size, ...]:
        return (self.sent, *(s for sizes in self.matmuls for s in sizes), self.count, self.pooled, self.kept)


class Numbers:
    """Arithmetic on numbers. `taken` records the branch that every condition took: between sizes with the
    same branches, the formulas are polynomials."""

    def __init__(self) -> None:
        self.taken: list[bool] = []

    def largest(self, a: Value, b: Value) -> Value:
        return self.where(b, a, a, b)

    def where(self, small: Value, large: Value, then: Value, otherwise: Value) -> Value:
        """`then` if `small <= large`."""
        fits = bool(small <= large)
        self.taken.append(fits)
        return then if fits else otherwise


class Expressions:
    """Arithmetic on expressions, which are not simplified. `decide(difference)` returns whether the
    difference is positive for every value of its symbols, and None if it does not know."""

    def __init__(self, decide: Callable[[sympy.Expr], bool | None] = lambda difference: None) -> None:
        self.decide = decide

    def largest(self, a: Value, b: Value) -> Value:
        if _depends(a) or _depends(b):
            positive = self.decide(a - b)
            return sympy.Max(a, b, evaluate=False) if positive is None else a if positive else b
        return max(a, b)

    def where(self, small: Value, large: Value, then: Value, otherwise: Value) -> Value:
        if _depends(small) or _depends(large):
            exceeds = self.decide(small - large)
            if exceeds is not None:
                return otherwise if exceeds else then
            fits = _at_most(sympy.sympify(small), sympy.sympify(large))
            return sympy.Piecewise((then, fits), (otherwise, True), evaluate=False)
        return then if small <= large else otherwise


def _depends(value: Value) -> bool:
    return isinstance(value, sympy.Expr) and not value.is_number


def _at_most(small: sympy.Expr, large: sympy.Expr) -> sympy.Expr:
    """`small <= large` of integers, with a common factor on the side of the number: `s0 <= 64`."""
    factor, rest = small.as_coeff_Mul()
    if large.is_number and factor > 0:
        small, large = rest, large // factor
    if small.is_number:
        factor, rest = large.as_coeff_Mul()
        if factor > 0:
            small, large = -(-small // factor), rest
        return sympy.Ge(large, small, evaluate=False)
    return sympy.Le(small, large, evaluate=False)


Arithmetic: TypeAlias = Numbers | Expressions


@dataclass(frozen=True)
class Model:
    """The formulas for one device table and hosts of `cores` cores. `store`: how finished tiles are stored.

    `cores` is the number of cores of the machine, not of the affinity of a process: all ranks must decide
    alike.
    """

    table: DeviceTable
    cores: int
    store: str = "remote"

    def apart(self, task: Task, arithmetic: Arithmetic) -> Value:
        """Microseconds of compute and collective one after the other."""
        compute = self.compute(task, arithmetic, fused=False)
        return self.share(task.world) * compute + self.collective(task)

    def collective(self, task: Task) -> Value:
        """Microseconds of the collectives alone. An op that scatters a sum and hands all of it out stands for
        an all_gather of as many bytes, too."""
        kind = FUSED_OPS[task.op].replaces
        moved = task.sent * task.world if kind == "all_gather" else task.sent
        kinds = (kind, "all_gather") if kind == "reduce_scatter" and task.op in EVERYWHERE else (kind,)
        total: Value = 0.0
        for each in kinds:
            rate = self._ranked(each, "rate", task.world)
            count = 1 if task.matmuls or each != "all_reduce" else task.count
            total = total + count * self._ranked(each, "start_us", task.world) + moved / rate
        return total

    def compute(self, task: Task, arithmetic: Arithmetic, fused: bool) -> Value:
        """Microseconds of the compute on a core of its own."""
        total: Value = 0.0
        for m, k, n in task.matmuls:
            total = total + self._matmul(task, m, k, n, arithmetic, fused)
        if task.pooled != 0:
            constants = self.table.constants
            moved = (task.pooled + task.sent) / constants["pooling.rate"]
            total = total + task.count * constants["pooling.start_us"] + moved
        return total

    def fused(self, task: Task, arithmetic: Arithmetic, owners: bool = False) -> Value:
        """Microseconds of the fused op. `owners`: owners of rows reduce them, never all ranks in one shot."""
        compute = self.compute(task, arithmetic, fused=True)
        time = self._fused(task, compute, _traffic(task, arithmetic), arithmetic)
        if task.op != "matmul_all_reduce" or task.order != "direct" or owners:
            return time
        one_shot = self._fused(task, compute, _one_shot(task), arithmetic)
        return arithmetic.where(task.sent * (task.world - 2), ONE_SHOT_BYTES, one_shot, time)

    def _fused(self, task: Task, compute: Value, traffic: _Traffic, arithmetic: Arithmetic) -> Value:
        world, constants = task.world, self.table.constants
        link = self.link(world)
        start = self._ranked(f"fused.{FUSED_OPS[task.op].replaces}", "start_us", world)
        start = start + traffic.waits * constants["fused.signal_us"]
        if not self.table.overlaps:
            moved = (traffic.linked + traffic.copied) / link
            return start + self.share(world) * (compute + moved)
        exchange = traffic.linked * ((world - 1) if task.order == "oblivious" else 1) / link
        # max(c, x) + min(c, x) / W, without a condition on which is larger.
        overlapped = arithmetic.largest(compute + exchange / world, exchange + compute / world)
        time = traffic.in_one_piece(compute + exchange, overlapped)
        return start + time + traffic.copied / constants["memory.rate"]

    def _matmul(self, task: Task, m: Size, k: Size, n: Size, arithmetic: Arithmetic, fused: bool) -> Value:
        constants = self.table.constants
        prefix = f"matmul.{self.table.dtype(task.dtype)}."
        itemsize = _itemsize(task.dtype)
        flops, weight = 2 * m * k * n, task.count * k * n * itemsize
        memory = (weight + (m * k + m * n) * itemsize) / constants["memory.rate"]
        time = arithmetic.largest(flops / constants[prefix + "rate"], memory)
        if prefix + "pack_rate" in constants:
            packed = time + weight / constants[prefix + "pack_rate"]
            time = arithmetic.where(m, task.count, time, packed)
        if fused and prefix + "few_rows_rate" in constants and FUSED_OPS[task.op].replaces != "all_to_all":
            few = arithmetic.largest(flops / constants[prefix + "few_rows_rate"], memory)
            limit = arithmetic.where(LONG_ROWS, k, FEW_ROWS, VERY_FEW_ROWS)
            time = arithmetic.where(m, limit, few, time)
        return constants[prefix + "start_us"] + time

    def share(self, world: int) -> float:
        """The number of ranks that work on one core."""
        return 1 if self.table.overlaps else max(1, world / self.cores)

    def link(self, world: int) -> float:
        """Bytes a microsecond that one rank sends or receives in a fused op."""
        return self._ranked("link", self.store, world)

    def _ranked(self, prefix: str, name: str, world: int) -> float:
        return self.table.ranked(prefix, name, world, self.cores)


Pick: TypeAlias = Callable[[Value, Value], Value]
"""Chooses one of two values by a condition on the sizes."""


@dataclass(frozen=True)
class _Traffic:
    linked: Value
    copied: Value
    waits: Value
    in_one_piece: Pick
    """Takes the first value if compute and exchange cannot overlap: no chunk can be sent before the whole
    product is computed, or no chunk can be computed before all data is there."""


def _traffic(task: Task, arithmetic: Arithmetic) -> _Traffic:
    """The traffic of the executors. Assumes equal splits if dropless, and parts of rows in gathers."""
    world, sent, ring = task.world, task.sent, task.order == "ring"
    chunk = sent / world
    family = FUSED_OPS[task.op].family
    if family is Family.GATHER:
        late = _few_rows_a_part(task, arithmetic)
        forwarded = (world - 2) * sent if ring else 0
        copied = 2 * sent + forwarded + late(sent * world, 0) + task.kept
        return _Traffic((world - 1) * sent, copied, world - 1 if ring else 1, late)
    if family is Family.PUBLISH:
        copied = (world if ring else 1) * sent + task.kept
        return _Traffic((world - 1) * sent, copied, world - 1 if ring else 1, _second)
    if family is Family.PRODUCE:
        return _Traffic((world - 1) * chunk, 2 * (world - 1) * chunk + task.kept, 1, _second)
    if family is Family.CONSUME:
        return _Traffic((world - 1) * chunk, 2 * chunk + sent + task.kept, 1, _second)
    whole = _few_rows_a_part(task, arithmetic)
    if task.matmuls and task.count != 1:  # tokens of experts are cut from a product in one piece
        whole = _first if task.op == "matmul_reduce_scatter" else _second
    if ring:
        wide = 4 // _itemsize(task.dtype)
        linked, copied, waits = (world - 1) * chunk * wide, (world - 1) * chunk * wide + 2 * sent, world - 1
    else:
        linked, copied, waits = (world - 1) * chunk, sent + chunk, 1
    if task.op == "matmul_reduce_scatter":
        return _Traffic(linked, copied + whole(2 * sent, 0) + task.kept, waits, whole)
    if task.matmuls:
        whole = _of_rows_only(whole, task, arithmetic)
    copied = copied + sent + chunk + whole(2 * sent, 0) + task.kept
    return _Traffic(linked + (world - 1) * chunk, copied, 2 * waits, whole)


def _one_shot(task: Task) -> _Traffic:
    """The traffic of an all_reduce in which every rank reduces all chunks."""
    return _Traffic((task.world - 1) * task.sent, 2 * task.sent + task.kept, 1, _first)


def _first(then: Value, otherwise: Value) -> Value:
    return then


def _second(then: Value, otherwise: Value) -> Value:
    return otherwise


def _few_rows_a_part(task: Task, arithmetic: Arithmetic) -> Pick:
    """Takes the first value if a part has too few rows for a matmul of its own."""
    if not task.matmuls:
        return _second
    limit, rows = FEW_ROWS_A_PART * task.world, task.matmuls[0][0]
    return lambda then, otherwise: arithmetic.where(limit, rows, otherwise, then)


def _of_rows_only(pick: Pick, task: Task, arithmetic: Arithmetic) -> Pick:
    """`pick`, if an all_reduce cuts rows. Parts of columns, which it cuts unless there are many more rows,
    never need a product in one piece."""
    m, _, n = task.matmuls[0]
    return lambda then, otherwise: arithmetic.where(4 * n, m, pick(then, otherwise), otherwise)


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
