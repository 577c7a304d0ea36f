"""matmul_all_reduce and matmul_reduce_scatter on GPUs where their product is `grouped`.

torch multiplies the rows of experts. A kernel adds these up token by token, and the tokens over the ranks.
This file has the problem, its ways, and the functions that `FusedOp.cuda` calls. Choices depend only on
arguments that are equal on all ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from torch import Tensor

from autofuse.lowering.gpu.choice.calls import GpuCall
from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL, Kernel, Way
from autofuse.lowering.gpu.choice.work import Product, Work
from autofuse.lowering.gpu.dense.pooled import PooledProblem
from autofuse.lowering.gpu.dense.token_rows import TOKENS, reduce_rows
from autofuse.lowering.gpu.memory.workspace import workspace_of
from autofuse.lowering.ops.matmul_all_reduce import OP as REDUCE
from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce
from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter
from autofuse.lowering.reference.grouped import grouped
from autofuse.lowering.reference.layout import all_reduce, reduce_scatter
from autofuse.lowering.reference.product import parse
from autofuse.lowering.reference.token_sum import token_sum
from autofuse.native_kernels.triton.exchange_sums import UNIT
from autofuse.native_kernels.triton.exchange_tokens import TokenRows, TokensConfig, launch_token_sums

Arguments: TypeAlias = MatmulAllReduce | MatmulReduceScatter

_KIND = re.compile(r"top (\d+) of (\d+)$")
"""What `measured_as` adds to the op."""


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
    def kernel(self) -> Kernel[PooledProblem, TokensConfig]:
        return TOKENS

    @property
    def multiplied(self) -> tuple[Work, ...]:
        """As if experts had equally many rows. Few tokens leave some experts without any."""
        entries = self.rows * self.top
        busy = min(self.experts, entries)
        return (Product(-(-entries // busy), self.depth, self.columns, busy),)

    @property
    def read(self) -> float:
        return float(self.rows * self.top * self.columns * self.dtype.itemsize)

    def at(self, op: str, m: int, k: int, n: int, world: int) -> TokensProblem:
        found = _KIND.search(op)
        assert found is not None
        top, experts = map(int, found.groups())
        return replace(self, rows=m, depth=k, columns=n, world=world, top=top, experts=experts)

    @property
    def measured_as(self) -> str:
        return f"{self.op}, top {self.top} of {self.experts}"

    def is_kin(self, op: str) -> bool:
        return op.startswith(f"{self.op}, top ")

    def rounded(self) -> TokensProblem:
        return self


# --- Calls ------------------------------------------------------------------------------------------------


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
        out = reduce_rows(workspace, way, problem, of, mean, args.site)
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
