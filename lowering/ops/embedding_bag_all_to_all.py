"""embedding_bag_all_to_all: each rank pools its tables over the whole batch and gets its bags of all tables.

    weights[t]: [V_t, D_t]   indices[t]: [n_t]   offsets[t]: [B], B = W * b
    columns[s] = sum of D_t on rank s

    forward   p[t][j] = sum (mean, max) over the indices of bag j of rows of weights[t], times their
              per_sample_weights[t] if given
              y = what all ranks have for the bags [r * b, (r + 1) * b), in `layout` (see embedding_layout)
    backward  all_to_all_embedding_bag_backward of dy;
              dper_sample_weights[t][k] = <G[bag of k], weights[t][indices[t][k]]>, G the exchanged gradient

A pooled row is accumulated in fp32, rounded to the dtype of the table, then to `dtype`, that of the wire and
of y: the roundings of the graph that pools, casts and exchanges. `max` has no gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autofuse.lowering.cpu.exchange_executor import Size, run_exchange
from autofuse.lowering.cpu.workspace import workspace_for
from autofuse.lowering.ops.gpu import embedding_on_gpu
from autofuse.lowering.ops.library import FusedOp, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.native_kernels.cpu import DTYPES
from autofuse.native_kernels.cpu.embedding import Bags, pool_bags

MODES = ("sum", "mean", "max")

_SCHEMA = (
    "embedding_bag_all_to_all(Tensor[] weights, Tensor[] indices, Tensor[] offsets, "
    "Tensor[] per_sample_weights, int mode, bool include_last_offset, int padding_idx, ScalarType dtype, "
    "SymInt[] columns, str layout, Any group_name, str order, str site) -> Tensor"
)


def _fake(
    weights: list[Tensor],
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    mode: int,
    include_last_offset: bool,
    padding_idx: int,
    dtype: torch.dtype,
    columns: list[Size],
    layout: str,
    group_name: str,
    order: str,
    site: str,
) -> Tensor:
    b = (offsets[0].shape[0] - int(include_last_offset)) // len(columns)
    return weights[0].new_empty(layouts.shape(layout, b, columns, _dims(weights)), dtype=dtype)


def reference(
    weights: list[Tensor],
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    mode: int,
    include_last_offset: bool,
    padding_idx: int,
    dtype: torch.dtype,
    columns: list[Size],
    layout: str,
    group_name: str,
    order: str,
    site: str,
) -> Tensor:
    bags = Bags(indices, offsets, per_sample_weights, mode, include_last_offset, padding_idx)
    pooled = torch.cat([t.to(dtype) for t in _pool(weights, bags)], 1)
    return layouts.exchange_forward(pooled, layout, columns, _dims(weights), group_name)


def _cpu(
    weights: list[Tensor],
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    mode: int,
    include_last_offset: bool,
    padding_idx: int,
    dtype: torch.dtype,
    columns: list[int],
    layout: str,
    group_name: str,
    order: str,
    site: str,
) -> Any:
    if dtype not in DTYPES:
        return NotImplemented
    op, workspace = "embedding_bag_all_to_all", workspace_for(group_name)
    world, rank = workspace.world, workspace.rank
    bags = Bags(indices, offsets, per_sample_weights, mode, include_last_offset, padding_idx).normalized()
    dims = _dims(weights)
    layouts.check(op, layout, bags.count, columns, dims, rank)
    b = bags.count // world
    out = weights[0].new_empty(layouts.shape(layout, b, columns, dims), dtype=dtype)
    starts, stride = layouts.place(layout, rank, b, columns, dims)
    native = all(t.dtype in DTYPES and t.dtype == weights[0].dtype for t in (*weights, *per_sample_weights))
    tables = [w.contiguous() for w in weights]
    plan = _partition(b, columns, order).plan(rank)
    key = f"{bags.count} bags of {list(columns)} columns {dtype} {layout}, {plan.agreement}"
    with workspace.call(op, site, key, out.numel() * dtype.itemsize) as call:
        mine = call.tensor(rank, 0, out.shape, dtype)

        def store(dest: int) -> None:
            target = out if dest == rank else call.tensor(dest, 0, out.shape, dtype)
            if native:
                pool_bags(target, tables, bags, starts, stride, dest * b, b)
            else:
                pooled = torch.cat([t[dest * b : (dest + 1) * b] for t in _pool(tables, bags)], 1)
                place = layouts.part(target, layout, rank, b, columns)
                place.copy_(pooled.view(place.shape))

        def arrived(source: int) -> None:
            place = layouts.part(out, layout, source, b, columns)
            place.copy_(layouts.part(mine, layout, source, b, columns))

        run_exchange(plan, call, store, arrived)
    return out


def _partition(b: int, columns: Sequence[int], order: str) -> PlanShape:
    """A tile is all that goes from a source to a rank: its columns of `b` bags."""
    chunks = tuple(((b, c),) * len(columns) for c in columns)
    block = (max(1, b), max(1, *columns))
    return PlanShape("embedding_bag_all_to_all", order, len(columns), chunks, block)


def _plan_shape(
    weights: list[Tensor],
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    mode: int,
    include_last_offset: bool,
    padding_idx: int,
    dtype: torch.dtype,
    columns: list[int],
    layout: str,
    group_name: str,
    order: str,
    site: str,
) -> PlanShape:
    return _partition((offsets[0].shape[0] - include_last_offset) // len(columns), columns, order)


def _pool(weights: list[Tensor], bags: Bags) -> list[Tensor]:
    """The pooled bags `[B, D_t]` of every table, with torch."""
    samples: Sequence[Tensor | None] = bags.per_sample_weights or [None] * len(weights)
    return [
        F.embedding_bag(
            indices,
            weight,
            offsets,
            mode=MODES[bags.mode],
            per_sample_weights=sample,
            include_last_offset=bags.include_last_offset,
            padding_idx=bags.padding_idx if bags.padding_idx >= 0 else None,
        )
        for weight, indices, offsets, sample in zip(weights, bags.indices, bags.offsets, samples, strict=True)
    ]


def _dims(weights: list[Tensor]) -> list[int]:
    return [w.shape[1] for w in weights]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, indices, offsets, samples = inputs[:4]
    ctx.options = inputs[4:]
    ctx.sizes = [w.shape[0] for w in weights], _dims(weights), weights[0].dtype
    ctx.tables, ctx.weighted = len(weights), bool(samples)
    # The tables themselves are needed by the gradient of the weights per sample alone.
    kept = weights if any(s.requires_grad for s in samples) else []
    ctx.save_for_backward(*indices, *offsets, *samples, *kept)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    mode, last, padding, _, columns, layout, group_name, order, site = ctx.options
    if mode == MODES.index("max"):
        raise RuntimeError(
            "embedding_bag_all_to_all: mode 'max' has no gradient; use 'sum' or 'mean' to train"
        )
    n, saved = ctx.tables, list(ctx.saved_tensors)
    indices, offsets = saved[:n], saved[n : 2 * n]
    samples, weights = (saved[2 * n : 3 * n], saved[3 * n :]) if ctx.weighted else ([], [])
    rows, dims, dtype = ctx.sizes
    keep = any(ctx.needs_input_grad[3])
    results = torch.ops.autofuse.all_to_all_embedding_bag_backward(
        grad.contiguous(), indices, offsets, samples, rows, dims, mode, last, padding, dtype, [False] * n,
        columns, layout, keep, group_name, order, site + "'",
    )  # fmt: skip
    of_samples: list[Tensor | None] = [None] * len(samples)
    if keep:
        pieces = results[-1].to(dtype).split(dims, 1)
        of_samples = [
            _sample_gradient(g, w, i, o, padding)
            for g, w, i, o in zip(pieces, weights, indices, offsets, strict=True)
        ]
    return results[:n], [None] * n, [None] * n, of_samples, *[None] * 9


def _sample_gradient(grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, padding: int) -> Tensor:
    """`<grad[bag of k], weight[indices[k]]>` for every index k: `[n]`; zero at the padding."""
    position = torch.arange(indices.shape[0], device=indices.device, dtype=offsets.dtype)
    bag = torch.searchsorted(offsets[: grad.shape[0]].contiguous(), position, right=True) - 1
    return ((grad[bag] * weight[indices]).sum(1)).masked_fill(indices == padding, 0)


register(FusedOp(_SCHEMA, _fake, reference, _cpu, _plan_shape, _setup_context, _backward, embedding_on_gpu))
