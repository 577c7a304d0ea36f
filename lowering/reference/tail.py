"""Tails: the stages behind a reduction, written as one string and applied to the sum over the ranks.

    add sub rsub mul div      with `%i` (an operand) or a number: V = V op it (rsub: it - V)
    neg; relu; silu; gelu none; gelu tanh; to bfloat16
    clamp_min -448; clamp_max 448
    where %0 %1               V = V where operands[0], else operands[1] (or a number)
    masked_fill %0 0.0        V = a number (or an operand) where operands[0], else V
    rms 1e-06                 V = V * rsqrt(mean(V^2) + 1e-06), means over the columns
    rms 1e-06 keep            rsqrt(...): [M, 1] is returned, too
    standardize 1e-05         V = (V - mean(V)) * rsqrt(var(V) + 1e-05), without Bessel's correction
    standardize 1e-05 keep    mean(V) and rsqrt(...): [M, 1] are returned, too
    project %0                V = V - X * mean(V * X), X = operands[0]
    project %0 %1             the same with X = operands[0] * operands[1]
    centre %0                 V = V - mean(V) - X * mean(V * X), X = operands[0]
    keep                      V as it is here is returned, too

`V: [M, N]` begins as the reduced value in the dtype of the product. `add %0; keep; to float32; rms 1e-06; to
bfloat16; mul %1` is a residual, which is kept, and the RMSNorm of Hugging Face's Llama. Dtypes promote as in
torch, every stage rounds to its dtype; norms, project and centre take float32. Operands broadcast against
`[M, N]`. The results are `[V, kept values in the order of their stages]`. A tail has no gradient. `mul %0;
clamp_min -448; clamp_max 448; to float8_e4m3fn` is a static quantisation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from . import words

_BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "rsub": torch.rsub,
    "mul": torch.mul,
    "div": torch.div,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
}
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
}


@dataclass(frozen=True, slots=True)
class TailStage:
    """One stage: `operand` or `number` for add, sub, rsub, mul, div; with a `mask` for where and masked_fill;
    `number` for clamps; `dtype` for to; `number` (epsilon) for norms; `approximate` for gelu. `keep`: a norm
    returns its statistics, too. `scale`: the second operand of project."""

    name: str
    operand: int | None = None
    number: float | int | None = None
    dtype: torch.dtype | None = None
    mask: int | None = None
    approximate: str = "none"
    keep: bool = False
    scale: int | None = None

    @property
    def needs_rows(self) -> bool:
        """Whether it takes means over the columns."""
        return self.is_norm or self.name in ("project", "centre")

    @property
    def is_norm(self) -> bool:
        return self.name in ("rms", "standardize")

    @property
    def kept(self) -> int:
        """How many values it returns besides V."""
        return 1 if self.name == "keep" else self.keep * (2 if self.name == "standardize" else 1)


@cache
def parse(tail: str) -> tuple[TailStage, ...]:
    """The stages of a tail; none of an empty string. Raises ValueError for a string that is not a tail."""
    if not tail:
        return ()
    try:
        stages = tuple(_stage(stage.split()) for stage in tail.split(";"))
        if stages[-1].name == "keep":
            raise ValueError("it ends with keep, but its last value is returned anyway")
        return stages
    except ValueError as error:
        raise ValueError(
            f"malformed tail {tail!r}: {error}; expected e.g. 'add %0; keep; rms 1e-06; mul %1'"
        ) from None


def _stage(stage: list[str]) -> TailStage:
    match stage:
        case [("neg" | "relu" | "silu" | "keep") as name]:
            return TailStage(name)
        case [("project" | "centre") as name, x]:
            return TailStage(name, operand=words.operand(x))
        case ["project", x, scale]:
            return TailStage("project", operand=words.operand(x), scale=words.operand(scale))
        case ["gelu", ("none" | "tanh") as approximate]:
            return TailStage("gelu", approximate=approximate)
        case ["to", dtype]:
            return TailStage("to", dtype=words.dtype(dtype))
        case [("where" | "masked_fill") as name, mask, value] if value.startswith("%"):
            return TailStage(name, operand=words.operand(value), mask=words.operand(mask))
        case [("where" | "masked_fill") as name, mask, value]:
            return TailStage(name, number=words.number(value), mask=words.operand(mask))
        case [("add" | "sub" | "rsub" | "mul" | "div") as name, value] if value.startswith("%"):
            return TailStage(name, operand=words.operand(value))
        case [("add" | "sub" | "rsub" | "mul" | "div") as name, value]:
            return TailStage(name, number=words.number(value))
        case [("clamp_min" | "clamp_max") as name, value]:
            return TailStage(name, number=words.number(value))
        case [("rms" | "standardize") as name, eps]:
            return TailStage(name, number=words.number(eps))
        case [("rms" | "standardize") as name, eps, "keep"]:
            return TailStage(name, number=words.number(eps), keep=True)
    raise ValueError(f"unknown stage '{' '.join(stage)}'")


def tail_reference(value: Tensor, operands: Sequence[Tensor], tail: str) -> list[Tensor]:
    """`[V, kept values]` with plain torch ops, on any device; works on fake tensors.

    No two of them are one tensor.
    """
    results, kept = [value], list[Tensor]()
    for _, results[0], more in steps(value, operands, tail):
        kept += more
    for t in kept:
        results.append(t.clone() if any(t is other for other in results) else t)
    # Row-major, as kernels store them. A pointwise op of torch takes the strides of an operand.
    return [t.contiguous() for t in results]


def steps(
    value: Tensor, operands: Sequence[Tensor], tail: str
) -> Iterator[tuple[TailStage, Tensor, tuple[Tensor, ...]]]:
    """Stage by stage: V behind it, and what it returns besides."""
    for stage in parse(tail):
        value, *more = _apply(stage, value, operands)
        yield stage, value, tuple(more)


def _apply(stage: TailStage, value: Tensor, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """V behind the stage, and what it returns besides."""
    if stage.is_norm:
        assert stage.number is not None
        return _norm(value, stage.name, stage.number, stage.keep)
    if stage.name in ("project", "centre"):
        return (_project(value, stage, operands),)
    if stage.name == "keep":
        return value, value
    if stage.dtype is not None:
        return (value.to(stage.dtype),)
    if stage.name == "gelu":
        return (torch.nn.functional.gelu(value, approximate=stage.approximate),)
    if stage.name in _UNARY:
        return (_UNARY[stage.name](value),)
    other = operands[stage.operand] if stage.operand is not None else stage.number
    if stage.mask is None:
        return (_BINARY[stage.name](value, other),)
    if not isinstance(other, Tensor):
        assert other is not None
        other = value.new_full((), other)
    chosen = (value, other) if stage.name == "where" else (other, value)
    return (torch.where(operands[stage.mask], *chosen),)


def _project(value: Tensor, stage: TailStage, operands: Sequence[Tensor]) -> Tensor:
    _check_float32(value, stage.name)
    assert stage.operand is not None
    x = operands[stage.operand].to(torch.float32)
    if stage.scale is not None:
        x = x * operands[stage.scale]
    rest = value - value.mean(-1, keepdim=True) if stage.name == "centre" else value
    return rest - x * (value * x).mean(-1, keepdim=True)


def _check_float32(value: Tensor, name: str) -> None:
    if value.dtype != torch.float32:
        raise ValueError(f"{name} takes float32, got {value.dtype}; put 'to float32' before it")


def _norm(value: Tensor, name: str, eps: float, keep: bool) -> tuple[Tensor, ...]:
    _check_float32(value, name)
    if name == "rms":
        scale = torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
        return (value * scale, scale) if keep else (value * scale,)
    var, mean = torch.var_mean(value, dim=-1, correction=0, keepdim=True)
    scale = torch.rsqrt(var + eps)
    normed = (value - mean) * scale
    return (normed, mean, scale) if keep else (normed,)


def check_tail(
    shape: Sequence[int], operands: Sequence[Tensor], tail: str, op: str, whole_rows: bool = True
) -> None:
    """Raises ValueError unless `operands` are those of a tail of `V: shape`. whole_rows: V has all columns,
    which norms need."""
    stages = parse(tail)
    m, n = shape
    named = (i for s in stages for i in (s.operand, s.mask, s.scale))
    count = max((i for i in named if i is not None), default=-1) + 1
    if len(operands) != count:
        raise ValueError(f"{op}: tail {tail!r} uses {count} operands, got {len(operands)}")
    for operand in operands:
        rows, columns = (1, 1, *operand.shape)[-2:]
        if operand.dim() > 2 or rows not in (m, 1) or columns not in (n, 1):
            raise ValueError(
                f"{op}: an operand {tuple(operand.shape)} of the tail does not broadcast against [{m}, {n}]"
            )
    for stage in stages:
        if stage.needs_rows and not whole_rows:
            raise ValueError(f"{op}: {stage.name} needs whole rows, but columns are scattered; use dim 0")
        if stage.mask is not None and operands[stage.mask].dtype != torch.bool:
            raise ValueError(f"{op}: the mask of {stage.name} is {operands[stage.mask].dtype}; expected bool")
