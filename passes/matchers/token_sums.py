"""Rows of experts that are added up token by token: `grouped` products (`lowering/reference/grouped.py`).

The contraction multiplies the rows of each expert by its matrix. In a `bmm` of matrices `[R, N, K]` and
vectors `[R, K, 1]`, each row has a copy of the matrix of its expert.

sum(P[order].view(T, k, N), 1)          rows in the order of tokens, k each
sum(P: [E, T, N], 0)                    all experts have all tokens
bmm(weights: [T, 1, k], rows: [T, k, N])    the same, weighted; and bmm(rows: [T, N, k], weights: [T, k, 1])
index_add(base, 0, token, P)            and index_put and scatter_add that add, that of torchtitan, too
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import fx

from autofuse.passes.graph.emit import Emitter
from autofuse.passes.graph.follow import Shapes, argument, aten, dtype_of, tensor
from autofuse.passes.graph.layout import Layout, Size, exact_quotient, is_natural, prod, same_shape, same_size
from autofuse.passes.graph.row_numbers import FROM_EITHER_END
from autofuse.passes.reasons import Reason, Reject

from .contractions import Product, contraction
from .match import values
from .matmuls import is_grouped
from .operands import Operand, two_dimensional
from .placement import is_index, repeated_index, row_index

GROUPED = "grouped"
CHOICES = (aten.index.Tensor, aten.index_select.default)
"""Ops that may choose rows of experts."""
_SUM = aten.sum.dim_IntList
_ADDS = (aten.index_add.default, aten.index_put.default, aten.scatter_add.default)
_OF_TORCHTITAN = "torchtitan::deterministic_scatter_add"
"""A scatter_add of rows whose bits do not change from run to run. So are those of fused ops on CPUs."""

Extend: TypeAlias = Callable[..., Product]
MatchRows: TypeAlias = Callable[[fx.Node], "Product | Reject"]


def adds_rows(n: fx.Node) -> bool:
    """Whether the node may add rows up to tokens."""
    if n.target is aten.index_put.default:
        return bool(argument(n, 3, "accumulate", False))
    return n.target in (_SUM, aten.bmm.default) or n.target in _ADDS or _is_of_torchtitan(n)


def _is_of_torchtitan(n: fx.Node) -> bool:
    val = tensor(n) if isinstance(n.target, torch._ops.OpOverload) else None
    return val is not None and val.device.type == "cpu" and n.target.name() == _OF_TORCHTITAN


def rows_of_experts(n: fx.Node, shapes: Shapes) -> Product | Reject:
    """The contraction of a grouped or batched matmul as rows `[R, N]`."""
    if n.target is not aten.bmm.default and not is_grouped(n.target):
        instead = "; embedding_bag adds up rows" if n.target is aten.embedding.default else ""
        return Reject(Reason.NO_COMPUTE, f"{n.name} is no matmul of several experts{instead}")
    found = contraction(n, shapes, batched=True)
    if isinstance(found, Reject):
        return found
    shape: tuple[Size, ...] = (prod(found.shape[:-1]), found.shape[-1])
    if len(found.shape) == 3 and same_size(shape[1], 1) and not same_size(found.shape[1], 1):
        found = replace(found, x=found.w, w=found.x, of_vectors=True)
        shape = found.shape[:2]
    layout = Layout.of(shape).reshape(shapes.known(n))
    assert layout is not None
    experts, operands = shapes.known(found.w[0])[0], found.operands
    stage = GROUPED
    if found.offsets is not None:
        stage = f"{GROUPED} %0"
        operands = (Operand(found.offsets, shape=(experts, 1)),)
    return replace(
        found, stages=(stage,), operands=operands, shape=shape, layout=layout, last_layout=layout,
        offsets=None, bias=(),
    )  # fmt: skip


def values_of_terms(found: Product) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The metadata of x and w. Vectors and their matrices are as the fused op takes them."""
    x, w = values(found.x), values(found.w)
    return ([v.squeeze(-1) for v in x], [v.mT for v in w]) if found.of_vectors else (x, w)


def grouped_terms(emitter: Emitter, found: Product) -> tuple[list[fx.Node], list[fx.Node]]:
    """x and w of a `grouped` product, as the fused op takes them."""
    if not found.of_vectors:
        return [two_dimensional(emitter, n) for n in found.x], list(found.w)
    vectors = [emitter.call(aten.squeeze.dim, n, -1) for n in found.x]
    return vectors, [emitter.call(aten.permute.default, n, [0, 2, 1]) for n in found.w]


def chosen_rows(n: fx.Node, shapes: Shapes, match: MatchRows, extend: Extend) -> Product | Reject:
    """Rows that an index puts into another order."""
    source = n.args[0]
    chosen = row_index(n.args[1]) if n.target is aten.index.Tensor else n.args[2] if n.args[1] == 0 else None
    if not isinstance(source, fx.Node) or not is_index(chosen):
        return Reject(Reason.LAYOUT, f"{n.name} chooses other things than rows")
    found = match(source)
    if isinstance(found, Reject):
        return found
    if not _are_rows(found, source, shapes):
        return Reject(Reason.LAYOUT, f"{source.name} is no list of rows of experts")
    count = shapes.known(n)[0]
    stage = f"take %{len(found.operands)}"
    order = _row_numbers(n, chosen, count, found.shape[0])
    return _as_tokens(extend(found, source, n, stage, order), n, count, shapes)


def added_rows(n: fx.Node, shapes: Shapes, match: MatchRows, extend: Extend) -> Product | Reject:
    """The sum over the rows of each token."""
    if n.target is _SUM:
        return _sum(n, shapes, match, extend)
    if n.target is aten.bmm.default:
        return _weighted(n, shapes, match, extend)
    base, rows, index = _put(n)
    val = tensor(base)
    if not isinstance(rows, fx.Node) or not isinstance(base, fx.Node) or not is_index(index) or val is None:
        return Reject(Reason.NO_COMPUTE, f"{n.name} adds up other things than rows")
    found = match(rows)
    if isinstance(found, Reject):
        return found
    if not _are_rows(found, rows, shapes) or val.dim() != 2 or dtype_of(base) != found.dtype:
        return Reject(Reason.LAYOUT, f"{rows.name} is no list of rows of experts")
    count = shapes.known(rows)[0]
    stage = f"index_add %{len(found.operands)} %{len(found.operands) + 1}"
    tokens = shapes.known(base)[0]
    given = (Operand(base), _row_numbers(n, index, count, tokens))
    return _as_tokens(extend(found, rows, n, stage, *given), n, tokens, shapes)


def _row_numbers(n: fx.Node, index: fx.Node, count: Size, rows: Size) -> Operand:
    """The index of `n`: `count` numbers of `rows` rows."""
    return Operand(index, shape=(count, 1), numbers=rows if n.target in FROM_EITHER_END else None)


def _sum(n: fx.Node, shapes: Shapes, match: MatchRows, extend: Extend) -> Product | Reject:
    source, dims = n.args[:2]
    assert isinstance(source, fx.Node)
    shape = shapes.known(source)
    if not isinstance(dims, (list, tuple)) or len(dims) != 1 or len(shape) < 3:
        return Reject(Reason.NO_COMPUTE, f"{n.name} is a sum over other things than rows")
    dim = dims[0] % len(shape)
    count = shape[dim]
    found = match(source)
    if isinstance(found, Reject):
        return found
    stage = _sum_over(found, dim)
    if stage is None:
        return Reject(Reason.LAYOUT, f"{n.name} is a sum over no rows of each token")
    if dtype_of(n) != found.dtype:
        return Reject(Reason.UNSUPPORTED_VARIANT, f"{n.name} adds up in another dtype")
    tokens = exact_quotient(found.shape[0], count)
    assert tokens is not None
    return _as_tokens(extend(found, source, n, stage), n, tokens, shapes)


def _sum_over(found: Product, dim: int) -> str | None:
    """The stage that is a sum over dim `dim` of a node with the layout of `found`. None if what is left is
    not a row for each token, in their order."""
    count = found.layout.shape[dim]
    others = [i for i in range(len(found.layout.dims)) if i != dim]
    if not isinstance(count, int):
        return None
    for at in range(1, len(others)):
        moved = found.layout.permute([*others[:at], dim, *others[at:]])
        if same_size(prod(moved.shape[at + 1 :]), found.shape[1]) and is_natural(moved, found.shape):
            return f"sum {count}"
    return f"fold {count}" if is_natural(found.layout.permute([dim, *others]), found.shape) else None


def _weighted(n: fx.Node, shapes: Shapes, match: MatchRows, extend: Extend) -> Product | Reject:
    """A matmul for each token of its rows and their weights. It adds up in float32, and so do the stages."""
    left, right = n.args[:2]
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    tokens, *sizes = shapes.known(n)
    none = Reject(Reason.NO_COMPUTE, f"{n.name} is a batch of matmuls")
    if same_size(sizes[1], 1) and not same_size(sizes[0], 1):
        rows, weights, dim = left, right, 2
    elif same_size(sizes[0], 1):
        rows, weights, dim = right, left, 1
    else:
        return none
    found = match(rows)
    if isinstance(found, Reject):
        return none
    stage = _sum_over(found, dim)
    if stage is None or dtype_of(n) != found.dtype:
        return none
    of_weights = Layout(tuple(() if i == 3 - dim else dims for i, dims in enumerate(found.layout.dims)))
    operand = Operand(weights, shape=(found.shape[0], 1), layout=of_weights, dtype=torch.float32)
    stages = [f"mul %{len(found.operands)}", stage]
    if found.dtype != torch.float32:
        stages.append(f"to {str(found.dtype).removeprefix('torch.')}")
    return _as_tokens(extend(found, rows, n, "; ".join(stages), operand), n, tokens, shapes)


def _put(n: fx.Node) -> tuple[object, object, object]:
    """Base, rows and index of an op that adds rows."""
    if n.target is aten.index_put.default:
        return n.args[0], n.args[2], row_index(n.args[1])
    if _is_of_torchtitan(n):
        base, index, rows = n.args
        return base, rows, repeated_index(index, rows)
    base, dim, index, rows = n.args[:4]
    if dim != 0 or argument(n, 4, "alpha", 1) != 1:
        return base, None, None
    return base, rows, repeated_index(index, rows) if n.target is aten.scatter_add.default else index


def _as_tokens(found: Product, n: fx.Node, tokens: Size, shapes: Shapes) -> Product | Reject:
    """The product whose last stage, `n`, has `tokens` rows."""
    shape = (tokens, found.shape[1])
    layout = Layout.of(shape).reshape(shapes.known(n))
    if layout is None:
        return Reject(Reason.LAYOUT, f"{n.name} is no list of tokens")
    return replace(found, shape=shape, layout=layout, last_layout=layout)


def _are_rows(found: Product, node: fx.Node, shapes: Shapes) -> bool:
    return is_natural(found.layout, found.shape) and same_shape(shapes.of(node), found.shape)
