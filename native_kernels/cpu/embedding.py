"""Pools embedding bags and stores the rows at the place of the result. Computes the gradient: dense, sparse,
or as an update of the tables. All on one thread."""

from collections.abc import Sequence
from ctypes import Array, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autofuse.native_kernels.cpu import DTYPES, function

_BAD_INDEX = 1

# pool(tables, number, bags, wide indices, dtype of the tables, dtype of the wire, out, failure) -> error
_pool = function(
    "af_pool_bags", c_int, [c_void_p, c_int64, c_void_p, c_int, c_int, c_int, c_void_p, c_void_p]
)
# scatter(tables, number, bags, wide indices, dtype of the weights, dtype of grad, grad, failure) -> error
_scatter = function(
    "af_scatter_bags", c_int, [c_void_p, c_int64, c_void_p, c_int, c_int, c_int, c_void_p, c_void_p]
)
# expand(tables, number, bags, wide indices, dtype of the values, dtype of grad, grad, failure) -> error
_expand = function(
    "af_expand_bags", c_int, [c_void_p, c_int64, c_void_p, c_int, c_int, c_int, c_void_p, c_void_p]
)
# touched(indices, number, wide, padding, rows of the table, places, rows, slots, number of slots, failure)
# -> rows, or -1
_touched = function(
    "af_touched_rows",
    c_int64,
    [c_void_p, c_int64, c_int, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p],
)
# update(weight, its dtype, state or None, sums, rows, number, dim, lr, eps)
_update_rows = function(
    "af_update_rows",
    None,
    [c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_float],
)


@dataclass(frozen=True, slots=True)
class Bags:
    """How `indices` are cut into bags, and how a bag is pooled. Lists have one entry per table.

    `indices[t]: [n_t]`, `offsets[t]: [B]`, or `[B + 1]` with `include_last_offset`; `per_sample_weights` is
    empty or `[n_t]` per table in the dtype of the table. mode: 0 sum, 1 mean, 2 max. `padding_idx` < 0: none.
    """

    indices: Sequence[Tensor]
    offsets: Sequence[Tensor]
    per_sample_weights: Sequence[Tensor]
    mode: int
    include_last_offset: bool
    padding_idx: int

    @property
    def count(self) -> int:
        """B."""
        return self.offsets[0].shape[0] - self.include_last_offset

    def of(self, tables: Sequence[int]) -> "Bags":
        """Those of some tables."""
        return replace(
            self,
            indices=[self.indices[t] for t in tables],
            offsets=[self.offsets[t] for t in tables],
            per_sample_weights=[self.per_sample_weights[t] for t in tables if self.per_sample_weights],
        )

    def renumbered(self, indices: Sequence[Tensor]) -> "Bags":
        """The same bags of other indices, 0 for padding."""
        return replace(self, indices=indices, padding_idx=0)

    def entries(self, table: int) -> slice:
        """The indices that are in bags."""
        offsets = self.offsets[table]
        if not len(offsets):
            return slice(0, 0)
        stop = int(offsets[-1]) if self.include_last_offset else self.indices[table].shape[0]
        return slice(int(offsets[0]), stop)

    def normalized(self) -> "Bags":
        """The same bags, contiguous, with offsets in the dtype of the indices, as the kernels take them."""
        dtype = torch.int64 if any(t.dtype == torch.int64 for t in (*self.indices, *self.offsets)) else None
        dtype = dtype or torch.int32
        return Bags(
            [t.to(dtype).contiguous() for t in self.indices],
            [t.to(dtype).contiguous() for t in self.offsets],
            [t.contiguous() for t in self.per_sample_weights],
            self.mode,
            self.include_last_offset,
            self.padding_idx,
        )


def pool_bags(
    out: Tensor,
    tables: Sequence[Tensor],
    bags: Bags,
    columns: Sequence[int],
    stride: int,
    first: int,
    count: int,
) -> None:
    """Pools bags `[first, first + count)` of every table, adding in float32, in the order of the indices.

    Bag b of table t is rounded to the table's dtype, then to out's, and stored at element
    `(b - first) * stride + columns[t]` of `out`, which is contiguous. `tables[t]: [V_t, D_t]`, contiguous,
    all of one dtype. Raises RuntimeError for an index or offset that is out of range.
    """
    rows = _rows(tables, bags, columns)
    span = _span(bags, stride, first, count)
    failure = (c_int64 * 2)()
    wide = bags.indices[0].dtype == torch.int64
    error = _pool(
        rows, len(tables), span, wide, DTYPES[tables[0].dtype], DTYPES[out.dtype], out.data_ptr(), failure
    )
    if error:
        raise _error(error, failure[0], failure[1], tables[failure[0]].shape[0])


def scatter_bags(
    gradients: Sequence[Tensor],
    grad: Tensor,
    bags: Bags,
    columns: Sequence[int],
    stride: int,
    first: int,
    count: int,
) -> None:
    """The gradient of sum and mean: adds to `gradients[t]: float32 [V_t, D_t]` the rows of `grad` of bags
    `[first, first + count)`. `grad` is contiguous and laid out as `out` above."""
    rows = _rows(gradients, bags, columns)
    span = _span(bags, stride, first, count)
    failure = (c_int64 * 2)()
    wide = bags.indices[0].dtype == torch.int64
    weights = DTYPES[bags.per_sample_weights[0].dtype] if bags.per_sample_weights else 0
    error = _scatter(rows, len(gradients), span, wide, weights, DTYPES[grad.dtype], grad.data_ptr(), failure)
    if error:
        raise _error(error, failure[0], failure[1], gradients[failure[0]].shape[0])


def used_indices(bags: Bags, table: int, num_rows: int) -> Tensor:
    """The indices of a table that are in bags and are not padding, as int64 in memory of their own. Raises
    RuntimeError for one that is out of range."""
    indices = bags.indices[table][bags.entries(table)]
    if bags.padding_idx >= 0:
        indices = indices[indices != bags.padding_idx]
    for bad in indices[(indices < 0) | (indices >= num_rows)][:1]:
        raise _error(_BAD_INDEX, table, int(bad), num_rows)
    return indices.to(torch.int64, copy=True)


def touched_rows(bags: Bags, table: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """The rows that entries of a table name, int64 and each once, and for every index its place among them,
    counted from 1, 0 where it is padding or in no bag, in the dtype of the indices.

    Raises RuntimeError for an index that is out of range.
    """
    entries, indices = bags.entries(table), bags.indices[table]
    places, inside = torch.zeros_like(indices), indices[entries]
    rows = torch.empty(len(inside), dtype=torch.int64)
    slots = torch.full((2 << len(inside).bit_length(),), -1, dtype=torch.int64)
    failure = (c_int64 * 2)()
    count = _touched(
        inside.data_ptr(), len(inside), indices.dtype == torch.int64, bags.padding_idx, num_rows,
        places[entries].data_ptr(), rows.data_ptr(), slots.data_ptr(), len(slots), failure,
    )  # fmt: skip
    if count < 0:
        raise _error(_BAD_INDEX, table, failure[1], num_rows)
    return rows[:count], places


def update_rows(weight: Tensor, state: Tensor | None, rates: Tensor, sums: Tensor, rows: Tensor) -> None:
    """`weight[rows] -= lr * sums`, with state (float32 `[V]`) by rowwise Adagrad; rates: lr and eps.

    sums: float32, a row for each of `rows`, all different; all contiguous. Computes in float32, rounds once.
    """
    lr, eps = rates.tolist()
    _update_rows(
        weight.data_ptr(), DTYPES[weight.dtype], None if state is None else state.data_ptr(),
        sums.data_ptr(), rows.data_ptr(), len(rows), weight.shape[1], lr, eps,
    )  # fmt: skip


def expand_bags(
    values: Sequence[Tensor],
    grad: Tensor,
    bags: Bags,
    columns: Sequence[int],
    stride: int,
    first: int,
    count: int,
) -> None:
    """As `scatter_bags`, but every entry that is not padding has its own row of `values[t]: [nnz_t, D_t]`, in
    the order of the entries of all bags. The values have the dtype of the tables; they are rounded as torch
    rounds those of sparse gradients."""
    rows = _rows(values, bags, columns)
    span = _span(bags, stride, first, count)
    failure = (c_int64 * 2)()
    wide, to = bags.indices[0].dtype == torch.int64, DTYPES[values[0].dtype]
    error = _expand(rows, len(values), span, wide, to, DTYPES[grad.dtype], grad.data_ptr(), failure)
    if error:
        raise _error(error, failure[0], failure[1], values[failure[0]].shape[0])


def _rows(tables: Sequence[Tensor], bags: Bags, columns: Sequence[int]) -> "Array[c_int64]":
    values: list[int] = []
    weights = bags.per_sample_weights
    for t, (table, indices, offsets) in enumerate(zip(tables, bags.indices, bags.offsets, strict=True)):
        values += (table.data_ptr(), *table.shape, indices.data_ptr(), indices.shape[0], offsets.data_ptr())
        values += (weights[t].data_ptr() if weights else 0, columns[t])
    return (c_int64 * len(values))(*values)


def _span(bags: Bags, stride: int, first: int, count: int) -> "Array[c_int64]":
    last, mode, padding = int(bags.include_last_offset), bags.mode, bags.padding_idx
    return (c_int64 * 7)(first, count, bags.count, stride, last, mode, padding)


def _error(error: int, table: int, value: int, num_rows: int) -> RuntimeError:
    if error == _BAD_INDEX:
        return RuntimeError(
            f"embedding_bag: index {value} of table {table} is outside of its {num_rows} rows"
        )
    return RuntimeError(
        f"embedding_bag: bag {value} of table {table} ends before it starts or outside of the indices; "
        "offsets must ascend from 0 to at most the number of indices"
    )
