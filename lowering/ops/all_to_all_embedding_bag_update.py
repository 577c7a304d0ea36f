"""all_to_all_embedding_bag_update: the backward of embedding_bag_all_to_all with the optimizer in it.

    grad: gradient of y, in its `layout`          G = all_to_all(grad): [B, columns[r]], the bags' gradients

    every table t: embedding_bag_update of weights[t]: [V_t, D_t], states[t]: [V_t] and rates[t]: [2] by its
    columns of G. Without states the rule is SGD, with one a table rowwise Adagrad

Tables and states change in place. Gradients of tables are never in memory, and rows that no bag names are not
touched. A row is updated once, by the sum of all its terms: they are added in fp32, in the order in which a
plan works on the sources, and for one source in the order of the indices (on GPUs in the order of the
indices, by strips).

Returns G with `keep_exchanged`, else an empty tensor. It has no gradient.
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.cpu.exchange_executor import run_exchange
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.ops.all_to_all_embedding_bag_backward import OP as BACKWARD
from autofuse.lowering.ops.all_to_all_embedding_bag_backward import partition
from autofuse.lowering.ops.embedding_bag_all_to_all import GPU_DTYPES, bags_of, batch_of
from autofuse.lowering.ops.embedding_bag_update import Updates, check_tables
from autofuse.lowering.ops.library import FusedOp, SymInts, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Family
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.native_kernels.cpu import DTYPES
from autofuse.native_kernels.cpu.embedding import Bags

OP = "all_to_all_embedding_bag_update"


class AllToAllEmbeddingBagUpdate(NamedTuple):
    """The arguments of the op.

    The mode is called `pooling`: torch takes an argument `mode` for its own when it makes a call functional.
    """

    weights: Annotated[list[Tensor], "Tensor(a!)[]"]
    states: Annotated[list[Tensor], "Tensor(b!)[]"]
    rates: list[Tensor]
    grad: Tensor
    indices: list[Tensor]
    offsets: list[Tensor]
    per_sample_weights: list[Tensor]
    pooling: int
    include_last_offset: bool
    padding_idx: int
    columns: SymInts
    layout: str
    keep_exchanged: bool
    group_name: str
    order: str
    site: str

    @property
    def bags(self) -> Bags:
        return bags_of(self, self.pooling)

    @property
    def batch(self) -> int:
        """B."""
        return batch_of(self)

    @property
    def dims(self) -> list[int]:
        return [w.shape[1] for w in self.weights]


def _fake(args: AllToAllEmbeddingBagUpdate) -> Tensor:
    return args.grad.new_empty((args.batch, sum(args.dims)) if args.keep_exchanged else (0,))


def _reference(args: AllToAllEmbeddingBagUpdate) -> Tensor:
    exchanged = layouts.exchange_backward(
        args.grad, args.layout, args.columns, sum(args.dims), args.batch, args.group_name
    )
    states, samples = args.states, args.per_sample_weights
    for t, piece in enumerate(exchanged.split(args.dims, 1)):
        torch.ops.autofuse.embedding_bag_update(
            args.weights[t], states[t] if states else None, args.rates[t], piece, args.indices[t],
            args.offsets[t], samples[t] if samples else None, args.pooling, args.include_last_offset,
            args.padding_idx,
        )  # fmt: skip
    return exchanged if args.keep_exchanged else args.grad.new_empty(0)


def _cpu(args: AllToAllEmbeddingBagUpdate) -> Any:
    wire, columns, layout = args.grad.dtype, args.columns, args.layout
    if wire not in DTYPES:
        return NotImplemented
    workspace = workspace_for(args.group_name)
    world, rank = workspace.world, workspace.rank
    bags = args.bags.normalized()
    layouts.check(OP, layout, bags.count, columns, args.dims, rank)
    check_tables(OP, args.weights, args.states, args.rates)
    b, mine = bags.count // world, columns[rank]
    grad = args.grad.contiguous()
    plan = partition(OP, b, columns, args.order).plan(rank)
    key = f"{bags.count} bags of {list(columns)} columns {wire} {layout}, {plan.agreement}"
    # A rank without optimizers in its backward runs the op BACKWARD, so that both ops meet under this name.
    with workspace.call(BACKWARD, args.site, key, bags.count * max(columns) * wire.itemsize) as call:
        received = call.tensor(rank, 0, (bags.count, mine), wire)
        updates = Updates(bags, args.weights, args.states, args.rates)

        def store(dest: int) -> None:
            sent = layouts.part(grad, layout, dest, b, columns)
            there = call.tensor(dest, 0, (bags.count, columns[dest]), wire)
            there[rank * b : (rank + 1) * b].view(sent.shape).copy_(sent)

        def arrived(source: int) -> None:
            updates.add(received[source * b : (source + 1) * b], mine, source * b, b)

        run_exchange(plan, call, store, arrived)
        exchanged = received.clone() if args.keep_exchanged else grad.new_empty(0)
    updates.apply()
    return exchanged


def _cuda(args: AllToAllEmbeddingBagUpdate) -> Any:
    from autofuse.lowering.gpu.embedding.call import run_embedding_update

    return run_embedding_update(args)


def _plan_shape(args: AllToAllEmbeddingBagUpdate) -> PlanShape:
    return partition(OP, args.batch // len(args.columns), args.columns, args.order)


register(
    FusedOp(
        name=OP,
        arguments=AllToAllEmbeddingBagUpdate,
        returns="Tensor",
        family=Family.CONSUME,
        replaces="all_to_all",
        fake=_fake,
        reference=_reference,
        cpu=_cpu,
        plan_shape=_plan_shape,
        cuda=_cuda,
        exchanged=lambda args: args.grad.dtype,
        gpu_dtypes=GPU_DTYPES,
        shapes=lambda args: ((args.batch, sum(args.columns)),),
    )
)
