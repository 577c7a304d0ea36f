"""all_to_all_embedding_bag_update: the backward of embedding_bag_all_to_all with the optimizer in it.

    grad: gradient of y, in its `layout`          G = all_to_all(grad): [B, columns[r]], the bags' gradients

    every table t: embedding_bag_update of weights[t]: [V_t, D_t], states[t]: [V_t] and rates[t]: [2] by its
    columns of G. Without states the rule is SGD, with one a table rowwise Adagrad

Tables and states change in place, gradients of tables are never in memory, and no row is touched that no bag
names. A row is updated once, by the sum of all its terms: they are added in fp32, in the order in which a
plan works on the sources and then in that of the indices (on GPUs in that of the indices, by strips).

Returns G with `keep_exchanged`, else an empty tensor. It has no gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.cpu.exchange_executor import Size, run_exchange
from autofuse.lowering.cpu.workspace import workspace_for
from autofuse.lowering.ops.all_to_all_embedding_bag_backward import partition
from autofuse.lowering.ops.embedding_bag_update import Updates, check_tables
from autofuse.lowering.ops.gpu import embedding_update_on_gpu
from autofuse.lowering.ops.library import FusedOp, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.native_kernels.cpu import DTYPES
from autofuse.native_kernels.cpu.embedding import Bags

OP = "all_to_all_embedding_bag_update"

# "pooling": an argument called "mode" would be taken for one of torch's own while a call is made functional.
_SCHEMA = (
    "all_to_all_embedding_bag_update(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor[] rates, Tensor grad, "
    "Tensor[] indices, Tensor[] offsets, Tensor[] per_sample_weights, int pooling, bool include_last_offset, "
    "int padding_idx, SymInt[] columns, str layout, bool keep_exchanged, Any group_name, str order, str site)"
    " -> Tensor"
)


def _fake(
    weights: list[Tensor],
    states: list[Tensor],
    rates: list[Tensor],
    grad: Tensor,
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    pooling: int,
    include_last_offset: bool,
    padding_idx: int,
    columns: list[Size],
    layout: str,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> Tensor:
    bags = offsets[0].shape[0] - int(include_last_offset)
    return grad.new_empty((bags, sum(w.shape[1] for w in weights)) if keep_exchanged else (0,))


def reference(
    weights: list[Tensor],
    states: list[Tensor],
    rates: list[Tensor],
    grad: Tensor,
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    pooling: int,
    include_last_offset: bool,
    padding_idx: int,
    columns: Sequence[Size],
    layout: str,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> Tensor:
    dims, bags = [w.shape[1] for w in weights], offsets[0].shape[0] - include_last_offset
    exchanged = layouts.exchange_backward(grad, layout, columns, sum(dims), bags, group_name)
    for t, piece in enumerate(exchanged.split(dims, 1)):
        torch.ops.autofuse.embedding_bag_update(
            weights[t], states[t] if states else None, rates[t], piece, indices[t], offsets[t],
            per_sample_weights[t] if per_sample_weights else None, pooling, include_last_offset, padding_idx,
        )  # fmt: skip
    return exchanged if keep_exchanged else grad.new_empty(0)


def _cpu(
    weights: list[Tensor],
    states: list[Tensor],
    rates: list[Tensor],
    grad: Tensor,
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    pooling: int,
    include_last_offset: bool,
    padding_idx: int,
    columns: list[int],
    layout: str,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> Any:
    if grad.dtype not in DTYPES:
        return NotImplemented
    workspace = workspace_for(group_name)
    world, rank = workspace.world, workspace.rank
    bags = Bags(indices, offsets, per_sample_weights, pooling, include_last_offset, padding_idx).normalized()
    layouts.check(OP, layout, bags.count, columns, [w.shape[1] for w in weights], rank)
    check_tables(OP, weights, states, rates)
    b, wire, mine = bags.count // world, grad.dtype, columns[rank]
    grad = grad.contiguous()
    plan = partition(OP, b, columns, order).plan(rank)
    key = f"{bags.count} bags of {list(columns)} columns {wire} {layout}, {plan.agreement}"
    with workspace.call(OP, site, key, bags.count * max(columns) * wire.itemsize) as call:
        received = call.tensor(rank, 0, (bags.count, mine), wire)
        updates = Updates(bags, weights, states, rates)

        def store(dest: int) -> None:
            sent = layouts.part(grad, layout, dest, b, columns)
            there = call.tensor(dest, 0, (bags.count, columns[dest]), wire)
            there[rank * b : (rank + 1) * b].view(sent.shape).copy_(sent)

        def arrived(source: int) -> None:
            updates.add(received[source * b : (source + 1) * b], mine, source * b, b)

        run_exchange(plan, call, store, arrived)
        exchanged = received.clone() if keep_exchanged else grad.new_empty(0)
    updates.apply()
    return exchanged


def _plan_shape(
    weights: list[Tensor],
    states: list[Tensor],
    rates: list[Tensor],
    grad: Tensor,
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    pooling: int,
    include_last_offset: bool,
    padding_idx: int,
    columns: list[int],
    layout: str,
    keep_exchanged: bool,
    group_name: str,
    order: str,
    site: str,
) -> PlanShape:
    return partition(OP, (offsets[0].shape[0] - include_last_offset) // len(columns), columns, order)


register(FusedOp(_SCHEMA, _fake, reference, _cpu, _plan_shape, None, None, embedding_update_on_gpu))
