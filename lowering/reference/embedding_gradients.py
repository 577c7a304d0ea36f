"""Gradients of the tables of embedding bags: dense, or sparse COO tensors as torch makes them.

dense   [V, D]: the rows of the gradients of bags, added up by index
sparse  not coalesced: indices [1, nnz], values [nnz, D], one for every index that is not padding
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from autofuse.lowering.reference.layout import Size
from autofuse.native_kernels.cpu.embedding import Bags, expand_bags, scatter_bags, used_indices


def coo(indices: Tensor, values: Tensor, rows: Size) -> Tensor:
    """The gradient of a table of `rows` rows, made by the call that torch makes it with."""
    return torch.ops.aten._sparse_coo_tensor_unsafe(indices, values, (rows, values.shape[1]))


def sparse_gradient(grad: Tensor, bags: Bags, table: int, rows: Size) -> Tensor:
    """The sparse gradient that the unfused graph makes from `grad: [B, D]`, in the dtype of the table."""
    entries = bags.entries(table)
    indices = bags.indices[table][entries]
    starts = bags.offsets[table][: bags.count].contiguous()
    position = torch.arange(entries.start, entries.stop, device=indices.device, dtype=starts.dtype)
    bag = torch.searchsorted(starts, position, right=True) - 1
    sizes = bag.new_zeros(bags.count).index_add_(0, bag, (indices != bags.padding_idx).to(bag.dtype))
    samples = bags.per_sample_weights[table][entries] if bags.per_sample_weights else None
    # Torch lets the result alias the indices of the bags, which an op must not do.
    return torch.ops.aten._embedding_bag_sparse_backward(
        grad, indices.clone(), starts, bag, sizes, rows, False, bags.mode, samples, bags.padding_idx
    )


class Gradients:
    """The gradients of all tables on a CPU, from runs of bags in any order of the runs."""

    def __init__(
        self,
        bags: Bags,
        num_embeddings: Sequence[int],
        dims: Sequence[int],
        dtype: torch.dtype,
        sparse: Sequence[bool],
    ) -> None:
        """`bags` are normalized."""
        starts = [sum(dims[:t]) for t in range(len(dims))]
        self.sparse, self.rows, self.dtype = sparse, num_embeddings, dtype
        parts = [[t for t in range(len(dims)) if bool(sparse[t]) == kind] for kind in (False, True)]
        (self._dense_bags, self._dense_columns), (self._bags, self._columns) = [
            (bags.of(tables), [starts[t] for t in tables]) for tables in parts
        ]
        dense, entries = parts
        self._sums = [torch.zeros(num_embeddings[t], dims[t], dtype=torch.float32) for t in dense]
        self._indices = [used_indices(bags, t, num_embeddings[t]) for t in entries]
        self._values = [
            torch.empty(len(i), dims[t], dtype=dtype) for t, i in zip(entries, self._indices, strict=True)
        ]

    def add(self, grad: Tensor, stride: int, first: int, count: int) -> None:
        """`grad`: rows of bags `[first, first + count)`, `stride` elements apart."""
        if self._sums:
            scatter_bags(self._sums, grad, self._dense_bags, self._dense_columns, stride, first, count)
        if self._values:
            expand_bags(self._values, grad, self._bags, self._columns, stride, first, count)

    def result(self) -> list[Tensor]:
        sums, entries = iter(self._sums), zip(self._indices, self._values, strict=True)
        found = []
        for is_sparse, rows in zip(self.sparse, self.rows, strict=True):
            if is_sparse:
                indices, values = next(entries)
                nnz = len(indices) if values.numel() else 0  # with torch a table of no columns has no entries
                found.append(coo(indices[:nnz].unsqueeze(0), values[:nnz], rows))
            else:
                found.append(next(sums).to(self.dtype))
        return found
