"""Shared by dispatch and combine: the three forms of experts, and their matmuls.

    batched   `experts == 0`, no splits    x[i]: [E, R, K]   w[i]: [E, K, N]   bias[i]: [E, N] or [E, 1, N]
    listed    `experts == E`, no splits    x[i * E + e]: [R, K]   w[i * E + e]: [K, N]   bias[i * E + e]: [N]
    dropless  splits given                 x[i]: [rows, K]; expert e has rows offsets[e - 1] to offsets[e],
              w and bias batched, or listed if `experts == E`; without offsets all have as many rows

`i` counts the terms of a sum (combine) or the consumers (dispatch). A bias that is empty stands for none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.lowering.reference.product import epilogue, parse, product_reference

GATES = {"silu": F.silu}
"""The activation of a gate, by its name."""
KEPT = "; products"
"""Behind the name of a gate: the products are outputs, too."""


@dataclass(frozen=True, slots=True)
class Experts:
    """`count` experts; `listed`: w and bias have an entry per expert; `ranges`: rows of each, if dropless."""

    count: int
    listed: bool
    ranges: tuple[tuple[int, int], ...] | None

    @classmethod
    def of(
        cls,
        w: Sequence[Tensor],
        experts: int,
        offsets: Tensor | None,
        dropless: bool,
        rows: int,
        op: str,
    ) -> "Experts":
        """Reads the offsets. Raises ValueError if they do not fit `rows` rows and the weights."""
        count = experts or w[0].shape[0]
        if not dropless:
            return cls(count, bool(experts), None)
        if offsets is None and rows % count:
            raise ValueError(f"{op}: {rows} rows are no multiple of {count} experts; pass offsets")
        ends = [rows // count * (e + 1) for e in range(count)] if offsets is None else offsets.tolist()
        starts = [0, *ends[:-1]]
        if len(ends) != count or any(a > b for a, b in zip(starts, ends, strict=True)) or max(ends) > rows:
            raise ValueError(
                f"{op}: expected ascending offsets of {count} experts, at most the number of rows, {rows}; "
                f"got {ends}"
            )
        return cls(count, bool(experts), tuple(zip(starts, ends, strict=True)))

    @property
    def batched(self) -> bool:
        return not self.listed and self.ranges is None

    @property
    def used(self) -> int:
        """Dropless: the rows that belong to an expert."""
        return self.ranges[-1][1] if self.ranges else 0

    def split(self, t: Tensor) -> list[Tensor]:
        """`P` or `X` in the form of activations: one tensor, or one per expert."""
        return list(t.unbind(0)) if self.listed and self.ranges is None else [t]

    def entries(self, tensors: Sequence[Tensor], e: int) -> list[Tensor]:
        """The weights (biases) of expert e, one per term or consumer."""
        if self.listed:
            return list(tensors[e :: self.count])
        return [t[e] if t.numel() else t for t in tensors]

    def rows(self, tensors: Sequence[Tensor], e: int) -> list[Tensor]:
        """The rows of expert e in activations, one per term or consumer; views."""
        if self.ranges is not None:
            start, stop = self.ranges[e]
            return [t[start:stop] for t in tensors]
        return list(tensors[e :: self.count]) if self.listed else [t[e] for t in tensors]

    def add_up(
        self,
        x: Sequence[Tensor],
        w: Sequence[Tensor],
        bias: Sequence[Tensor],
        e: int,
        out: Tensor,
        rows: slice = slice(None),
    ) -> None:
        """`out = sum_i x[i] @ w[i] (+ bias[i])` on `rows` of expert e; every term is rounded."""
        weights = self.entries(w, e)
        biases: Sequence[Tensor | None] = self.entries(bias, e) or [None] * len(weights)
        first = True
        for xi, wi, b in zip(self.rows(x, e), weights, biases, strict=True):
            if first:
                matmul(xi[rows], wi, b, out)
            else:
                torch.add(out, matmul(xi[rows], wi, b), out=out)
            first = False

    def apply(
        self,
        part: Tensor,
        w: Sequence[Tensor],
        bias: Sequence[Tensor],
        e: int,
        outs: Sequence[Tensor],
        rows: slice = slice(None),
    ) -> None:
        """`outs[i][rows] = part @ w[i] (+ bias[i])` of expert e for every consumer i."""
        weights = self.entries(w, e)
        biases: Sequence[Tensor | None] = self.entries(bias, e) or [None] * len(weights)
        for wi, b, out in zip(weights, biases, self.rows(outs, e), strict=True):
            matmul(part, wi, b, out[rows])


def matmul(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`x @ w (+ bias)`; an empty bias is none."""
    if bias is None or not bias.numel():
        return torch.mm(x, w, out=out)
    return torch.addmm(bias, x, w, out=out)


def batched_matmul(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """`x @ w (+ bias)` for `[E, R, K]` and `[E, K, N]`; an empty bias is none."""
    if bias is None or not bias.numel():
        return torch.bmm(x, w, out=out)
    return torch.baddbmm(bias.reshape(w.shape[0], 1, -1), x, w, out=out)


def expert_product(
    x: Sequence[Tensor], w: Sequence[Tensor], bias: Sequence[Tensor], experts: Experts
) -> Tensor:
    """`P: [E, R, N]`, dropless `[rows, N]` with zeros behind the last expert."""
    n = w[0].shape[-1]
    if experts.batched:
        biases: Sequence[Tensor | None] = bias or [None] * len(w)
        terms = [batched_matmul(xi, wi, b) for xi, wi, b in zip(x, w, biases, strict=True)]
        return sum(terms[1:], terms[0])
    if experts.ranges is None:
        p = x[0].new_empty((experts.count, x[0].shape[-2], n))
    else:
        p = x[0].new_empty((x[0].shape[0], n))
        p[experts.used :] = 0
    for e in range(experts.count):
        experts.add_up(x, w, bias, e, p[e] if experts.ranges is None else experts.rows([p], e)[0])
    return p


def gated(products: list[Tensor], gate: str) -> list[Tensor]:
    """With a gate `activation(products[0]) * products[1]`, each op rounded, and with KEPT the products behind
    it; without a gate the products. ValueError for a gate that is not of GATES, or for more or fewer
    products."""
    if not gate:
        return products
    name = gate.removesuffix(KEPT)
    if name not in GATES or len(products) != 2:
        raise ValueError(
            f"a gate is one of {', '.join(GATES)}, also with {KEPT!r} behind it, and takes the products with "
            f"2 weights; got {gate!r} and {len(products)}"
        )
    result = GATES[name](products[0]).mul_(products[1])
    return [result, *products] if gate.endswith(KEPT) else [result]


def input_gradients(grad: Tensor, w: Sequence[Tensor], experts: Experts) -> list[Tensor]:
    """`grad @ w[i]^T` in the form of the activations; `grad` is that of P."""
    found = []
    stride = experts.count if experts.listed else 1
    for i in range(0, len(w), stride):
        p = expert_product(experts.split(grad), transposed(w[i : i + stride]), [], experts)
        found += experts.split(p)
    return found


def weight_gradients(x: Sequence[Tensor], grads: Sequence[Tensor], experts: Experts) -> list[Tensor]:
    """`dw[i] = x[i]^T @ grads[i]` in the form of the weights; `x` and `grads` in that of the activations."""
    if experts.batched:
        return [torch.bmm(xi.transpose(1, 2), g) for xi, g in zip(x, grads, strict=True)]
    per_expert = []
    for e in range(experts.count):
        pairs = zip(experts.rows(x, e), experts.rows(grads, e), strict=True)
        per_expert.append([xi.t() @ g for xi, g in pairs])
    return gather_entries(per_expert, experts)


def bias_gradients(grads: Sequence[Tensor], bias: Sequence[Tensor], experts: Experts) -> list[Tensor | None]:
    """Gradients of `bias`, None where there is none."""
    if not bias:
        return []
    sums = [[g.sum(0) for g in experts.rows(grads, e)] for e in range(experts.count)]
    found = gather_entries(sums, experts)
    return [g.view(b.shape) if b.numel() else None for g, b in zip(found, bias, strict=True)]


def gather_entries(per_expert: Sequence[Sequence[Tensor]], experts: Experts) -> list[Tensor]:
    """`per_expert[e][i]` as one tensor per i, or, listed, one per i and e."""
    terms = range(len(per_expert[0]))
    if experts.listed:
        return [of_expert[i] for i in terms for of_expert in per_expert]
    return [torch.stack([of_expert[i] for of_expert in per_expert]) for i in terms]


def transposed(w: Sequence[Tensor]) -> list[Tensor]:
    """The weights that take gradients back."""
    return [t.transpose(-2, -1) for t in w]


# --- Epilogues ----------------------------------------------------------------------------------------


def product_of(
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    bias: Sequence[Tensor],
    operands: Sequence[Tensor],
    product: str,
    experts: Experts,
) -> Tensor:
    """`P` with its epilogue. Contractions other than mm are for a single batched expert; else ValueError."""
    if parse(product).contraction == "mm":
        return epilogue(expert_product(x, w, bias, experts), operands, product)
    if experts.count != 1 or experts.listed or bias:
        raise ValueError(f"product {product!r}: several experts start with 'mm'; pass a bias for an addmm")
    contraction = product.partition(";")[0]
    rows = x if experts.ranges is not None else [t[0] for t in x]
    p = product_reference(rows, [t[0] for t in w], operands, contraction)
    return epilogue(p if experts.ranges is not None else p.unsqueeze(0), operands, product)


def contraction_dtype(x: Tensor, product: str) -> torch.dtype:
    """The dtype of the product before its epilogue."""
    return parse(product).out_dtype or x.dtype
