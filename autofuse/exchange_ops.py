"""The fused ops around an all-to-all for eager use: embedding bags and experts. Part of `autofuse.ops`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from autofuse import config
from autofuse.checked_bags import Checked, checked, remember
from autofuse.groups import Group, group_name
from autofuse.lowering.direct import call, call_known
from autofuse.lowering.ops.embedding_bag_all_to_all import MODES
from autofuse.lowering.reference import embedding_layout
from autofuse.lowering.torch_internals import group_rank, group_size, nobody_intervenes

Tensors = Tensor | Sequence[Tensor]


def embedding_bag_all_to_all(
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors | None = None,
    per_sample_weights: Tensors | None = None,
    *,
    mode: str = "sum",
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    columns: Sequence[int] | None = None,
    layout: str = "bsc",
    dtype: torch.dtype | None = None,
    group: Group = None,
) -> Tensor:
    """Pool this rank's tables over the whole batch; return, for all tables, this rank's part of the batch.

    Args:
        weights: T tables `[V_t, D_t]` of one dtype; a rank without tables passes one of shape `[0, 0]`.
        indices: per table `[n_t]` with offsets, or `[B, P]` without; int32 or int64. B is a multiple of W.
        offsets: per table `[B]`, or `[B + 1]` with `include_last_offset`.
        per_sample_weights: per table, in the shape of its indices and its dtype; mode "sum" only.
        mode: "sum", "mean" or "max" (which has no gradient).
        padding_idx: index that is ignored, not negative.
        columns: for every rank, the sum of its table dims; by default the sum of this rank for all ranks.
        layout: "bsc", "sbc", "bstd", "stbd" or "sbtd"; the last three need tables of one dim, and the
            same number of tables on every rank.
        dtype: dtype that is exchanged and returned; by default the dtype of the tables.

    Returns, for `b = B / W` bags a rank: `[b, sum(columns)]`; "sbc" `[b * sum(columns)]`; "bstd"
    `[b, W, T, D]`; "stbd" `[W, T, b, D]`; "sbtd" `[W, b, T, D]`. Gradients of tables are dense. Raises
    ValueError for shapes, dtypes or options that do not fit, RuntimeError for an index out of range.
    """
    op = "embedding_bag_all_to_all"
    tables = _list(weights)
    # What is traced sees no memory of earlier calls.
    remembers = nobody_intervenes() and offsets is not None and per_sample_weights is None
    known = checked(tables, _list(indices), _list(offsets)) if remembers and offsets is not None else None
    bags = _bags(indices, offsets, per_sample_weights, mode, include_last_offset, padding_idx, op, known)
    if known is None:
        _check_tables(tables, bags, op)
    dims = [w.shape[1] for w in tables] if known is None else known.dims
    name, sizes = _sizes(bags, dims, columns, include_last_offset, layout, group, op)
    if known is None and remembers:
        known = remember(tables, *bags[:2])
    padding = -1 if padding_idx is None else padding_idx
    given = (
        tables, *bags, MODES.index(mode), include_last_offset, padding, dtype or tables[0].dtype, sizes,
        layout, name, config.order, "eager",
    )  # fmt: skip
    result: Tensor = call(op, *given) if known is None else call_known(op, known.is_plain, *given)
    return result


def all_to_all_embedding_bag_backward(
    grad: Tensor,
    indices: Tensors,
    offsets: Tensors | None = None,
    per_sample_weights: Tensors | None = None,
    *,
    num_embeddings: Sequence[int],
    dims: Sequence[int],
    mode: str = "sum",
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    columns: Sequence[int] | None = None,
    layout: str = "bsc",
    dtype: torch.dtype | None = None,
    group: Group = None,
    return_exchanged: bool = False,
) -> list[Tensor] | tuple[list[Tensor], Tensor]:
    """Dense gradients of the tables of `embedding_bag_all_to_all`, from the gradient of its result.

    Args:
        grad: in the shape of `layout`.
        num_embeddings, dims: rows and columns of every table of this rank.
        dtype: dtype of the tables; by default the dtype of grad.
        return_exchanged: also return the gradient of the pooled bags, `[B, sum(dims)]`.
        Others: as for `embedding_bag_all_to_all`; mode "sum" or "mean".

    Returns: one `[V_t, D_t]` per table. Raises ValueError for shapes, dtypes or options that do not fit.
    """
    op = "all_to_all_embedding_bag_backward"
    if mode == "max":
        raise ValueError(f"{op}: mode 'max' has no gradient; use 'sum' or 'mean'")
    bags = _bags(indices, offsets, per_sample_weights, mode, include_last_offset, padding_idx, op)
    if not len(num_embeddings) == len(dims) == len(bags[0]):
        raise ValueError(
            f"{op}: got {len(num_embeddings)} num_embeddings, {len(dims)} dims and {len(bags[0])} lists of "
            "indices; pass one each for every table"
        )
    name, sizes = _sizes(bags, dims, columns, include_last_offset, layout, group, op)
    b = (bags[1][0].shape[0] - int(include_last_offset)) // len(sizes)
    expected = embedding_layout.shape(layout, b, sizes, dims)
    if list(grad.shape) != expected:
        raise ValueError(f"{op}: expected grad {expected} in layout {layout!r}, got {list(grad.shape)}")
    padding = -1 if padding_idx is None else padding_idx
    results = call(
        op, grad, *bags, list(num_embeddings), list(dims), MODES.index(mode), include_last_offset, padding,
        dtype or grad.dtype, [False] * len(dims), sizes, layout, return_exchanged, name, config.order,
        "eager",
    )  # fmt: skip
    return (results[:-1], results[-1]) if return_exchanged else results


def expert_matmul_all_to_all(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    positions: Tensor | None = None,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Combine: multiply by the experts of this rank, and send every row to its destination.

    Args:
        x: fixed capacity `[E, W * c, K]`, rows by destination; dropless `[rows, K]`, rows by expert.
        w: `[E, K, N]`.
        bias: `[E, N]`.
        offsets: dropless: int32 `[E]`, the end of the rows of every expert.
        positions: dropless: int64 `[rows]`, the row of the send buffer for each product. Products with the
            same row are added, and rows without a product are zero. By default the rows keep their order.
        output_splits, input_splits: dropless: the numbers of rows received from and sent to every rank.

    Returns: `[W, E, c, N]` or `[sum(output_splits), N]`, by source. Raises ValueError for shapes, dtypes or
    options that do not fit, RuntimeError on all ranks if the splits of two ranks disagree.
    """
    op = "expert_matmul_all_to_all"
    name, world, splits = _experts(x, w, bias, offsets, positions, output_splits, input_splits, group, op)
    dropless = offsets is not None
    if x.dim() != (2 if dropless else 3) or (not dropless and x.shape[0] != w.shape[0]):
        raise ValueError(
            f"{op}: expected x [{w.shape[0]}, rows, K], or [rows, K] with offsets; got {tuple(x.shape)}"
        )
    if not dropless and x.shape[1] % world:
        raise ValueError(f"{op}: {x.shape[1]} rows an expert are no multiple of {world} ranks; pad them")
    (y,) = call(
        op, [x], [w], [] if bias is None else [bias], [], "mm", 0, offsets, positions, *splits, 1, 1, False,
        name, config.order, "eager",
    )  # fmt: skip
    result: Tensor = y
    return result


def all_to_all_expert_matmul(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    positions: Tensor | None = None,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: Group = None,
    return_exchanged: bool = False,
) -> Tensor | list[Tensor] | tuple[Tensor | list[Tensor], Tensor]:
    """Dispatch: send every row to the rank of its expert, and multiply it there.

    Args:
        x: fixed capacity `[W, E, c, K]`, by destination; dropless `[sum(input_splits), K]`.
        w: `[E, K, N]`, or a list of such weights for the same rows.
        bias: `[E, N]`; for a single w only.
        offsets: dropless: int32 `[E]`, the end of the rows of every expert in X.
        positions: dropless: int64 `[rows]`, the received rows that X consists of; by default all received
            rows.
        output_splits, input_splits: dropless: the numbers of rows received from and sent to every rank.
        return_exchanged: also return X.

    Returns: `X @ w` per expert for X `[E, W * c, K]` by source, or `[rows, K]`; a list if `w` is one. Raises
    ValueError for shapes, dtypes or options that do not fit, RuntimeError on all ranks if the splits of two
    ranks disagree.
    """
    op = "all_to_all_expert_matmul"
    weights = _list(w)
    if bias is not None and len(weights) != 1:
        raise ValueError(f"{op}: a bias goes with a single w, got {len(weights)}; add the biases behind it")
    for wi in weights:
        name, world, splits = _experts(
            x, wi, bias, offsets, positions, output_splits, input_splits, group, op
        )
    count = weights[0].shape[0]
    if offsets is None and (x.dim() != 4 or tuple(x.shape[:2]) != (world, count)):
        raise ValueError(f"{op}: expected x [{world}, {count}, rows, K], got {tuple(x.shape)}")
    if offsets is not None and (x.dim() != 2 or x.shape[0] != sum(splits[1])):
        raise ValueError(f"{op}: expected x [{sum(splits[1])}, K] for its input_splits, got {tuple(x.shape)}")
    trains = torch.is_grad_enabled() and any(wi.requires_grad for wi in weights)
    results = call(
        op, x, weights, [] if bias is None else [bias], "", 0, offsets, positions, *splits, 1, 1,
        return_exchanged or trains, name, config.order, "eager",
    )  # fmt: skip
    outputs = results[: len(weights)]
    product = outputs[0] if isinstance(w, Tensor) else outputs
    return (product, results[-1]) if return_exchanged else product


def _list(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


Bags = tuple[list[Tensor], list[Tensor], list[Tensor]]


def _check_tables(tables: Sequence[Tensor], bags: Bags, op: str) -> None:
    if len(tables) != len(bags[0]):
        raise ValueError(f"{op}: got {len(tables)} tables and {len(bags[0])} lists of indices; pass one each")
    for t, table in enumerate(tables):
        if table.dim() != 2 or table.dtype != tables[0].dtype or table.device != tables[0].device:
            raise ValueError(
                f"{op}: expected tables [rows, dim] of one dtype on one device; table {t} is "
                f"{tuple(table.shape)} {table.dtype} on {table.device}"
            )
        if bags[2] and bags[2][t].dtype != table.dtype:
            raise ValueError(f"{op}: per_sample_weights are {bags[2][t].dtype}, their table {table.dtype}")


def _bags(
    indices: Tensors,
    offsets: Tensors | None,
    per_sample_weights: Tensors | None,
    mode: str,
    include_last_offset: bool,
    padding_idx: int | None,
    op: str,
    known: Checked | None = None,
) -> Bags:
    """Indices, offsets and weights per sample as vectors, one per table; known ones are not checked."""
    found = _list(indices)
    samples = [] if per_sample_weights is None else _list(per_sample_weights)
    if mode not in MODES:
        raise ValueError(f"{op}: unknown mode {mode!r}; expected one of {', '.join(MODES)}")
    if padding_idx is not None and padding_idx < 0:
        raise ValueError(f"{op}: padding_idx {padding_idx} is negative; count it from the first row")
    if known is not None and offsets is not None:
        return found, _list(offsets), []
    if not found or any(t.dtype not in (torch.int32, torch.int64) for t in found):
        raise ValueError(f"{op}: expected int32 or int64 indices for one table or more")
    if samples and (mode != "sum" or [t.shape for t in samples] != [t.shape for t in found]):
        raise ValueError(f"{op}: per_sample_weights need mode 'sum' and the shapes of the indices")
    samples = [t.reshape(-1) for t in samples]
    if offsets is None:
        if include_last_offset or any(t.dim() != 2 for t in found):
            raise ValueError(f"{op}: indices without offsets must be [B, P] for every table; pass offsets")
        starts = [torch.arange(t.shape[0], dtype=t.dtype, device=t.device) * t.shape[1] for t in found]
        return [t.reshape(-1) for t in found], starts, samples
    starts = _list(offsets)
    if len(starts) != len(found) or any(t.dim() != 1 for t in (*found, *starts)):
        raise ValueError(f"{op}: expected vectors of indices and of offsets for every table")
    if len({t.shape[0] for t in starts}) != 1:
        raise ValueError(f"{op}: all tables need as many bags; got offsets {[t.shape[0] for t in starts]}")
    return found, starts, samples


def _sizes(
    bags: Bags,
    dims: Sequence[int],
    columns: Sequence[int] | None,
    include_last_offset: bool,
    layout: str,
    group: Group,
    op: str,
) -> tuple[str, list[int]]:
    """The name of the group, and the number of columns of every rank."""
    name = group_name(group, op)
    world = group_size(name)
    sizes = [sum(dims)] * world if columns is None else list(columns)
    if len(sizes) != world:
        raise ValueError(f"{op}: columns has {len(sizes)} entries for {world} ranks; pass one each")
    count = bags[1][0].shape[0] - int(include_last_offset)
    embedding_layout.check(op, layout, count, sizes, dims, group_rank(name))
    return name, sizes


def _experts(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    positions: Tensor | None,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: Group,
    op: str,
) -> tuple[str, int, tuple[list[int], list[int]]]:
    """The name and size of the group, and the splits. ValueError for arguments that fit no form of the op."""
    name = group_name(group, op)
    world = group_size(name)
    given = [t for t in (x, w, bias) if t is not None]
    if any(t.dtype != x.dtype or t.device != x.device for t in given):
        raise ValueError(
            f"{op}: tensors of {sorted({str(t.dtype) for t in given})} on "
            f"{sorted({str(t.device) for t in given})}; bring all to one dtype and device"
        )
    if w.dim() != 3 or w.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: expected w [E, {x.shape[-1]}, N] for x {tuple(x.shape)}, got {tuple(w.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (w.shape[0], w.shape[2]):
        raise ValueError(f"{op}: expected bias [{w.shape[0]}, {w.shape[2]}], got {tuple(bias.shape)}")
    if offsets is None:
        if positions is not None or output_splits is not None or input_splits is not None:
            raise ValueError(f"{op}: positions and splits need offsets, the end of the rows of every expert")
        return name, world, ([], [])
    splits = list(output_splits or []), list(input_splits or [])
    if len(splits[0]) != world or len(splits[1]) != world or min(*splits[0], *splits[1]) < 0:
        raise ValueError(
            f"{op}: with offsets, pass output_splits and input_splits: rows for each of {world} ranks"
        )
    return name, world, splits
