"""The fused ops for eager use, differentiable: `autofuse.ops.matmul_all_reduce(x, w, group=tp_group)`.

All ranks of `group` must make the same call. Shapes, dtypes and options may differ between ranks only if the
docstring of the op allows it. `group` is a ProcessGroup, a one-dimensional DeviceMesh, the name of a group,
or None for all ranks. On CPU ranks and on GPUs of one host the ops run fused; elsewhere they run as plain
collectives.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autofuse import config
from autofuse.exchange_ops import (
    all_to_all_embedding_bag_backward,
    all_to_all_expert_matmul,
    embedding_bag_all_to_all,
    expert_matmul_all_to_all,
)
from autofuse.groups import Group, group_name
from autofuse.lowering.direct import call
from autofuse.lowering.reference.layout import check_divisible
from autofuse.lowering.reference.product import check_product
from autofuse.lowering.torch_internals import group_size

__all__ = [
    "all_gather_matmul",
    "all_to_all_embedding_bag_backward",
    "all_to_all_expert_matmul",
    "embedding_bag_all_to_all",
    "expert_matmul_all_to_all",
    "matmul_all_gather",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]


def matmul_all_reduce(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, reduce_op: str = "sum", group: Group = None
) -> Tensor:
    """`sum over ranks of (x @ w + bias)`, with the same bits on every rank.

    Args:
        x: `[..., K]`; K may differ between ranks.
        w: `[K, N]`.
        bias: `[N]`. Every rank adds its bias, so that the sum contains the bias W times if all ranks give it.
        reduce_op: "sum" or "avg".

    Returns: `[..., N]`. The gradients of x and w are those with the functional all_reduce: the gradient of
    the result is summed over the ranks. Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    op = "matmul_all_reduce"
    name = group_name(group, op)
    rows, operands, product = _term(x, w, bias, op)
    _check_reduce_op(reduce_op, op)
    (y,) = call(op, [rows], [w], operands, product, reduce_op, False, [], "", "", name, config.order, "eager")
    return _like(y, [*x.shape[:-1], w.shape[1]])


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    dim: int = 0,
    reduce_op: str = "sum",
    group: Group = None,
) -> Tensor:
    """This rank's part of `sum over ranks of (x @ w + bias)`, scattered along dim `dim` of the result.

    Args:
        x: `[..., K]`; K may differ between ranks.
        w: `[K, N]`.
        bias: `[N]`. Every rank adds its bias.
        dim: the dim of the `[..., N]` result that is cut into one equal part for each rank.
        reduce_op: "sum" or "avg".

    Returns: the part, `[..., N]` with dim `dim` divided by the number of ranks. Raises ValueError for shapes,
    dtypes or devices that do not fit, and for a dim that cannot be cut evenly.
    """
    op = "matmul_reduce_scatter"
    name = group_name(group, op)
    world = group_size(name)
    rows, operands, product = _term(x, w, bias, op)
    _check_reduce_op(reduce_op, op)
    shape = [*x.shape[:-1], w.shape[1]]
    axis = _axis(dim, len(shape), op)
    check_divisible(shape[axis], 1, world, op, f"entries of dim {dim} of {shape}")
    cut, outer = _cut(shape, axis)
    (part,) = call(
        "matmul_reduce_scatter",
        [rows],
        [w],
        operands,
        product,
        reduce_op,
        cut,
        outer,
        False,
        [],
        "",
        "",
        name,
        config.order,
        "eager",
    )
    shape[axis] //= world
    return _like(part, shape)


def matmul_all_gather(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    dim: int = -1,
    replicated: bool = False,
    group: Group = None,
) -> Tensor:
    """`x @ w (+ bias)` of all ranks, concatenated on dim `dim` of the result; the same bits on every rank.

    Args:
        x: `[..., K]`; K may differ from rank to rank.
        w: `[K, N]`.
        bias: `[N]`, this rank's own.
        dim: the dim of the `[..., N]` results along which they are concatenated. The last one gathers the
            columns of a weight that is cut by columns, such as the logits of an lm_head.
        replicated: what the gradient of the result means. False: every rank has its own gradient, as with the
            functional all_gather, and their sum is reduce-scattered. True: all ranks have the same gradient,
            as with a replicated DTensor; a rank takes its part of it, and nothing is sent.

    Returns: `[..., N]` with dim `dim` times the number of ranks. Raises ValueError for shapes, dtypes or
    devices that do not fit.
    """
    op = "matmul_all_gather"
    name = group_name(group, op)
    rows, operands, product = _term(x, w, bias, op)
    shape = [*x.shape[:-1], w.shape[1]]
    axis = _axis(dim, len(shape), op)
    cut, outer = _cut(shape, axis)
    (whole,) = call(
        "matmul_all_gather",
        [rows],
        [w],
        operands,
        product,
        cut,
        outer,
        False,
        replicated,
        name,
        config.order,
        "eager",
    )
    shape[axis] *= group_size(name)
    return _like(whole, shape)


def all_gather_matmul(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    dim: int = 0,
    group: Group = None,
    return_gathered: bool = False,
) -> Tensor | list[Tensor] | tuple[Tensor | list[Tensor], Tensor]:
    """`X @ w (+ bias)`, where X is the concatenation of the parts `x` of all ranks along dim `dim`.

    Args:
        x: `[..., K]`, of the same shape on every rank.
        w: `[K, N]` (`[W * K, N]` if `dim` is the last), or a list of such weights; N may differ by rank.
        bias: `[N]`, or a list with a bias or None for each weight.
        dim: the dim of x along which the parts are concatenated.
        return_gathered: also return X.

    Returns: the product, or a list of products if `w` is a list; with `return_gathered`, the pair of this and
    X. Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    op = "all_gather_matmul"
    name = group_name(group, op)
    world = group_size(name)
    weights, biases = _consumers(w, bias, op)
    if x.dim() == 0:
        raise ValueError(f"{op}: expected x of at least one dim, got a scalar")
    axis = _axis(dim, x.dim(), op)
    shape = list(x.shape)
    shape[axis] *= world
    whole = x.detach().as_strided((math.prod(shape[:-1]), shape[-1]), (0, 0))  # of its shape, without memory
    for wi, b in zip(weights, biases, strict=True):
        check_product([whole], [wi], [] if b is None else [b], op)
    part = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.dim() != 2 else x
    cut, outer = _cut(list(x.shape), axis)
    trains = torch.is_grad_enabled() and any(wi.requires_grad for wi in weights)
    given: list[Tensor] = []
    if any(b is not None for b in biases):
        given = [x.new_empty(0) if b is None else b for b in biases]
    results = call(
        "all_gather_matmul",
        part,
        weights,
        given,
        cut,
        outer,
        return_gathered or trains,
        name,
        config.order,
        "eager",
    )
    outputs = [
        _like(y, [*shape[:-1], wi.shape[1]]) for y, wi in zip(results[: len(weights)], weights, strict=True)
    ]
    product = outputs[0] if isinstance(w, Tensor) else outputs
    return (product, _like(results[-1], shape)) if return_gathered else product


def _term(x: Tensor, w: Tensor, bias: Tensor | None, op: str) -> tuple[Tensor, list[Tensor], str]:
    """`x` with its leading dims flattened, the operands and the product of `x @ w (+ bias)`."""
    if x.dim() == 0:
        raise ValueError(f"{op}: expected x of at least one dim, got a scalar")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.dim() != 2 else x
    operands, product = ([], "mm") if bias is None else ([bias], "addmm %0")
    check_product([rows], [w], operands, op)
    return rows, operands, product


def _consumers(
    w: Tensor | Sequence[Tensor], bias: Tensor | Sequence[Tensor | None] | None, op: str
) -> tuple[list[Tensor], list[Tensor | None]]:
    weights = [w] if isinstance(w, Tensor) else list(w)
    if bias is None:
        biases: list[Tensor | None] = [None] * len(weights)
    else:
        biases = [bias] if isinstance(bias, Tensor) else list(bias)
    if not weights or len(biases) != len(weights):
        raise ValueError(
            f"{op}: got {len(weights)} weights and {len(biases)} biases; pass a bias or None for each"
        )
    return weights, biases


def _check_reduce_op(reduce_op: str, op: str) -> None:
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"{op}: reduce_op {reduce_op!r} is not supported; use 'sum' or 'avg'")


def _axis(dim: int, dims: int, op: str) -> int:
    if not -dims <= dim < dims:
        raise ValueError(f"{op}: dim {dim} is out of range for {dims} dims")
    return dim % dims


def _cut(shape: list[int], axis: int) -> tuple[int, int]:
    """`(dim, outer)` of the matrix form of a scatter or gather on dim `axis` of `shape`."""
    if axis == len(shape) - 1:
        return 1, 1
    return 0, math.prod(shape[:axis])


def _like(matrix: Tensor, shape: list[int]) -> Tensor:
    return matrix if len(shape) == 2 else matrix.view(shape)
