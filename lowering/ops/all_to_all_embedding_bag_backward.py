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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.cpu.exchange_executor import run_exchange
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.ops.embedding_bag_all_to_all import GPU_DTYPES, bags_of, batch_of
from autofuse.lowering.ops.library import FusedOp, SymInts, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Family
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.lowering.reference.embedding_gradients import Gradients, coo, sparse_gradient
from autofuse.lowering.reference.layout import Size
from autofuse.native_kernels.cpu import DTYPES
from autofuse.native_kernels.cpu.embedding import Bags

OP = "all_to_all_embedding_bag_backward"


class AllToAllEmbeddingBagBackward(NamedTuple):
    """The arguments of the op."""

    grad: Tensor
    indices: list[Tensor]
    offsets: list[Tensor]
    per_sample_weights: list[Tensor]
    num_embeddings: SymInts
    dims: SymInts
    mode: int
    include_last_offset: bool
    padding_idx: int
    dtype: torch.dtype
    sparse: list[bool]
    columns: SymInts
    layout: str
    keep_exchanged: bool
    group_name: str
    order: str
    site: str

    @property
    def bags(self) -> Bags:
        return bags_of(self, self.mode)

    @property
    def batch(self) -> int:
        """B."""
        return batch_of(self)


def _fake(args: AllToAllEmbeddingBagBackward) -> list[Tensor]:
    grad, dtype = args.grad, args.dtype
    tables = [
        coo(args.indices[0].new_empty((1, 0), dtype=torch.int64), grad.new_empty((0, d), dtype=dtype), v)
        if s
        else grad.new_empty((v, d), dtype=dtype)
        for s, v, d in zip(args.sparse, args.num_embeddings, args.dims, strict=True)
    ]
    return [*tables, grad.new_empty((args.batch, sum(args.dims)))] if args.keep_exchanged else tables


def reference(args: AllToAllEmbeddingBagBackward) -> list[Tensor]:
    exchanged = layouts.exchange_backward(
        args.grad, args.layout, args.columns, sum(args.dims), args.batch, args.group_name
    )
    tables = _gradients(exchanged, args)
    return [*tables, exchanged] if args.keep_exchanged else tables


def _cpu(args: AllToAllEmbeddingBagBackward) -> Any:
    wire, columns, layout, keep = args.grad.dtype, args.columns, args.layout, args.keep_exchanged
    if wire not in DTYPES:
        return NotImplemented
    workspace = workspace_for(args.group_name)
    world, rank = workspace.world, workspace.rank
    bags = args.bags.normalized()
    layouts.check(OP, layout, bags.count, columns, args.dims, rank)
    b, mine = bags.count // world, columns[rank]
    grad = args.grad.contiguous()
    native = args.dtype in DTYPES and all(t.dtype == args.dtype for t in args.per_sample_weights)
    plan = partition(OP, b, columns, args.order).plan(rank)
    key = f"{bags.count} bags of {list(columns)} columns {wire} {layout}, {plan.agreement}"
    with workspace.call(OP, args.site, key, bags.count * max(columns) * wire.itemsize) as call:
        received = call.tensor(rank, 0, (bags.count, mine), wire)
        gradients = None
        if native:
            gradients = Gradients(bags, args.num_embeddings, args.dims, args.dtype, args.sparse)

        def store(dest: int) -> None:
            sent = layouts.part(grad, layout, dest, b, columns)
            there = call.tensor(dest, 0, (bags.count, columns[dest]), wire)
            there[rank * b : (rank + 1) * b].view(sent.shape).copy_(sent)

        def arrived(source: int) -> None:
            if gradients is not None:
                gradients.add(received[source * b : (source + 1) * b], mine, source * b, b)

        run_exchange(plan, call, store, arrived)
        exchanged = received.clone() if keep or gradients is None else received
    tables = _gradients(exchanged, args) if gradients is None else gradients.result()
    return [*tables, exchanged] if keep else tables


def _cuda(args: AllToAllEmbeddingBagBackward) -> Any:
    from autofuse.lowering.gpu.embedding.call import run_embedding_backward

    return run_embedding_backward(args)


def partition(op: str, b: int, columns: Sequence[int], order: str) -> PlanShape:
    """A tile is all that goes to a rank: its columns of the gradients of `b` bags."""
    chunks = tuple((b, c) for c in columns)
    block = (max(1, b), max(1, *columns))
    return PlanShape(op, order, len(columns), (chunks,), block)


def _plan_shape(args: AllToAllEmbeddingBagBackward) -> PlanShape:
    return partition(OP, args.batch // len(args.columns), args.columns, args.order)


def _gradients(exchanged: Tensor, args: AllToAllEmbeddingBagBackward) -> list[Tensor]:
    """Gradients of all tables with torch, from `exchanged: [B, sum(dims)]`."""
    bags, count, dtype = args.bags, args.batch, args.dtype
    tables = []
    for t, piece in enumerate(exchanged.to(dtype).split(list(args.dims), 1)):
        rows_of_table = args.num_embeddings[t]
        if args.sparse[t]:
            tables.append(sparse_gradient(piece, bags, t, rows_of_table))
            continue
        indices, starts = bags.indices[t], bags.offsets[t][:count].contiguous()
        if not len(indices):
            tables.append(piece.new_zeros((rows_of_table, args.dims[t])))
            continue
        position = torch.arange(indices.shape[0], device=indices.device, dtype=starts.dtype)
        bag = torch.searchsorted(starts, position, right=True) - 1
        used = indices != bags.padding_idx
        if bags.include_last_offset:
            used &= position < bags.offsets[t][count]
        if _adds_with_aten(exchanged.device):
            tables.append(_add_with_aten(piece, indices, bag, used, bags, t, rows_of_table))
            continue
        rows = piece[bag]
        if bags.per_sample_weights:
            rows = rows * bags.per_sample_weights[t].unsqueeze(1)
        if bags.mode == 1:
            sizes = torch.zeros(count, dtype=dtype, device=indices.device).index_add_(0, bag, used.to(dtype))
            rows = rows / sizes[bag].clamp(min=1).unsqueeze(1)
        rows = rows.masked_fill(~used.unsqueeze(1), 0)
        table = exchanged.new_zeros((rows_of_table, args.dims[t]), dtype=dtype)
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


def _save(ctx: Any, args: AllToAllEmbeddingBagBackward, output: list[Tensor]) -> dict[str, Any]:
    """The op is linear in grad, of which only the dtype is needed."""
    ctx.wire = args.grad.dtype
    return {"grad": None}


def _backward(ctx: Any, args: AllToAllEmbeddingBagBackward, grads: list[Tensor | None]) -> dict[str, Any]:
    if any(ctx.needs.per_sample_weights):
        raise RuntimeError(f"{OP}: per_sample_weights have no second gradient; detach them")
    n = len(args.dims)
    like = next(g for g in grads if g is not None)
    tables = [
        like.new_zeros((v, d), dtype=args.dtype) if g is None else g.to_dense()
        for g, v, d in zip(grads[:n], args.num_embeddings, args.dims, strict=True)
    ]
    of_grad = torch.ops.autofuse.embedding_bag_all_to_all(
        tables, args.indices, args.offsets, args.per_sample_weights, args.mode, args.include_last_offset,
        args.padding_idx, ctx.wire, args.columns, args.layout, args.group_name, args.order,
        args.site + "'",
    )  # fmt: skip
    of_exchanged = grads[n] if args.keep_exchanged else None
    if of_exchanged is not None:
        of_grad = of_grad + layouts.exchange_forward(
            of_exchanged, args.layout, args.columns, args.dims, args.group_name
        )
    return {"grad": of_grad}


register(
    FusedOp(
        name=OP,
        arguments=AllToAllEmbeddingBagBackward,
        returns="Tensor[]",
        family=Family.CONSUME,
        replaces="all_to_all",
        fake=_fake,
        reference=reference,
        cpu=_cpu,
        plan_shape=_plan_shape,
        backward=_backward,
        save=_save,
        cuda=_cuda,
        exchanged=lambda args: args.grad.dtype,
        gpu_dtypes=GPU_DTYPES,
        shapes=lambda args: ((args.batch, sum(args.columns)),),
    )
)
