"""matmul_all_reduce and matmul_reduce_scatter on GPUs where their product is `grouped`.

torch multiplies the rows of experts. A kernel adds up these rows token by token, and sums the tokens over the
ranks.
This file has the problem, its ways, and the functions that `FusedOp.cuda` calls. Choices depend only on
arguments that are equal on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL, Kernel
from autofuse.lowering.gpu.choice.work import Product, Work
from autofuse.lowering.gpu.dense.pooled import PooledProblem
from autofuse.lowering.gpu.dense.token_rows import EXCHANGES, AddedRows, Arguments
from autofuse.lowering.gpu.memory.workspace import workspace_of
from autofuse.lowering.ops.matmul_all_reduce import OP as REDUCE
from autofuse.lowering.reference.grouped import grouped
from autofuse.lowering.reference.product import Product as Parsed
from autofuse.lowering.reference.product import parse
from autofuse.lowering.reference.token_sum import TokenSum, token_sum
from autofuse.native_kernels.triton.exchange_sums import UNIT
from autofuse.native_kernels.triton.exchange_tokens import TokenRows

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
    def exchanges(self) -> Sequence[Kernel[PooledProblem, Any]]:
        return EXCHANGES

    @property
    def multiplied(self) -> tuple[Work, ...]:
        """As if experts had equally many rows. Few tokens leave some experts without any."""
        entries = self.rows * self.top
        busy = min(self.experts, entries)
        return (Product(-(-entries // busy), self.depth, self.columns, busy),)

    @property
    def summands(self) -> int:
        return self.top

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


def added_rows(op: str, args: Arguments) -> AddedRows | None:
    """The call; None where the reference has to run it."""
    product, x, w = parse(args.product), args.x[0], args.w[0]
    found = token_sum(x.dtype, args.operands, product.stages)
    if found is None or found.base is not None or not found.fits(x.shape[0]):
        return None
    entries, columns = x.shape[0] if found.index is None else found.index.shape[0], w.shape[2]
    tokens = entries // found.k
    workspace = workspace_of(args.group_name, x)
    if not tokens or entries % found.k or columns % UNIT.value or (op != REDUCE and tokens % workspace.world):
        return None
    if any(t.shape != (tokens, columns) for t in _added(product, found, args.operands)):
        return None
    by_rows = op == REDUCE or (args.dim == 0 and args.outer == 1)
    problem = TokensProblem(
        op, tokens, columns, workspace.world, found.dtype, workspace.programs, by_rows, w.shape[0], found.k,
        x.shape[1],
    )  # fmt: skip
    # `_multiplied` holds no tensors: a later call brings its own.
    read = partial(_added_up, product, found, args.x, args.w, args.operands)
    return AddedRows(workspace, problem, read, partial(_multiplied, product))


def _added(product: Parsed, found: TokenSum, operands: Sequence[Tensor]) -> list[Tensor]:
    """What is added to the sums."""
    return [operands[stage.operand or 0] for stage in product.stages[found.stages :]]


def _multiplied(
    product: Parsed, x: Sequence[Tensor], w: Sequence[Tensor], operands: Sequence[Tensor]
) -> TokenRows:
    """As `_added_up`, of a later call."""
    found = token_sum(x[0].dtype, operands, product.stages)
    assert found is not None
    return _added_up(product, found, x, w, operands)


def _added_up(
    product: Parsed, found: TokenSum, x: Sequence[Tensor], w: Sequence[Tensor], operands: Sequence[Tensor]
) -> TokenRows:
    """The rows by torch, and how the kernel adds them up."""
    ends = operands[product.inputs[0]] if product.inputs else None
    rows, *others = (grouped(xi, wi, ends) for xi, wi in zip(x, w, strict=True))
    for other in others:
        rows = rows + other
    added = _added(product, found, operands)
    entries = rows.shape[0] if found.index is None else found.index.shape[0]
    return TokenRows(
        rows.contiguous(), _contiguous(found.index), _contiguous(found.before and found.before[0]),
        _contiguous(found.behind and found.behind[0]), _contiguous(added[0] if added else None),
        entries // found.k, found.k, found.fold,
    )  # fmt: skip


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()
