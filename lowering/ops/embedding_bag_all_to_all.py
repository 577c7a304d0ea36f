"""embedding_bag_all_to_all: each rank pools its tables over the whole batch and gets its bags of all tables.

    weights[t]: [V_t, D_t]   indices[t]: [n_t]   offsets[t]: [B], B = W * b
    columns[s] = sum of D_t on rank s

    forward   p[t][j] = sum (mean, max) over the indices of bag j of rows of weights[t], times their
              per_sample_weights[t] if given
              y = pooled rows of all ranks for the bags [r * b, (r + 1) * b), in `layout` (embedding_layout)
    backward  all_to_all_embedding_bag_backward of dy;
              dper_sample_weights[t][k] = <G[bag of k], weights[t][indices[t][k]]>, G the exchanged gradient

A pooled row is accumulated in fp32, rounded to the dtype of the table, then to `dtype`, that of the wire and
of y: the roundings of the graph that pools, casts and exchanges. `max` has no gradient.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from autofuse.lowering.cpu.exchange_executor import run_exchange
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.ops.library import FusedOp, SymInts, register
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Family
from autofuse.lowering.reference import embedding_layout as layouts
from autofuse.native_kernels.cpu import DTYPES
from autofuse.native_kernels.cpu.embedding import Bags, pool_bags

if TYPE_CHECKING:
    from autofuse.lowering.ops.all_to_all_embedding_bag_backward import AllToAllEmbeddingBagBackward
    from autofuse.lowering.ops.all_to_all_embedding_bag_update import AllToAllEmbeddingBagUpdate

    OfBags: TypeAlias = "EmbeddingBagAllToAll | AllToAllEmbeddingBagBackward | AllToAllEmbeddingBagUpdate"

OP = "embedding_bag_all_to_all"

MODES = ("sum", "mean", "max")

GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the GPU kernels of bags exchange."""


def bags_of(args: "OfBags", mode: int) -> Bags:
    weights, last = args.per_sample_weights, args.include_last_offset
    return Bags(args.indices, args.offsets, weights, mode, last, args.padding_idx)


def batch_of(args: "OfBags") -> int:
    """B."""
    return args.offsets[0].shape[0] - int(args.include_last_offset)


class EmbeddingBagAllToAll(NamedTuple):
    """The arguments of the op."""

    weights: list[Tensor]
    indices: list[Tensor]
    offsets: list[Tensor]
    per_sample_weights: list[Tensor]
    mode: int
    include_last_offset: bool
    padding_idx: int
    dtype: torch.dtype
    columns: SymInts
    layout: str
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

    @property
    def dims(self) -> list[int]:
        return [w.shape[1] for w in self.weights]


def _fake(args: EmbeddingBagAllToAll) -> Tensor:
    shape = layouts.shape(args.layout, args.batch // len(args.columns), args.columns, args.dims)
    return args.weights[0].new_empty(shape, dtype=args.dtype)


def reference(args: EmbeddingBagAllToAll) -> Tensor:
    pooled = torch.cat([t.to(args.dtype) for t in _pool(args.weights, args.bags)], 1)
    return layouts.exchange_forward(pooled, args.layout, args.columns, args.dims, args.group_name)


def _cpu(args: EmbeddingBagAllToAll) -> Any:
    weights, columns, layout, dtype = args.weights, args.columns, args.layout, args.dtype
    if dtype not in DTYPES:
        return NotImplemented
    workspace = workspace_for(args.group_name)
    world, rank = workspace.world, workspace.rank
    bags, dims = args.bags.normalized(), args.dims
    layouts.check(OP, layout, bags.count, columns, dims, rank)
    b = bags.count // world
    out = weights[0].new_empty(layouts.shape(layout, b, columns, dims), dtype=dtype)
    starts, stride = layouts.place(layout, rank, b, columns, dims)
    dtypes = {t.dtype for t in (*weights, *args.per_sample_weights)}
    native = len(dtypes) == 1 and dtypes <= DTYPES.keys()
    tables = [w.contiguous() for w in weights]
    plan = _partition(b, columns, args.order).plan(rank)
    key = f"{bags.count} bags of {list(columns)} columns {dtype} {layout}, {plan.agreement}"
    with workspace.call(OP, args.site, key, out.numel() * dtype.itemsize) as call:
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


def _cuda(args: EmbeddingBagAllToAll) -> Any:
    from autofuse.lowering.gpu.embedding.call import run_embedding

    return run_embedding(args)


def _partition(b: int, columns: Sequence[int], order: str) -> PlanShape:
    """A tile is all that goes from a source to a rank: its columns of `b` bags."""
    chunks = tuple(((b, c),) * len(columns) for c in columns)
    block = (max(1, b), max(1, *columns))
    return PlanShape(OP, order, len(columns), chunks, block)


def _plan_shape(args: EmbeddingBagAllToAll) -> PlanShape:
    return _partition(args.batch // len(args.columns), args.columns, args.order)


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


def _save(ctx: Any, args: EmbeddingBagAllToAll, output: Tensor) -> dict[str, Any]:
    """The tables are needed for the gradient of the weights per sample alone."""
    weights = args.weights
    ctx.sizes = [w.shape[0] for w in weights], args.dims, weights[0].dtype
    return {} if any(s.requires_grad for s in args.per_sample_weights) else {"weights": []}


def _backward(ctx: Any, args: EmbeddingBagAllToAll, grad: Tensor) -> dict[str, Any]:
    if args.mode == MODES.index("max"):
        raise RuntimeError(f"{OP}: mode 'max' has no gradient; use 'sum' or 'mean' to train")
    rows, dims, dtype = ctx.sizes
    tables = len(dims)
    keep = any(ctx.needs.per_sample_weights)
    results = torch.ops.autofuse.all_to_all_embedding_bag_backward(
        grad.contiguous(), args.indices, args.offsets, args.per_sample_weights, rows, dims, args.mode,
        args.include_last_offset, args.padding_idx, dtype, [False] * tables, args.columns, args.layout, keep,
        args.group_name, args.order, args.site + "'",
    )  # fmt: skip
    found: dict[str, Any] = {"weights": results[:tables]}
    if keep:
        pieces = results[-1].to(dtype).split(dims, 1)
        found["per_sample_weights"] = [
            _sample_gradient(g, w, i, o, args.padding_idx)
            for g, w, i, o in zip(pieces, args.weights, args.indices, args.offsets, strict=True)
        ]
    return found


def _sample_gradient(grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, padding: int) -> Tensor:
    """`<grad[bag of k], weight[indices[k]]>` for every index k: `[n]`; zero at the padding."""
    position = torch.arange(indices.shape[0], device=indices.device, dtype=offsets.dtype)
    bag = torch.searchsorted(offsets[: grad.shape[0]].contiguous(), position, right=True) - 1
    return ((grad[bag] * weight[indices]).sum(1)).masked_fill(indices == padding, 0)


register(
    FusedOp(
        name=OP,
        arguments=EmbeddingBagAllToAll,
        returns="Tensor",
        family=Family.PRODUCE,
        replaces="all_to_all",
        fake=_fake,
        reference=reference,
        cpu=_cpu,
        plan_shape=_plan_shape,
        backward=_backward,
        save=_save,
        cuda=_cuda,
        exchanged=lambda args: args.dtype,
        gpu_dtypes=GPU_DTYPES,
        shapes=lambda args: ((args.batch, sum(args.columns)),),
    )
)
