"""matmul_all_reduce: the sum (or mean) over the ranks of a product.

    x[i]: [M, K_i]   w[i]: [K_i, N]   P = product(x, w, operands): [M, N]

    forward   Y = sum over ranks of P                    Y: [M, N], the same on every rank
    backward  G = sum over ranks of dY                   as the functional collective has it
    dgrad     dx[i] = G @ w[i]^T
    wgrad     dw[i] = x[i]^T @ G

With `avg` both sums are means. With `keep_product` P is returned too and its own gradient is added to G. If
the product has the stage `keep`, the sum of the matmuls is returned in place of P, and there is no gradient.
A `tail` (`reference/tail.py`) is applied to Y; its kept values are returned between Y and P. It has no
gradient. `proof`: what proves that its operands are replicated, or `unproven`; empty if owners are not asked.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.cpu.reduce_executor import reduce_plan_shape, run_reduce
from autofuse.lowering.gpu.support import (
    MOST_TAIL_OPERANDS,
    MOST_TAIL_RESULTS,
    MOST_TOKEN_ROWS,
)
from autofuse.lowering.ops.library import FusedOp, Gap, register
from autofuse.lowering.plan import Family
from autofuse.lowering.reference.layout import all_reduce
from autofuse.lowering.reference.product import (
    dtype_of,
    is_grouped,
    is_pooled,
    parse,
    product_backward,
    with_kept,
)
from autofuse.lowering.reference.tail import check_tail, tail_reference
from autofuse.lowering.reference.tail import parse as parse_tail
from autofuse.lowering.reference.token_sum import token_sum
from autofuse.lowering.torch_internals import group_size

OP = "matmul_all_reduce"

BIASED = "addmm %0"
"""The product with an epilogue that GPU kernels apply. torch applies all other epilogues, before the
exchange."""

GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that GPU kernels exchange, and those of the rows of tables and experts that they add up."""


class MatmulAllReduce(NamedTuple):
    """The arguments of the op."""

    x: list[Tensor]
    w: list[Tensor]
    operands: list[Tensor]
    product: str
    reduce_op: str
    keep_product: bool
    tail_operands: list[Tensor]
    tail: str
    proof: str
    group_name: str
    order: str
    site: str

    @property
    def terms(self) -> int:
        return len(self.x)

    @property
    def dim(self) -> int:
        """The dim along which a reduce_scatter cuts; nothing is cut here."""
        return 0

    @property
    def outer(self) -> int:
        return 1


def _fake(args: MatmulAllReduce) -> list[Tensor]:
    p, kept = with_kept(args.x, args.w, args.operands, args.product)
    results = tail_reference(p.new_empty(p.shape), args.tail_operands, args.tail)
    return [*results, kept.new_empty(kept.shape)] if args.keep_product else results


def _reference(args: MatmulAllReduce) -> list[Tensor]:
    p, kept = with_kept(args.x, args.w, args.operands, args.product)
    reduced = all_reduce(p, args.reduce_op, group_size(args.group_name), args.group_name)
    check_tail(p.shape, args.tail_operands, args.tail, OP)
    results = tail_reference(reduced, args.tail_operands, args.tail)
    return [*results, kept] if args.keep_product else results


def _cuda(args: MatmulAllReduce) -> Any:
    from autofuse.lowering.gpu.dense.call import run_reduce

    return run_reduce(OP, args)


def _backward(ctx: Any, args: MatmulAllReduce, grads: list[Tensor | None]) -> dict[str, Any]:
    refuse_tail(OP, args.tail)
    of_y, of_p = (*grads, None)[:2]
    if of_y is not None:
        of_y = all_reduce(of_y, args.reduce_op, group_size(args.group_name), args.group_name)
    g = of_p if of_y is None else of_y if of_p is None else of_y + of_p
    assert g is not None  # autograd runs a backward only if an output has a gradient
    dx, dw, of_operands = product_backward(g, args.x, args.w, args.operands, args.product, ctx.needs[:3])
    return {"x": dx, "w": dw, "operands": of_operands}


def refuse_tail(op: str, tail: str) -> None:
    if tail:
        raise RuntimeError(
            f"{op}: a tail has no gradient ({tail!r}); tails are for graphs behind autograd, "
            "pass tail='' and apply its stages to the result"
        )


def is_gpu_tail(tail: str, operands: Sequence[Tensor]) -> bool:
    """Whether GPU kernels apply the tail."""
    stages = parse_tail(tail)
    results = 1 + sum(stage.kept for stage in stages)
    floats = {torch.bfloat16, torch.float16, torch.float32}
    read = {t.dtype for t in operands} <= floats | {torch.bool}
    cast = {s.dtype for s in stages} <= floats | {torch.float8_e4m3fn, torch.float8_e5m2, None}
    return len(operands) <= MOST_TAIL_OPERANDS and results <= MOST_TAIL_RESULTS and read and cast


def sizes_of_call(args: Any) -> Sequence[Sequence[int]]:
    """The sizes by which a report distinguishes calls. Bags look up new numbers of rows in each call."""
    first = args.operands if is_pooled(args.product) else args.x
    return first[0].shape, args.w[0].shape


def exchanged(args: Any) -> torch.dtype | None:
    """The dtype that moves between the ranks; None for sums of rows, whose dtypes `REDUCE_GAPS` check."""
    return None if is_added_up(args) else dtype_of(args.product, args.w[0].dtype, args.operands)


def is_added_up(args: Any) -> bool:
    """Whether a rank adds up rows, of tables or of experts, before the ranks' sums are added."""
    return is_pooled(args.product) or is_grouped(args.product)


def _is_sent_as_pooled(args: Any) -> bool:
    """Whether only the dtype of the pooled rows is changed before they are sent."""
    stages = parse(args.product).stages
    dtypes = [*(w.dtype for w in args.w), *(stage.dtype for stage in stages)]
    return len(stages) <= 1 and all(dtype in GPU_DTYPES for dtype in dtypes)


def _is_summed_by_token(args: Any) -> bool:
    """Whether rows of experts are weighted and added up, and perhaps one matrix to the sums."""
    product, dtype = parse(args.product), args.x[0].dtype
    found = token_sum(dtype, args.operands, product.stages)
    if found is None or found.base is not None or found.k > MOST_TOKEN_ROWS:
        return False
    behind = product.stages[found.stages :]
    added = [args.operands[s.operand] for s in behind if s.name == "add" and s.operand is not None]
    factors = [scale[0].dtype for scale in (found.before, found.behind) if scale is not None]
    # torch multiplies rows of other dtypes only where the host reads how many each expert has.
    usual = dtype == torch.bfloat16 if product.inputs else dtype in GPU_DTYPES
    known = all(each in GPU_DTYPES for each in (found.dtype, *factors))
    return usual and known and len(behind) == len(added) <= 1 and all(t.dtype == found.dtype for t in added)


REDUCE_GAPS: tuple[Gap[Any], ...] = (
    Gap(
        lambda args: is_pooled(args.product) and not _is_sent_as_pooled(args),
        "GPU kernels reduce pooled rows of bfloat16, float16 and float32, as they are or cast, "
        "not {0.product!r}",
        "move scales behind the collective",
    ),
    Gap(
        lambda args: is_grouped(args.product) and not _is_summed_by_token(args),
        f"GPU kernels add up to {MOST_TOKEN_ROWS} rows of experts of each token, which may be chosen by an "
        "index, weighted and cast, and one matrix to the sums, not {0.product!r}",
        "give every token equally many rows, of bfloat16, and move other ops behind the collective",
    ),
    Gap(
        lambda args: args.dim == 1 and (args.product not in ("mm", BIASED) or args.keep_product),
        "GPU kernels scatter columns of matmuls with a bias or none, and else whole rows",
        "scatter the rows, bags or tokens",
    ),
    Gap(
        lambda args: is_added_up(args) and bool(args.tail),
        "GPU kernels apply no tail behind sums of rows, not {0.tail!r}",
        "leave the stages in the graph",
    ),
    Gap(
        lambda args: args.keep_product and is_pooled(args.product),
        "the pooled rows are read elsewhere, too",
        "read the result of the collective instead, if that will do",
    ),
    Gap(
        lambda args: not is_gpu_tail(args.tail, args.tail_operands),
        f"GPU kernels apply tails of up to {MOST_TAIL_OPERANDS} operands and {MOST_TAIL_RESULTS} results, "
        "of bfloat16, float16 and float32, which may be cast to float8, not {0.tail!r}",
        "leave the stages in the graph",
    ),
)

register(
    FusedOp(
        name=OP,
        arguments=MatmulAllReduce,
        returns="Tensor[]",
        family=Family.REDUCE,
        replaces="all_reduce",
        fake=_fake,
        reference=_reference,
        cpu=lambda args: run_reduce(OP, args),
        plan_shape=lambda args: reduce_plan_shape(OP, args),
        backward=_backward,
        cuda=_cuda,
        exchanged=exchanged,
        gpu_dtypes=GPU_DTYPES,
        gpu_gaps=REDUCE_GAPS,
        shapes=sizes_of_call,
    )
)
