"""matmul_all_reduce and matmul_reduce_scatter on GPUs where their product is `rows` of an embedding table, of
which each rank has a part.

A kernel reads the rows of this rank and sends them. Tokens of other ranks are masked. This file has the
problem and the function that `FusedOp.cuda` calls. Choices depend only on arguments that are equal on all
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.calls import GpuCall
from autofuse.lowering.gpu.choice.kernel import Kernel, Way
from autofuse.lowering.gpu.dense.pooled import PooledProblem
from autofuse.lowering.gpu.dense.token_rows import TOKENS, reduce_rows
from autofuse.lowering.gpu.memory.workspace import workspace_of
from autofuse.lowering.ops.matmul_all_reduce import GPU_DTYPES, MatmulAllReduce
from autofuse.lowering.ops.matmul_all_reduce import OP as REDUCE
from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter
from autofuse.lowering.reference.layout import all_reduce, reduce_scatter
from autofuse.lowering.reference.product import parse
from autofuse.native_kernels.triton.exchange_sums import UNIT
from autofuse.native_kernels.triton.exchange_tokens import TokenRows, TokensConfig, launch_token_sums

from .ways import TORCH_NCCL

Arguments: TypeAlias = MatmulAllReduce | MatmulReduceScatter

CONTRACTION = "rows"


@dataclass(frozen=True)
class VocabularyProblem(PooledProblem):
    """`rows` tokens; columns of the table."""

    replaced: ClassVar[str] = TORCH_NCCL
    kind: ClassVar[str] = "vocabulary"

    @property
    def kernel(self) -> Kernel[PooledProblem, TokensConfig]:
        return TOKENS

    @property
    def read(self) -> float:
        return float(self.rows * self.columns * self.dtype.itemsize)

    def at(self, op: str, m: int, k: int, n: int, world: int) -> VocabularyProblem:
        return replace(self, rows=m, columns=n, world=world)

    @property
    def measured_as(self) -> str:
        return f"{self.op}, vocabulary"

    def rounded(self) -> VocabularyProblem:
        return self


def vocabulary_call(op: str, args: Arguments) -> GpuCall | None:
    """The call with all its ways; None for another product, and where the kernel does not take the sizes."""
    product = parse(args.product)
    if product.contraction != CONTRACTION or args.keep_product or args.tail or len(product.stages) > 1:
        return None
    (x,), (w,) = args.x, args.w
    tokens, columns, mask, counts = x.shape[0], w.shape[1], None, True
    for stage in product.stages:
        if stage.name not in ("where", "masked_fill") or stage.number != 0 or stage.mask is None:
            return None
        mask, counts = args.operands[stage.mask], stage.name == "where"
        if mask.dtype != torch.bool or mask.shape != (tokens, 1):
            return None
    by_rows = op == REDUCE or (args.dim == 0 and args.outer == 1)
    workspace = workspace_of(args.group_name, w)
    if (
        x.dtype != torch.int64
        or w.dtype not in GPU_DTYPES
        or not tokens
        or not columns
        or columns % UNIT.value
        or (op != REDUCE and tokens % workspace.world)
    ):
        return None
    problem = VocabularyProblem(op, tokens, columns, workspace.world, w.dtype, workspace.programs, by_rows)
    mean = args.reduce_op == "avg"
    behind = None if mask is None else mask.contiguous()
    table = w if w.stride(1) == 1 and w.stride(0) % UNIT.value == 0 else w.contiguous()
    of = TokenRows(table, x.contiguous(), None, behind, None, tokens, 1, False, counts)

    def run(way: Way) -> list[Tensor] | None:
        out = reduce_rows(workspace, way, problem, of, mean, args.site)
        return None if out is None else [out]

    def unfused() -> list[Tensor]:
        p = w.new_empty(tokens, columns)
        launch_token_sums(of, p, workspace.programs)
        world, group = workspace.world, args.group_name
        if op == REDUCE:
            return [all_reduce(p, args.reduce_op, world, group)]
        return [reduce_scatter(p, args.reduce_op, args.dim, args.outer, world, group)]

    return GpuCall(op, args, workspace, problem, run, mean, unfused)
