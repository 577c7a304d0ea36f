"""matmul_all_reduce and matmul_reduce_scatter on GPUs where their product is `rows` of an embedding table.

Each rank has some rows of the table. A kernel reads the rows of this rank and sends them. Tokens whose rows
another rank has are masked. This file has the problem and the function that `FusedOp.cuda` calls. Choices
depend only on arguments that are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Kernel
from autofuse.lowering.gpu.dense.pooled import PooledProblem
from autofuse.lowering.gpu.dense.token_rows import EXCHANGES, AddedRows, Arguments
from autofuse.lowering.gpu.memory.workspace import workspace_of
from autofuse.lowering.ops.matmul_all_reduce import GPU_DTYPES
from autofuse.lowering.ops.matmul_all_reduce import OP as REDUCE
from autofuse.lowering.reference.product import Product, parse
from autofuse.native_kernels.triton.exchange_sums import UNIT
from autofuse.native_kernels.triton.exchange_tokens import TokenRows

from .ways import TORCH_NCCL

CONTRACTION = "rows"


@dataclass(frozen=True)
class VocabularyProblem(PooledProblem):
    """`rows` tokens; columns of the table."""

    replaced: ClassVar[str] = TORCH_NCCL
    kind: ClassVar[str] = "vocabulary"

    @property
    def exchanges(self) -> Sequence[Kernel[PooledProblem, Any]]:
        return EXCHANGES

    @property
    def summands(self) -> int:
        return 1


def added_rows(op: str, args: Arguments) -> AddedRows | None:
    """The call; None for another product, and where the kernel does not take the sizes."""
    product = parse(args.product)
    if product.contraction != CONTRACTION or args.keep_product or args.tail or len(product.stages) > 1:
        return None
    (x,), (w,) = args.x, args.w
    tokens, columns = x.shape[0], w.shape[1]
    for stage in product.stages:
        if stage.name not in ("where", "masked_fill") or stage.number != 0 or stage.mask is None:
            return None
        mask = args.operands[stage.mask]
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
    rows = partial(_read, product)
    return AddedRows(workspace, problem, partial(rows, args.x, args.w, args.operands), rows)


def _read(
    product: Product, x: Sequence[Tensor], w: Sequence[Tensor], operands: Sequence[Tensor]
) -> TokenRows:
    """The rows of the table, and which of them a kernel reads."""
    (places,), (table,), mask, counts = x, w, None, True
    for stage in product.stages:
        mask, counts = operands[stage.mask or 0].contiguous(), stage.name == "where"
    whole = table.stride(1) == 1 and table.stride(0) % UNIT.value == 0
    rows = table if whole else table.contiguous()
    return TokenRows(rows, places.contiguous(), None, mask, None, places.shape[0], 1, False, counts)
