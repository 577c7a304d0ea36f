"""Products: a sum of matmuls and the pointwise epilogue behind it, written as one string.

    mm                        P = sum_i x[i] @ w[i]             every term rounded to the dtype of x
    addmm %0                  P = operands[0] + x[0] @ w[0]     torch.addmm; further terms are added as in mm
    addmm %0 0.5 2            P = 0.5 * operands[0] + 2 * x[0] @ w[0]     beta and alpha of torch.addmm
    rows                      P = w[0][x[0]], rows of a table; x[0]: [M, 1], int64, w[0]: [V, N]; alone
    grouped %0                P = rows of experts, which are then added up: `reference/grouped.py`
    scaled_mm %0 %1 bfloat16  P = scaled_mm(x[0], w[0], operands[0], operands[1], out_dtype=bfloat16)
    add sub mul div           with `%i` (an operand) or a number: P = P op it
    neg; relu; to bfloat16
    where %0 %1               P = P where operands[0], else operands[1] (or a number)
    masked_fill %0 0.0        P = a number (or an operand) where operands[0], else P
    keep                      no step; only as the first stage: `keep_product` returns the contraction, not P

`mm; mul %0; to bfloat16` is `(x @ w * operands[0]).to(bfloat16)`. `x[i]: [M, K_i]`, `w[i]: [K_i, N]`;
operands broadcast against `[M, N]`. Every stage is the torch op that the unfused graph had, on rows and
columns of the same tensors, so that a tile has the roundings of the graph it stands for; only sums within a
matmul of few float32 rows may be added in another order (`matmul.multiply`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from autofuse.lowering.cpu.matmul import multiply
from autofuse.lowering.cpu.token_sums import add_up
from autofuse.lowering.torch_internals import scaled_mm

from . import words
from .bags import CONTRACTION as BAGS
from .bags import Pooling, pool_into, pooled
from .grouped import CONTRACTION as GROUPED
from .grouped import ROW_STAGES, blocks, change_rows, grouped

_BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}
_CONTRACTIONS = {"mm": 0, "addmm": 1, "scaled_mm": 2, "rows": 0, GROUPED: 0, BAGS: 0}


@dataclass(frozen=True, slots=True)
class Stage:
    """One pointwise step: `operand` or `number` for add, sub, mul, div; with a `mask` for where and
    masked_fill; `dtype` for to; none for neg and relu. In `grouped.ROW_STAGES` `mask` is an index."""

    name: str
    operand: int | None = None
    number: float | int | None = None
    dtype: torch.dtype | None = None
    mask: int | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """A parsed product. `inputs` are the operands of the contraction, `out_dtype` is that of scaled_mm,
    `beta` and `alpha` are those of addmm, `pooling` is that of bags. `keep`: whether the stage
    `keep` follows the contraction."""

    contraction: str
    inputs: tuple[int, ...]
    out_dtype: torch.dtype | None
    stages: tuple[Stage, ...]
    beta: float | int = 1
    alpha: float | int = 1
    pooling: Pooling | None = None
    keep: bool = False


@cache
def parse(product: str) -> Product:
    """The parsed form of a product string. Raises ValueError for a string that is not one."""
    try:
        return _parse(product)
    except ValueError as error:
        raise ValueError(
            f"malformed product {product!r}: {error}; expected e.g. 'mm; mul %0; to bfloat16'"
        ) from None


def _parse(product: str) -> Product:
    first, *rest = [stage.split() for stage in product.split(";")]
    if not first or first[0] not in _CONTRACTIONS:
        raise ValueError(f"it starts with none of {', '.join(_CONTRACTIONS)}")
    name, count = first[0], _CONTRACTIONS[first[0]]
    if name == GROUPED:
        count = min(1, len(first) - 1)
    inputs = tuple(map(words.operand, first[1 : 1 + count]))
    keep = rest[:1] == [["keep"]]
    if keep and (name in (GROUPED, BAGS) or len(rest) == 1):
        raise ValueError("keep stands between a matmul and another stage")
    stages = tuple(map(_stage, rest[keep:]))
    changes = [stage.name for stage in stages if stage.name in ROW_STAGES]
    if changes and name != GROUPED:
        raise ValueError(f"'{changes[0]}' follows {GROUPED} alone")
    if len(inputs) == count:
        match name, first[1 + count :]:
            case "scaled_mm", [dtype]:
                return Product(name, inputs, words.dtype(dtype), stages, keep=keep)
            case "addmm", [beta, alpha]:
                scales = words.number(beta), words.number(alpha)
                return Product(name, inputs, None, stages, *scales, keep=keep)
            case "bags", options:
                return Product(name, inputs, None, stages, pooling=Pooling.parse(options))
            case "mm" | "addmm" | "rows" | "grouped", []:
                return Product(name, inputs, None, stages, keep=keep)
    takes = {"scaled_mm": " and a dtype", "addmm": ", then beta and alpha or neither"}
    raise ValueError(f"{name} takes {count} operands{takes.get(name, '')}")


def _stage(stage: list[str]) -> Stage:
    match stage:
        case [("neg" | "relu") as name]:
            return Stage(name)
        case [("where" | "masked_fill") as name, mask, value] if value.startswith("%"):
            return Stage(name, operand=words.operand(value), mask=words.operand(mask))
        case [("where" | "masked_fill") as name, mask, value]:
            return Stage(name, number=words.number(value), mask=words.operand(mask))
        case ["take", index]:
            return Stage("take", mask=words.operand(index))
        case [("sum" | "fold") as name, count] if count.isdigit() and int(count) > 0:
            return Stage(name, number=int(count))
        case ["index_add", base, index]:
            return Stage("index_add", operand=words.operand(base), mask=words.operand(index))
        case ["to", dtype]:
            return Stage("to", dtype=words.dtype(dtype))
        case [("add" | "sub" | "mul" | "div") as name, value] if value.startswith("%"):
            return Stage(name, operand=words.operand(value))
        case [("add" | "sub" | "mul" | "div") as name, value]:
            return Stage(name, number=words.number(value))
    raise ValueError(f"unknown stage '{' '.join(stage)}'")


def product_reference(
    x: Sequence[Tensor], w: Sequence[Tensor], operands: Sequence[Tensor], product: str
) -> Tensor:
    """`P: [M, N]` with plain torch ops, on any device, also of fake tensors. Experts have no gradient."""
    return epilogue(contract(parse(product), x, w, operands), operands, product)


def contract(p: Product, x: Sequence[Tensor], w: Sequence[Tensor], operands: Sequence[Tensor]) -> Tensor:
    """What a product is before its stages."""
    if p.contraction == "mm":
        total = torch.mm(x[0], w[0])
    elif p.contraction == "rows":
        total = torch.index_select(w[0], 0, x[0].squeeze(1))
    elif p.pooling is not None:
        return pooled(x, w, operands, p.pooling)
    elif p.contraction == "addmm":
        total = torch.addmm(operands[p.inputs[0]], x[0], w[0], beta=p.beta, alpha=p.alpha)
    elif p.contraction == GROUPED:
        ends = operands[p.inputs[0]] if p.inputs else None
        terms = [grouped(xi, wi, ends) for xi, wi in zip(x, w, strict=True)]
        return sum(terms[1:], terms[0])
    else:
        a, b = (operands[i] for i in p.inputs)
        total = scaled_mm(x[0], w[0], a, b, p.out_dtype)
    for xi, wi in zip(x[1:], w[1:], strict=True):
        total = total + torch.mm(xi, wi)
    return total


def epilogue(value: Tensor, operands: Sequence[Tensor], product: str) -> Tensor:
    """The stages of `product` behind the contraction; operands broadcast against `value`."""
    for stage in parse(product).stages:
        value = value.to(stage.dtype) if stage.dtype is not None else _apply(stage, value, operands)
    return value


def _apply(stage: Stage, value: Tensor, operands: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """One stage that keeps the dtype or widens it; `out` may be `value` itself."""
    if stage.name in ROW_STAGES:
        base, index = (operands[i] if i is not None else None for i in (stage.operand, stage.mask))
        return change_rows(stage.name, value, base, index, stage.number)
    if stage.name == "neg":
        return torch.neg(value, out=out)
    if stage.name == "relu":
        return torch.clamp_min(value, 0, out=out)
    other = operands[stage.operand] if stage.operand is not None else stage.number
    if stage.mask is None:
        return _BINARY[stage.name](value, other, out=out)
    if not isinstance(other, Tensor):
        assert other is not None
        other = value.new_full((), other)
    chosen = (value, other) if stage.name == "where" else (other, value)
    return torch.where(operands[stage.mask], *chosen, out=out)


def fill(stage: Stage, value: Tensor, operands: Sequence[Tensor], number: float | int) -> Tensor:
    """`value` with `number` where the mask of a masked_fill is true, that of a where false."""
    assert stage.operand is not None
    mask = operands[stage.operand]
    return value.masked_fill(mask if stage.name == "masked_fill" else ~mask, number)


def dtype_of(product: str, dtype: torch.dtype, operands: Sequence[Tensor]) -> torch.dtype:
    """The dtype of `P`, which is not of experts or bags. dtype: of w."""
    return _dtype_of(product, dtype, tuple((t.dtype, t.dim()) for t in operands))


@cache
def _dtype_of(product: str, dtype: torch.dtype, operands: tuple[tuple[torch.dtype, int], ...]) -> torch.dtype:
    p = parse(product)
    value = torch.empty((1, 1), dtype=p.out_dtype or dtype, device="meta")
    given = [torch.empty((1,) * dims, dtype=of, device="meta") for of, dims in operands]
    return epilogue(value, given, product).dtype


def with_kept(
    x: Sequence[Tensor], w: Sequence[Tensor], operands: Sequence[Tensor], product: str
) -> tuple[Tensor, Tensor]:
    """`P`, and what `keep_product` returns: P, or the contraction."""
    if not keeps_contraction(product):
        p = product_reference(x, w, operands, product)
        return p, p
    total = contract(parse(product), x, w, operands)
    return epilogue(total, operands, product), total


def evaluate(
    out: Tensor, x: Sequence[Tensor], w: Sequence[Tensor], operands: Sequence[Tensor], product: str
) -> Tensor:
    """Stores `P` in `out: [M, N]`, whose dtype is P's; straight from the matmul where no dtype changes.

    Returns what `with_kept` keeps.
    """
    p = parse(product)
    uniform = w[0].dtype == out.dtype and all(stage.dtype is None for stage in p.stages)
    if p.contraction == GROUPED:
        total = contract(p, x, w, operands)
        if done := add_up(out, total, operands, p.stages):
            for stage in p.stages[done:]:
                _apply(stage, out, operands, out=out)
            return total
        for span in blocks(total, [stage.name for stage in p.stages]):
            of_span = [t[..., span] if t.dim() and t.shape[-1] > 1 else t for t in operands]
            out[:, span].copy_(epilogue(total[:, span], of_span, product))
        return total
    if p.keep:
        value = total = contract(p, x, w, operands)
        if not uniform:
            out.copy_(epilogue(total, operands, product))
            return total
        for stage in p.stages:
            value = _apply(stage, value, operands, out=out)
        return total
    in_place = p.pooling is None or out.is_contiguous()
    if not uniform or p.contraction == "scaled_mm" or not in_place:
        out.copy_(product_reference(x, w, operands, product))
        return out
    # Promotion only widens: when both ends have one dtype, so has everything between, and all fits in `out`.
    if p.contraction == "addmm":
        torch.addmm(operands[p.inputs[0]], x[0], w[0], beta=p.beta, alpha=p.alpha, out=out)
    elif p.contraction == "rows":
        torch.index_select(w[0], 0, x[0].squeeze(1), out=out)
    elif p.pooling is not None:
        pool_into(out, x, w, operands, p.pooling)
    else:
        multiply(out, x[0], w[0])
    if p.pooling is None:  # of bags, the tables are no terms of a sum
        for xi, wi in zip(x[1:], w[1:], strict=True):
            torch.add(out, torch.mm(xi, wi), out=out)
    for stage in p.stages:
        _apply(stage, out, operands, out=out)
    return out


def is_grouped(product: str) -> bool:
    """Whether the product is one of experts."""
    return product.startswith(GROUPED)


def keeps_contraction(product: str) -> bool:
    """Whether `keep_product` returns the contraction in place of P."""
    return is_grouped(product) or parse(product).keep


def without_keep(product: str) -> str:
    """The same product without the stage `keep`."""
    return product.replace("; keep;", ";")


def is_pooled(product: str) -> bool:
    """Whether the product is one of embedding bags."""
    return product.startswith(BAGS)


def check_product(x: Sequence[Tensor], w: Sequence[Tensor], operands: Sequence[Tensor], op: str) -> None:
    """Raises ValueError unless `x[i]: [M, K_i]`, `w[i]: [K_i, N]` and operands make a product."""
    if not x or len(x) != len(w):
        raise ValueError(
            f"{op}: got {len(x)} activations and {len(w)} weights; pass one weight per activation"
        )
    m, n = x[0].shape[0], w[0].shape[-1]
    for xi, wi in zip(x, w, strict=True):
        if (
            xi.dim() != 2
            or wi.dim() != 2
            or xi.shape[1] != wi.shape[0]
            or xi.shape[0] != m
            or wi.shape[1] != n
        ):
            raise ValueError(
                f"{op}: cannot multiply x {tuple(xi.shape)} by w {tuple(wi.shape)}; "
                f"expected x [{m}, K] and w [K, {n}] with the same K"
            )
    check_same((*x, *w), op)
    for operand in operands:
        shape = (1, 1, *operand.shape)[-2:]
        if operand.dim() > 2 or shape[0] not in (1, m) or shape[1] not in (1, n):
            raise ValueError(f"{op}: an operand {tuple(operand.shape)} does not broadcast against [{m}, {n}]")
        if operand.device != x[0].device:
            raise ValueError(
                f"{op}: an operand is on {operand.device}, x on {x[0].device}; move all to one device"
            )


def check_same(tensors: Sequence[Tensor], op: str) -> None:
    """Raises ValueError unless all tensors are on one device and have one dtype."""
    first = tensors[0]
    for other in tensors[1:]:
        if other.device != first.device:
            raise ValueError(f"{op}: tensors on {first.device} and {other.device}; move all to one device")
        if other.dtype != first.dtype:
            raise ValueError(f"{op}: tensors of {first.dtype} and {other.dtype}; cast all to one dtype")


def product_backward(
    grad: Tensor,
    x: Sequence[Tensor],
    w: Sequence[Tensor],
    operands: Sequence[Tensor],
    product: str,
    needs: Sequence[Sequence[bool]],
) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
    """Gradients of x, w and operands (those that `needs` asks for, else None) from that of `P: [M, N]`.

    `dx[i] = g @ w[i]^T`, `dw[i] = x[i]^T @ g`, where `g` is `grad` taken back through the stages; of `rows`
    the rows of `g` are added up where they were read. Of the
    operands only those that are added or subtracted have one; RuntimeError where another one needs it.
    """
    if keeps_contraction(product) or parse(product).pooling is not None:
        raise RuntimeError(f"product {product!r} has no gradient; it is for graphs behind autograd")
    grad, found = epilogue_backward(grad, operands, product, w[0].dtype, needs[2])
    if parse(product).contraction == "rows":
        table = torch.zeros_like(w[0]).index_add_(0, x[0].squeeze(1), grad) if needs[1][0] else None
        return [None], [table], found
    dx = [grad @ wi.t() if need else None for wi, need in zip(w, needs[0], strict=True)]
    dw = [xi.t() @ grad if need else None for xi, need in zip(x, needs[1], strict=True)]
    return dx, dw, found


def epilogue_backward(
    grad: Tensor, operands: Sequence[Tensor], product: str, dtype: torch.dtype, needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of the contraction's result, in `dtype`, and of the operands that are added or subtracted.

    RuntimeError where another operand needs one, or a stage has none (relu: its input is not kept).
    """
    p = parse(product)
    if p.contraction == "scaled_mm":
        raise RuntimeError("scaled_mm has no gradient; multiply in a wider dtype to train")
    if p.alpha != 1:
        raise RuntimeError(f"product {product!r} has no gradient: it scales the matmul; scale its weight")
    found: list[Tensor | None] = [None] * len(operands)

    def add_to(operand: int, term: Tensor) -> None:
        term = term.sum_to_size(operands[operand].shape).to(operands[operand].dtype)
        before = found[operand]
        found[operand] = term if before is None else before + term

    for stage in reversed(p.stages):
        if stage.name == "relu":
            raise RuntimeError(f"product {product!r} has no gradient: relu does not keep its input")
        if stage.operand is not None and needs[stage.operand]:
            if stage.name not in ("add", "sub"):
                raise RuntimeError(f"product {product!r} has no gradient for its operand %{stage.operand}")
            add_to(stage.operand, grad if stage.name == "add" else -grad)
        if stage.mask is not None:
            mask = operands[stage.mask]
            grad = grad.masked_fill(~mask if stage.name == "where" else mask, 0)
        elif stage.name in ("mul", "div", "neg"):
            grad = _apply(stage, grad, operands)
    grad = grad.to(dtype)
    for i in p.inputs:
        if needs[i]:
            add_to(i, grad if p.beta == 1 else grad * p.beta)
    return grad, found
