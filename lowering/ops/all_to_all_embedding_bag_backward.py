"""all_to_all_embedding_bag_backward: the gradient of embedding_bag_all_to_all with respect to its tables.

    grad: gradient of y, in its `layout`          G = all_to_all(grad): [B, columns[r]], the bags' gradients

    forward   dweights[t][i] = sum over the bags j with index i of G[j, columns of t] * scale: [V_t, D_t]
              scale: the sample's weight; 1 / (indices of the bag that are not padding) for mean; 1
    backward  it is linear in grad: embedding_bag_all_to_all of the gradients of dweights as tables,
              plus the exchange of the gradient of G

Rows are added in fp32, in the order in which a plan works on the sources and then in that of the indices (on
GPUs in that of the indices, by strips of them), the same in every run, and rounded to `dtype`, that of the
tables, once. With `keep_exchanged` G is the last output. Where `sparse[t]`, dweights[t] is a COO tensor as
torch makes it, bit by bit: not coalesced, one value for every index that is not padding, in their order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.cpu.exchange_executor import Size, run_exchange
from autofuse.lowering.cpu.workspace import workspace_for
from autofuse.lowering.ops.gpu import embedding_backward_on_gpu
from autofuse.lowering.ops.library import FusedOp, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.lowering.reference.embedding_gradients import Gradients, coo, sparse_gradient
from autofuse.native_kernels.cpu import DTYPES
from autofuse.native_kernels.cpu.embedding import Bags

_SCHEMA = (
    "all_to_all_embedding_bag_backward(Tensor grad, Tensor[] indices, Tensor[] offsets, "
    "Tensor[] per_sample_weights, SymInt[] num_embeddings, SymInt[] dims, int mode, "
    "bool include_last_offset, int padding_idx, ScalarType dtype, bool[] sparse, SymInt[] columns, "
    "str layout, bool keep_exchanged, Any group_name, str order, str site) -> Tensor[]"
)


def _fake(
    grad: Tensor,
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    num_embeddings: list[Size],
    dims: list[Size],
    mode: int,
    include_last_offset: bool,
    padding_idx: int,
    dtype: torch.dtype,
    sparse: list[bool],
    columns: list[Size],
    layout: str,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> list[Tensor]:
    tables = [
        coo(indices[0].new_empty((1, 0), dtype=torch.int64), grad.new_empty((0, d), dtype=dtype), v)
        if s
        else grad.new_empty((v, d), dtype=dtype)
        for s, v, d in zip(sparse, num_embeddings, dims, strict=True)
    ]
    bags = offsets[0].shape[0] - int(include_last_offset)
    return [*tables, grad.new_empty((bags, sum(dims)))] if keep_exchanged else tables


def reference(
    grad: Tensor,
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    num_embeddings: Sequence[Size],
    dims: Sequence[Size],
    mode: int,
    include_last_offset: bool,
    padding_idx: int,
    dtype: torch.dtype,
    sparse: list[bool],
    columns: Sequence[Size],
    layout: str,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> list[Tensor]:
    bags = Bags(indices, offsets, per_sample_weights, mode, include_last_offset, padding_idx)
    exchanged = layouts.exchange_backward(grad, layout, columns, sum(dims), bags.count, group_name)
    tables = _gradients(exchanged, bags, num_embeddings, dims, dtype, sparse)
    return [*tables, exchanged] if keep_exchanged else tables


def _cpu(
    grad: Tensor,
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    num_embeddings: list[int],
    dims: list[int],
    mode: int,
    include_last_offset: bool,
    padding_idx: int,
    dtype: torch.dtype,
    sparse: list[bool],
    columns: list[int],
    layout: str,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> Any:
    if grad.dtype not in DTYPES:
        return NotImplemented
    op, workspace = "all_to_all_embedding_bag_backward", workspace_for(group_name)
    world, rank = workspace.world, workspace.rank
    bags = Bags(indices, offsets, per_sample_weights, mode, include_last_offset, padding_idx).normalized()
    layouts.check(op, layout, bags.count, columns, dims, rank)
    b, wire, mine = bags.count // world, grad.dtype, columns[rank]
    grad = grad.contiguous()
    native = dtype in DTYPES and all(t.dtype == dtype for t in per_sample_weights)
    plan = partition(op, b, columns, order).plan(rank)
    key = f"{bags.count} bags of {list(columns)} columns {wire} {layout}, {plan.agreement}"
    with workspace.call(op, site, key, bags.count * max(columns) * wire.itemsize) as call:
        received = call.tensor(rank, 0, (bags.count, mine), wire)
        gradients = Gradients(bags, num_embeddings, dims, dtype, sparse) if native else None

        def store(dest: int) -> None:
            sent = layouts.part(grad, layout, dest, b, columns)
            there = call.tensor(dest, 0, (bags.count, columns[dest]), wire)
            there[rank * b : (rank + 1) * b].view(sent.shape).copy_(sent)

        def arrived(source: int) -> None:
            if gradients is not None:
                gradients.add(received[source * b : (source + 1) * b], mine, source * b, b)

        run_exchange(plan, call, store, arrived)
        exchanged = received.clone() if keep_exchanged or gradients is None else received
    if gradients is not None:
        tables = gradients.result()
    else:
        tables = _gradients(exchanged, bags, num_embeddings, dims, dtype, sparse)
    return [*tables, exchanged] if keep_exchanged else tables


def partition(op: str, b: int, columns: Sequence[int], order: str) -> PlanShape:
    """A tile is all that goes to a rank: its columns of the gradients of `b` bags."""
    chunks = tuple((b, c) for c in columns)
    block = (max(1, b), max(1, *columns))
    return PlanShape(op, order, len(columns), (chunks,), block)


def _plan_shape(
    grad: Tensor,
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    num_embeddings: list[int],
    dims: list[int],
    mode: int,
    include_last_offset: bool,
    padding_idx: int,
    dtype: torch.dtype,
    sparse: list[bool],
    columns: list[int],
    layout: str,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> PlanShape:
    b = (offsets[0].shape[0] - include_last_offset) // len(columns)
    return partition("all_to_all_embedding_bag_backward", b, columns, order)


def _gradients(
    exchanged: Tensor,
    bags: Bags,
    num_embeddings: Sequence[Size],
    dims: Sequence[Size],
    dtype: torch.dtype,
    sparse: Sequence[bool],
) -> list[Tensor]:
    """Gradients of all tables with torch, from `exchanged: [B, sum(dims)]`."""
    count = bags.count
    tables = []
    for t, piece in enumerate(exchanged.to(dtype).split(list(dims), 1)):
        if sparse[t]:
            tables.append(sparse_gradient(piece, bags, t, num_embeddings[t]))
            continue
        indices, starts = bags.indices[t], bags.offsets[t][:count].contiguous()
        position = torch.arange(indices.shape[0], device=indices.device, dtype=starts.dtype)
        bag = torch.searchsorted(starts, position, right=True) - 1
        used = indices != bags.padding_idx
        if bags.include_last_offset:
            used &= position < bags.offsets[t][count]
        if _adds_with_aten(exchanged.device):
            tables.append(_add_with_aten(piece, indices, bag, used, bags, t, num_embeddings[t]))
            continue
        rows = piece[bag]
        if bags.per_sample_weights:
            rows = rows * bags.per_sample_weights[t].unsqueeze(1)
        if bags.mode == 1:
            sizes = torch.zeros(count, dtype=dtype, device=indices.device).index_add_(0, bag, used.to(dtype))
            rows = rows / sizes[bag].clamp(min=1).unsqueeze(1)
        rows = rows.masked_fill(~used.unsqueeze(1), 0)
        table = exchanged.new_zeros((num_embeddings[t], dims[t]), dtype=dtype)
        tables.append(table.index_add_(0, indices, rows))
    return tables


def _adds_with_aten(device: torch.device) -> bool:
    return device.type == "cuda"


def _add_with_aten(
    grad: Tensor, indices: Tensor, bag: Tensor, used: Tensor, bags: Bags, table: int, rows: Size
) -> Tensor:
    """What the unfused graph runs: on GPUs many times as fast as `index_add_`.

    As there, the first bag has what is before it, and the last one what is behind it.
    """
    bag = bag.clamp(min=0)
    sizes = torch.zeros(bags.count, dtype=indices.dtype, device=indices.device)
    sizes.index_add_(0, bag, used.to(indices.dtype))
    samples = bags.per_sample_weights[table] if bags.per_sample_weights else None
    return torch.ops.aten._embedding_bag_dense_backward(
        grad.contiguous(), indices.contiguous(), bag.to(indices.dtype), sizes, sizes.new_empty(0), rows,
        False, bags.mode, samples, bags.padding_idx,
    )  # fmt: skip


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    grad, indices, offsets, samples = inputs[:4]
    ctx.options, ctx.wire = inputs[4:], grad.dtype
    ctx.tables, ctx.weighted = len(indices), bool(samples)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*indices, *offsets, *samples)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    if any(ctx.needs_input_grad[3]):
        raise RuntimeError(
            "all_to_all_embedding_bag_backward: per_sample_weights have no second gradient; detach them"
        )
    rows, dims, mode, last, padding, dtype, _, columns, layout, keep, group_name, order, site = ctx.options
    n, saved = ctx.tables, list(ctx.saved_tensors)
    like = next(g for g in grads if g is not None)
    tables = [
        like.new_zeros((v, d), dtype=dtype) if g is None else g.to_dense()
        for g, v, d in zip(grads[:n], rows, dims, strict=True)
    ]
    of_grad = torch.ops.autofuse.embedding_bag_all_to_all(
        tables, saved[:n], saved[n : 2 * n], saved[2 * n :], mode, last, padding, ctx.wire, columns, layout,
        group_name, order, site + "'",
    )  # fmt: skip
    of_exchanged = grads[n] if keep else None
    if of_exchanged is not None:
        of_grad = of_grad + layouts.exchange_forward(of_exchanged, layout, columns, dims, group_name)
    return of_grad, [None] * n, [None] * n, [None] * len(saved[2 * n :]), *[None] * 13


register(
    FusedOp(
        _SCHEMA, _fake, reference, _cpu, _plan_shape, _setup_context, _backward, embedding_backward_on_gpu
    )
)
