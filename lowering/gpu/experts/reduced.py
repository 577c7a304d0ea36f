"""matmul_all_reduce and matmul_reduce_scatter on GPUs where their product is `grouped`.

torch multiplies the rows of experts. A kernel adds these up token by token, and the tokens over the ranks.
This file has the problem, its ways, and the functions that `FusedOp.cuda` calls. Choices depend only on
arguments that are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from torch import Tensor

from autofuse.lowering.gpu.choice.calls import GpuCall, once
from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL, Kernel, Launch, Way
from autofuse.lowering.gpu.choice.launcher import Launcher
from autofuse.lowering.gpu.choice.work import Product, Rows, Work
from autofuse.lowering.gpu.dense.pooled import PooledProblem, kernel_work
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_of
from autofuse.lowering.ops.matmul_all_reduce import OP as REDUCE
from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce
from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter
from autofuse.lowering.reference.grouped import grouped
from autofuse.lowering.reference.layout import all_reduce, reduce_scatter
from autofuse.lowering.reference.product import parse
from autofuse.lowering.reference.token_sum import token_sum
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.triton.exchange_sums import UNIT
from autofuse.native_kernels.triton.exchange_tokens import (
    TokenRows,
    TokensConfig,
    launch_exchange_tokens,
    launch_token_sums,
    tokens_needs,
)

Arguments: TypeAlias = MatmulAllReduce | MatmulReduceScatter


@dataclass(frozen=True)
class TokensProblem(PooledProblem):
    """`rows` tokens, each of which has `top` rows of `experts`, which have K = `depth`."""

    experts: int
    top: int
    depth: int

    replaced: ClassVar[str] = CUBLAS_NCCL
    kind: ClassVar[str] = "tokens"

    @property
    def k(self) -> int:
        return self.depth

    @property
    def kernel(self) -> Kernel[TokensProblem, TokensConfig]:
        return TOKENS

    @property
    def computed(self) -> tuple[Work, ...]:
        """The matmuls, as if experts had equally many rows, and the sums."""
        entries, nbytes = self.rows * self.top, self.dtype.itemsize
        product = Product(-(-entries // self.experts), self.depth, self.columns, self.experts)
        return product, Rows(f"{self.op} token sums", entries * self.columns * nbytes, 0.0, False)

    def at(self, op: str, m: int, k: int, n: int, world: int) -> TokensProblem:
        return replace(self, rows=m, depth=k, columns=n, world=world)

    @property
    def measured_as(self) -> str:
        return f"{self.op}, top {self.top} of {self.experts}"

    def rounded(self) -> TokensProblem:
        return self


# --- Ways -------------------------------------------------------------------------------------------------


def _configs(problem: TokensProblem) -> Iterator[TokensConfig]:
    """In one exchange each rank receives as much as in two from W - 1 ranks, half of that from one."""
    config = TokensConfig(once=problem.everywhere and problem.world == 2)
    yield config
    yield replace(config, length=512, warps=2, per_sm=8)
    yield replace(config, length=2048, warps=8, per_sm=2)
    if problem.everywhere and problem.world > 2:
        yield replace(config, once=True)


def _needs(config: TokensConfig, p: TokensProblem) -> Need:
    return tokens_needs(p.rows * p.columns, p.dtype.itemsize, p.world, p.everywhere, config)


def _launch(
    at: Launch, config: TokensConfig, of: TokenRows, out: Tensor, mean: bool, everywhere: bool
) -> None:
    launch_exchange_tokens(at.memory, of, out, mean, everywhere, config, at.site, at.compile_only)


TOKENS: Kernel[TokensProblem, TokensConfig] = Kernel(
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
        self, workspace: GpuWorkspace, way: Way, problem: TokensProblem, variant: Hashable, mean: bool,
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


def reduce_tokens(
    workspace: GpuWorkspace, way: Way, problem: TokensProblem, of: TokenRows, mean: bool, site: str
) -> Tensor | None:
    """A call of `Reduced`."""
    factors = [None if t is None else t.dtype for t in (of.before, of.behind)]
    variant = (problem, of.rows.dtype, of.rows.stride(0), *factors, *of.options().values())

    def make() -> Reduced:
        return Reduced(workspace, way, problem, variant, mean, site)

    return once(workspace, ("tokens", way.name, variant, mean, site), make)(of)


def reduced_call(op: str, args: Arguments) -> GpuCall | None:
    """The call with all its ways; None where the reference has to run it."""
    product, x, w = parse(args.product), args.x[0], args.w[0]
    mean = args.reduce_op == "avg"
    found = token_sum(x.dtype, args.operands, product.stages)
    if found is None or found.base is not None or not found.fits(x.shape[0]):
        return None
    entries, columns = x.shape[0] if found.index is None else found.index.shape[0], w.shape[2]
    tokens = entries // found.k
    workspace = workspace_of(args.group_name, x)
    if not tokens or entries % found.k or columns % UNIT.value or (op != REDUCE and tokens % workspace.world):
        return None
    added = [args.operands[stage.operand or 0] for stage in product.stages[found.stages :]]
    if any(t.shape != (tokens, columns) for t in added):
        return None
    by_rows = op == REDUCE or (args.dim == 0 and args.outer == 1)
    problem = TokensProblem(
        op, tokens, columns, workspace.world, found.dtype, workspace.programs, by_rows, w.shape[0], found.k,
        x.shape[1],
    )  # fmt: skip
    ends = args.operands[product.inputs[0]] if product.inputs else None

    def multiplied() -> TokenRows:
        rows, *others = (grouped(xi, wi, ends) for xi, wi in zip(args.x, args.w, strict=True))
        for other in others:
            rows = rows + other
        return TokenRows(
            rows.contiguous(), _contiguous(found.index), _contiguous(found.before and found.before[0]),
            _contiguous(found.behind and found.behind[0]), _contiguous(added[0] if added else None), tokens,
            found.k, found.fold,
        )  # fmt: skip

    def results(out: Tensor, of: TokenRows) -> list[Tensor]:
        return [out, of.rows] if args.keep_product else [out]

    def run(way: Way) -> list[Tensor] | None:
        of = multiplied()
        out = reduce_tokens(workspace, way, problem, of, mean, args.site)
        return None if out is None else results(out, of)

    def unfused() -> list[Tensor]:
        of = multiplied()
        p = of.rows.new_empty(tokens, columns, dtype=problem.dtype)
        launch_token_sums(of, p, workspace.programs)
        world, group = workspace.world, args.group_name
        if op == REDUCE:
            return results(all_reduce(p, args.reduce_op, world, group), of)
        return results(reduce_scatter(p, args.reduce_op, args.dim, args.outer, world, group), of)

    return GpuCall(op, args, workspace, problem, run, mean, unfused)


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()
