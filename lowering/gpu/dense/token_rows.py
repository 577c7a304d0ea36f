"""Calls of `exchange_tokens` and `exchange_token_packets`. These kernels add up the rows of every token, and
then every token over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from autofuse.lowering.gpu.choice.calls import GpuCall, once
from autofuse.lowering.gpu.choice.kernel import Kernel, Launch, Way, only_kernels
from autofuse.lowering.gpu.choice.launcher import Launcher, contiguous
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace
from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce
from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter
from autofuse.lowering.reference.layout import all_reduce, reduce_scatter
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.triton.exchange_sums import sums_needs
from autofuse.native_kernels.triton.exchange_token_packets import (
    MOST_ELEMENTS,
    TokenPacketsConfig,
    launch_exchange_token_packets,
    token_packets_needs,
)
from autofuse.native_kernels.triton.exchange_tokens import (
    TokenRows,
    TokensConfig,
    launch_exchange_tokens,
    launch_token_sums,
)

from .pooled import PooledProblem, kernel_work, packets_work

Arguments: TypeAlias = MatmulAllReduce | MatmulReduceScatter

# --- Ways -------------------------------------------------------------------------------------------------


def _configs(problem: PooledProblem) -> Iterator[TokensConfig]:
    """Configurations with different numbers of rows that a multiprocessor loads at a time. In one exchange a
    rank receives W / 2 times the bytes of two exchanges."""
    config = TokensConfig(once=problem.everywhere and problem.world == 2)
    yield config
    if problem.world <= 4 or problem.dtype.itemsize == 2:  # else a thread has too few registers
        yield replace(config, length=2048)
    yield replace(config, length=4096, warps=8, per_sm=2)
    if problem.everywhere and problem.world > 2:
        yield replace(config, once=True)


def _needs(config: TokensConfig, p: PooledProblem) -> Need:
    return sums_needs(p.rows * p.columns, p.dtype.itemsize, p.world, p.everywhere, config)


def _packets_configs(problem: PooledProblem) -> Iterator[TokenPacketsConfig]:
    if problem.rows * problem.columns <= MOST_ELEMENTS:
        yield TokenPacketsConfig()
        yield TokenPacketsConfig(length=2048)


def _packets_needs(config: TokenPacketsConfig, p: PooledProblem) -> Need:
    return token_packets_needs(p.rows * p.columns, p.dtype.itemsize, p.world, p.everywhere, config)


def _launch(
    exchange: Callable[..., None], at: Launch, config: TokensConfig | TokenPacketsConfig,
    given: Sequence[Tensor], out: Tensor, of: TokenRows, mean: bool, everywhere: bool,
) -> None:  # fmt: skip
    """exchange: the launch of a kernel; given: the tensors of `of`, which move from call to call."""
    exchange(at.memory, of, out, mean, everywhere, config, at.site, at.compile_only)


TOKENS: Kernel[PooledProblem, TokensConfig] = Kernel(
    "tokens",
    _configs,
    needs=_needs,
    launch=partial(_launch, launch_exchange_tokens),
    only_launches=only_kernels,
    work=lambda config, p: kernel_work(config.once, p),
    source="triton/exchange_tokens.py",
)
TOKEN_PACKETS: Kernel[PooledProblem, TokenPacketsConfig] = Kernel(
    "token_packets",
    _packets_configs,
    needs=_packets_needs,
    launch=partial(_launch, launch_exchange_token_packets),
    only_launches=only_kernels,
    work=lambda config, p: packets_work(p),
    source="triton/exchange_token_packets.py",
)
EXCHANGES: tuple[Kernel[PooledProblem, Any], ...] = (TOKENS, TOKEN_PACKETS)


# --- Calls ------------------------------------------------------------------------------------------------


class AddedRows(NamedTuple):
    """A call of an op. read(): what the kernel reads; rows(x, w, operands): the same of later calls, with
    operands laid out alike."""

    workspace: GpuWorkspace
    problem: PooledProblem
    read: Callable[[], TokenRows]
    rows: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], TokenRows]


def tensors_of(of: TokenRows) -> list[Tensor]:
    """As `launch` takes them."""
    return [t for t in (of.rows, of.index, of.before, of.behind, of.added) if t is not None]


class Reduced:
    """Calls of one kind: `reduced(of)`."""

    def __init__(
        self, workspace: GpuWorkspace, way: Way, problem: PooledProblem, variant: Hashable, mean: bool,
        site: str,
    ) -> None:  # fmt: skip
        self.launcher = Launcher(workspace, way, problem.op, site, problem, (variant, mean))
        self._problem, self._mean = problem, mean
        rows = problem.rows if problem.everywhere else problem.rows // problem.world
        self._shape = rows, problem.columns

    def __call__(self, of: TokenRows) -> Tensor | None:
        """None where it has to be left to torch while a graph is captured."""
        launcher, problem = self.launcher, self._problem
        if launcher.enter() is None:
            return None
        out = of.rows.new_empty(self._shape, dtype=problem.dtype)
        launcher.launch(tensors_of(of), out, of, self._mean, problem.everywhere)
        launcher.leave()
        return out

    def again(self, of: TokenRows) -> Tensor | None:
        """As `__call__`, of a call like one before that was not captured; None if that has to go the long
        way."""
        found = self.launcher.again(tensors_of(of), [contiguous(*self._shape)], (), (self._problem.dtype,))
        return None if found is None else found[0]


def reduced_of(added: AddedRows, way: Way, of: TokenRows, mean: bool, site: str) -> Reduced:
    """What runs calls like one that reads `of`."""
    workspace, problem = added.workspace, added.problem
    factors = [None if t is None else t.dtype for t in (of.before, of.behind)]
    variant = (problem, of.rows.dtype, of.rows.stride(0), *factors, *of.options().values())

    def make() -> Reduced:
        return Reduced(workspace, way, problem, variant, mean, site)

    return once(workspace, ("tokens", way.name, variant, mean, site), make)


def call_of(op: str, args: Arguments, added: AddedRows | None) -> GpuCall | None:
    """The call with all its ways; None where the reference has to run it."""
    if added is None:
        return None
    workspace, problem = added.workspace, added.problem
    mean, keep = args.reduce_op == "avg", args.keep_product

    def run(way: Way) -> list[Tensor] | None:
        of = added.read()
        out = reduced_of(added, way, of, mean, args.site)(of)
        return None if out is None else [out, of.rows] if keep else [out]

    def unfused() -> list[Tensor]:
        of = added.read()
        p = of.rows.new_empty(problem.rows, problem.columns, dtype=problem.dtype)
        launch_token_sums(of, p, workspace.programs)
        world, group = workspace.world, args.group_name
        if isinstance(args, MatmulAllReduce):
            total = all_reduce(p, args.reduce_op, world, group)
        else:
            total = reduce_scatter(p, args.reduce_op, args.dim, args.outer, world, group)
        return [total, of.rows] if keep else [total]

    return GpuCall(op, args, workspace, problem, run, mean, unfused)


class Again:
    """Calls like one that has run in the way of a kernel: `again(x, w, operands)`."""

    def __init__(self, added: AddedRows, reduced: Reduced, keep: bool) -> None:
        self.group = weakref.ref(added.workspace.group)
        self._rows, self._reduced, self._keep = added.rows, reduced, keep

    def again(
        self, x: Sequence[Tensor], w: Sequence[Tensor], operands: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """None if the call has to go the long way."""
        launcher = self._reduced.launcher
        # torch multiplies before the guard of the launch is asked, so what Python can check comes first.
        if not (launcher.is_short and launcher.is_next() and launcher.goes_on()):
            return None
        of = self._rows(x, w, operands)
        out = self._reduced.again(of)
        return None if out is None else [out, of.rows] if self._keep else [out]


def again_of(op: str, args: Arguments, added: AddedRows | None) -> Again | None:
    """What runs calls like this one, which has run; None unless that took the way of a kernel."""
    call = call_of(op, args, added)
    if call is None or added is None:
        return None
    way = added.workspace.calls.get(call.kind)
    if not isinstance(way, Way) or not way.fused:
        return None

    def make() -> Again:
        reduced = reduced_of(added, way, added.read(), args.reduce_op == "avg", args.site)
        return Again(added, reduced, args.keep_product)

    return once(added.workspace, ("again", call.kind), make)
