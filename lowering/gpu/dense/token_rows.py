"""Calls of `exchange_tokens`, which adds up rows for every token, and the tokens over the ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

from torch import Tensor

from autofuse.lowering.gpu.choice.calls import once
from autofuse.lowering.gpu.choice.kernel import Kernel, Launch, Way
from autofuse.lowering.gpu.choice.launcher import Launcher
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.triton.exchange_tokens import (
    TokenRows,
    TokensConfig,
    launch_exchange_tokens,
    tokens_needs,
)

from .pooled import PooledProblem, kernel_work

# --- Ways -------------------------------------------------------------------------------------------------


def _configs(problem: PooledProblem) -> Iterator[TokensConfig]:
    """Differ in how many rows are on their way in a multiprocessor. In one exchange each rank receives as
    much as in two from W - 1 ranks, half of that from one."""
    config = TokensConfig(once=problem.everywhere and problem.world == 2)
    yield config
    yield replace(config, length=2048, warps=8, per_sm=4)
    yield replace(config, length=4096, warps=8, per_sm=2)
    if problem.everywhere and problem.world > 2:
        yield replace(config, once=True)


def _needs(config: TokensConfig, p: PooledProblem) -> Need:
    return tokens_needs(p.rows * p.columns, p.dtype.itemsize, p.world, p.everywhere, config)


def _launch(
    at: Launch, config: TokensConfig, of: TokenRows, out: Tensor, mean: bool, everywhere: bool
) -> None:
    launch_exchange_tokens(at.memory, of, out, mean, everywhere, config, at.site, at.compile_only)


TOKENS: Kernel[PooledProblem, TokensConfig] = Kernel(
    "tokens",
    _configs,
    needs=_needs,
    launch=_launch,
    work=lambda config, p: kernel_work(config.once, p),
    source="triton/exchange_tokens.py",
)


# --- Calls ------------------------------------------------------------------------------------------------


class Reduced:
    """Calls of one kind: `reduced(of)`."""

    def __init__(
        self, workspace: GpuWorkspace, way: Way, problem: PooledProblem, variant: Hashable, mean: bool,
        site: str,
    ) -> None:  # fmt: skip
        self._launcher = Launcher(workspace, way, problem.op, site, problem, (variant, mean))
        self._problem, self._mean = problem, mean
        rows = problem.rows if problem.everywhere else problem.rows // problem.world
        self._shape = rows, problem.columns

    def __call__(self, of: TokenRows) -> Tensor | None:
        """None where it has to be left to torch while a graph is captured."""
        launcher, problem = self._launcher, self._problem
        if launcher.enter() is None:
            return None
        out = of.rows.new_empty(self._shape, dtype=problem.dtype)
        launcher.launch(of, out, self._mean, problem.everywhere)
        launcher.leave()
        return out


def reduce_rows(
    workspace: GpuWorkspace, way: Way, problem: PooledProblem, of: TokenRows, mean: bool, site: str
) -> Tensor | None:
    """A call of `Reduced`."""
    factors = [None if t is None else t.dtype for t in (of.before, of.behind)]
    variant = (problem, of.rows.dtype, of.rows.stride(0), *factors, *of.options().values())

    def make() -> Reduced:
        return Reduced(workspace, way, problem, variant, mean, site)

    return once(workspace, ("tokens", way.name, variant, mean, site), make)(of)
