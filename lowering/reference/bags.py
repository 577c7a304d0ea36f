"""Products of embedding bags: the rows of tables that this rank has, pooled.

    bags sum 0 -1    P = [pooled(w[0]), pooled(w[1]), ...], columns of one table behind those of another
                     x[t]: [n_t], the rows of w[t]: [V_t, D_t] that bags name
                     operands[t]: [B], where the bags of table t start in x[t]
    bags mean 1 5 weighted

Behind the mode (sum, mean, max): 1 if offsets have one entry more, where the last bag ends, else 0; the row
that is padding, -1 for none; and whether operands[T + t]: [n_t] weigh the rows. Rows of P need the rows that
their bags name (`of_bags`). Columns are not cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autofuse.lowering.torch_internals import has_values
from autofuse.native_kernels.cpu.embedding import Bags, pool_bags

CONTRACTION = "bags"
MODES = ("sum", "mean", "max")


@dataclass(frozen=True, slots=True)
class Pooling:
    """How bags are pooled; `padding` < 0: no row is padding."""

    mode: int
    last: bool
    padding: int
    weighted: bool

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Pooling":
        """Raises ValueError for words that say no such thing."""
        match words:
            case [mode, ("0" | "1") as last, padding, *rest] if mode in MODES and rest in ([], ["weighted"]):
                return cls(MODES.index(mode), last == "1", int(padding), bool(rest))
        raise ValueError(f"{CONTRACTION} takes {', '.join(MODES)}, then 0 or 1, the padding, and 'weighted'")

    @property
    def text(self) -> str:
        weighted = " weighted" if self.weighted else ""
        return f"{CONTRACTION} {MODES[self.mode]} {int(self.last)} {self.padding}{weighted}"

    def bags(self, x: Sequence[Tensor], operands: Sequence[Tensor]) -> Bags:
        tables = len(x)
        weights = operands[tables : 2 * tables] if self.weighted else ()
        return Bags(x, operands[:tables], weights, self.mode, self.last, self.padding)


def pooled(x: Sequence[Tensor], w: Sequence[Tensor], operands: Sequence[Tensor], pooling: Pooling) -> Tensor:
    """`[B, sum of D_t]`, by torch's op. No gradient."""
    bags = pooling.bags(x, operands)
    if not has_values(w[0]):
        return w[0].new_empty(bags.count, sum(t.shape[1] for t in w))
    weights: Sequence[Tensor | None] = bags.per_sample_weights or [None] * len(w)
    each = [
        torch.ops.aten._embedding_bag_forward_only(
            t, i, o.to(i.dtype), False, bags.mode, False, s, pooling.last, pooling.padding
        )[0]
        for t, i, o, s in zip(w, bags.indices, bags.offsets, weights, strict=True)
    ]
    return torch.cat(each, 1)


def pool_into(
    out: Tensor, x: Sequence[Tensor], w: Sequence[Tensor], operands: Sequence[Tensor], pooling: Pooling
) -> None:
    """The same on one thread into `out`, which is contiguous."""
    bags = pooling.bags(x, operands).normalized()
    starts = [sum(t.shape[1] for t in w[:i]) for i in range(len(w))]
    pool_bags(out, [t.contiguous() for t in w], bags, starts, out.shape[1], 0, bags.count)


def of_any_number(
    x: Sequence[Tensor], operands: Sequence[Tensor], pooling: Pooling
) -> tuple[list[Tensor], list[Tensor]]:
    """x and operands without entries to look up: calls that differ in their number alone are alike."""
    weights = range(len(x), 2 * len(x)) if pooling.weighted else ()
    return [t[:0] for t in x], [t[:0] if i in weights else t for i, t in enumerate(operands)]


def of_bags(
    rows: Tensor, x: Sequence[Tensor], operands: Sequence[Tensor], pooling: Pooling
) -> tuple[list[Tensor], list[Tensor]]:
    """x and operands of bags `rows`, a range."""
    if not len(rows):
        return [t[:0] for t in x], [t[:0] for t in operands]
    tables, first, stop = len(x), int(rows[0]), int(rows[-1]) + 1
    indices, found = list(x), list(operands)
    for t, (index, offsets) in enumerate(zip(x, operands, strict=False)):
        ended = pooling.last or stop < offsets.shape[0]
        entries = slice(int(offsets[first]), int(offsets[stop]) if ended else index.shape[0])
        indices[t] = index[entries]
        found[t] = offsets[first : stop + pooling.last] - offsets[first]
        if pooling.weighted:
            found[tables + t] = operands[tables + t][entries]
    named = tables * (2 if pooling.weighted else 1)
    for i, operand in enumerate(operands[named:], named):
        found[i] = operand[rows] if operand.dim() == 2 and operand.shape[0] > 1 else operand
    return indices, found
