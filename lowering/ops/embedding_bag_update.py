"""embedding_bag_update: updates the table of pooled bags by their gradient.

    grad: [B, D], of the pooled bags       used: the rows with an index in some bag, except padding

    g[i] = sum over the entries of row i of scale * grad[bag of the entry]       in fp32, for i in used
           scale: the sample's weight; 1 / (indices of the bag that are not padding) for mean; 1
    SGD                   weight[i] -= lr * g[i]
    rowwise Adagrad       state[i] += mean(g[i]^2);   weight[i] -= lr * g[i] / (sqrt(state[i]) + eps)

In place; no other row is read or written. `state`: fp32 [V]; without it the rule is SGD. `rates`: fp32 [2],
lr and eps; they are a tensor so that a compiled or captured graph sees them change. A new row is rounded
once.

embedding_bag_with_update pools the bags; its backward is embedding_bag_update, and nothing has a gradient.
`anchor` is any tensor that requires a gradient: without one autograd does not run the backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autofuse.lowering.ops.library import LIBRARY
from autofuse.native_kernels import cpu
from autofuse.native_kernels.cpu.embedding import Bags, scatter_bags, touched_rows, update_rows

# An argument called "mode" would be taken for one of torch's own while a call is made functional.
_BAGS = (
    "Tensor indices, Tensor offsets, Tensor? per_sample_weights, int pooling, bool include_last_offset, "
    "int padding_idx"
)
LIBRARY.define(
    "embedding_bag_update(Tensor(a!) weight, Tensor(b!)? state, Tensor rates, Tensor grad, "
    + _BAGS
    + ") -> ()"
)
LIBRARY.define(
    "embedding_bag_with_update(Tensor anchor, Tensor weight, Tensor? state, Tensor rates, "
    + _BAGS
    + ") -> Tensor"
)


class Updates:
    """The updates of all tables of a rank on a CPU, from runs of bags in any order of the runs."""

    def __init__(
        self, bags: Bags, weights: Sequence[Tensor], states: Sequence[Tensor], rates: Sequence[Tensor]
    ) -> None:
        """`bags` are normalized; `states` has an entry a table, or none. Tables are as `check_tables` wants
        them."""
        self.weights, self.states, self.rates = weights, states, rates
        found = [touched_rows(bags, t, w.shape[0]) for t, w in enumerate(weights)]
        self._rows = [rows for rows, _ in found]
        # Sums have a row for every row that is touched, behind one for the entries that count for nothing.
        self._bags = bags.renumbered([places for _, places in found])
        self._sums = [
            torch.zeros(len(rows) + 1, w.shape[1], dtype=torch.float32)
            for rows, w in zip(self._rows, weights, strict=True)
        ]
        dims = [w.shape[1] for w in weights]
        self._columns = [sum(dims[:t]) for t in range(len(dims))]

    def add(self, grad: Tensor, stride: int, first: int, count: int) -> None:
        """`grad`: rows of bags `[first, first + count)`, `stride` elements apart."""
        if self._sums:
            scatter_bags(self._sums, grad, self._bags, self._columns, stride, first, count)

    def apply(self) -> None:
        """Changes the tables; called once, when all bags have been added."""
        for t, (weight, rows, sums) in enumerate(zip(self.weights, self._rows, self._sums, strict=True)):
            state = self.states[t] if self.states else None
            update_rows(weight, state, self.rates[t], sums[1:], rows)
        torch.autograd.graph.increment_version((*self.weights, *self.states))


def update_with_torch(
    weight: Tensor, state: Tensor | None, rates: Tensor, grad: Tensor, bags: Bags, table: int
) -> None:
    """The op with torch. No size depends on data, so that the host never waits for a GPU."""
    indices, count = bags.indices[table], bags.count
    if not len(indices):
        return
    starts = bags.offsets[table][:count].contiguous()
    position = torch.arange(indices.shape[0], device=indices.device, dtype=starts.dtype)
    bag = torch.searchsorted(starts, position, right=True) - 1
    used = (indices != bags.padding_idx) & (bag >= 0)
    if bags.include_last_offset:
        used &= position < bags.offsets[table][count]
    bag = bag.clamp(min=0)
    scale = used.float()
    if bags.per_sample_weights:
        scale = scale * bags.per_sample_weights[table]
    if bags.mode == 1:
        sizes = torch.zeros(count, dtype=torch.float32, device=bag.device).index_add_(0, bag, used.float())
        scale = scale / sizes.clamp(min=1)[bag]
    # `part` numbers the different rows in ascending order. Results have a place for every entry: the places
    # behind the last part repeat it, and write the same values.
    sorted_rows, order = torch.sort(indices.long(), stable=True)
    part = (sorted_rows.diff(prepend=sorted_rows[:1]) != 0).cumsum(0)
    whole = torch.arange(len(part), device=part.device).clamp(max=part[-1])
    row = torch.zeros_like(part).index_copy_(0, part, sorted_rows)[whole]
    touched = torch.zeros_like(part).index_add_(0, part, used[order].to(part.dtype))[whole] > 0
    parts = torch.empty_like(part).index_copy_(0, order, part)
    nothing = parts.new_empty(0)  # sizes of bags, and what max pooling has found
    sums = torch.ops.aten._embedding_bag_dense_backward(
        grad.float().contiguous(), parts, bag, nothing, nothing, len(part), False, 0, scale
    )[whole]
    lr, eps = rates.unbind()
    step = lr
    if state is not None:
        old = state[row]
        new = old + sums.square().sum(1) / max(1, sums.shape[1])
        state.index_copy_(0, row, torch.where(touched, new, old))
        step = (lr / (new.sqrt() + eps)).unsqueeze(1)
    kept = weight[row]
    moved = (kept.float() - step * sums).to(weight.dtype)
    weight.index_copy_(0, row, torch.where(touched.unsqueeze(1), moved, kept))


def check_tables(
    op: str, weights: Sequence[Tensor], states: Sequence[Tensor], rates: Sequence[Tensor]
) -> None:
    """Raises ValueError for tables that cannot be updated in place, or not by this rule."""
    for t, (weight, rate) in enumerate(zip(weights, rates, strict=True)):
        if weight.dtype not in cpu.DTYPES or weight.dim() != 2 or not weight.is_contiguous():
            raise ValueError(
                f"{op}: table {t} is {weight.dtype} {list(weight.shape)} with strides {weight.stride()}; "
                "expected a contiguous matrix of float32, bfloat16 or float16"
            )
        if weight.dtype != weights[0].dtype:
            raise ValueError(f"{op}: tables of {weights[0].dtype} and {weight.dtype}; call it for each dtype")
        if rate.dtype != torch.float32 or rate.shape != (2,):
            raise ValueError(
                f"{op}: rates of table {t} are {rate.dtype} {list(rate.shape)}; expected float32 [2]: lr, eps"
            )
    for t, (weight, state) in enumerate(zip(weights, states, strict=False)):
        if state.dtype != torch.float32 or state.shape != weight.shape[:1] or not state.is_contiguous():
            raise ValueError(
                f"{op}: the state of table {t} is {state.dtype} {list(state.shape)}; expected contiguous "
                f"float32 [{weight.shape[0]}]"
            )


def _bags(
    indices: Tensor, offsets: Tensor, samples: Tensor | None, pooling: int, last: bool, padding: int
) -> Bags:
    return Bags([indices], [offsets], [] if samples is None else [samples], pooling, last, padding)


def _update(weight: Tensor, state: Tensor | None, rates: Tensor, grad: Tensor, *given: Any) -> None:
    check_tables("embedding_bag_update", [weight], [] if state is None else [state], [rates])
    update_with_torch(weight, state, rates, grad, _bags(*given), 0)


def _update_on_cpu(weight: Tensor, state: Tensor | None, rates: Tensor, grad: Tensor, *given: Any) -> None:
    bags, states = _bags(*given), [] if state is None else [state]
    if not cpu.available() or grad.dtype not in cpu.DTYPES:
        return _update(weight, state, rates, grad, *given)
    check_tables("embedding_bag_update", [weight], states, [rates])
    updates = Updates(bags.normalized(), [weight], states, [rates])
    updates.add(grad.contiguous(), grad.shape[1], 0, bags.count)
    updates.apply()
    return None


class _Pooled(torch.autograd.Function):
    """Tables are attributes of `ctx`: a second use of the bag may find them updated by the first."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weight: Tensor, state: Tensor | None, rates: Tensor, *given: Any
    ) -> Any:
        indices, offsets, samples, pooling, last, padding = given
        ctx.tables, ctx.options = (weight, state, rates), (pooling, last, padding)
        ctx.save_for_backward(indices, offsets, samples)
        return torch.ops.aten._embedding_bag(
            weight, indices, offsets, False, pooling, False, samples, last, padding
        )[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        torch.ops.autofuse.embedding_bag_update(*ctx.tables, grad, *ctx.saved_tensors, *ctx.options)
        return (None,) * 10


for _device, _run in {
    "CPU": _update_on_cpu, "CUDA": _update, "XPU": _update, "PrivateUse1": _update
}.items():  # fmt: skip
    LIBRARY.impl("embedding_bag_update", _run, _device)
torch.library.register_fake("autofuse::embedding_bag_update", lambda *args: None, lib=LIBRARY)
# Composite: autograd traces the function above, so that graphs have torch's op in the forward.
LIBRARY.impl("embedding_bag_with_update", _Pooled.apply, "CompositeImplicitAutograd")
