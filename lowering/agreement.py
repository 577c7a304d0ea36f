"""What ranks tell each other before an optimizer's step writes anything: `step()` happens on all ranks or
on none.

Every rank tells two digests of all that must be equal on all ranks, and a code of two bits for each tensor.
So all ranks find the same problem, if there is one, and name the same tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

MISSING, GIVEN, WRONG = range(3)
"""Codes of gradients."""
_SAYS = {
    MISSING: "has no gradient",
    WRONG: "has a gradient that is sparse or of other shape, dtype or device",
}
_PER_WORD = 31
"""Codes in an int64, which has a sign."""

_BAD = sum(2 << 2 * i for i in range(_PER_WORD))
"""The bits of WRONG in a word."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that a gradient may have besides that of its parameter."""


class Disagreement(ValueError):
    """The ranks cannot go on. All of them raise it."""


def code(param: Tensor, grad: Tensor | None) -> int:
    """The code of a gradient."""
    if grad is None:
        return MISSING
    fits = grad.shape == param.shape and grad.device == param.device and grad.layout == torch.strided
    return GIVEN if fits and grad.dtype in (param.dtype, *DTYPES) else WRONG


def digest(*values: object) -> int:
    """63 bits of a hash of the values. Of a tensor, which is on the CPU, the bytes are hashed."""
    found = hashlib.blake2b(digest_size=8)
    for value in values:
        found.update(value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return int.from_bytes(found.digest(), "little") >> 1


def told(kind: int, numbers: int, codes: Sequence[int]) -> list[int]:
    """The message of a rank. kind: the digest of tensors, dtypes and rule; numbers: that of rates and other
    numbers."""
    cut = [codes[at : at + _PER_WORD] for at in range(0, len(codes), _PER_WORD)]
    words = [sum(c << 2 * i for i, c in enumerate(part)) for part in cut]
    return [kind, numbers, *words]


def problem(op: str, of_ranks: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Why the ranks cannot go on, the same text on all of them; empty if they can."""
    mine = of_ranks[0]
    for rank, theirs in enumerate(of_ranks):
        if len(theirs) != len(mine):
            return f"{op}: ranks 0 and {rank} have other numbers of parameters"
    for at in range(2, len(mine)):
        words = [theirs[at] for theirs in of_ranks]
        if len(set(words)) == 1 and not words[0] & _BAD:
            continue
        for i in range(_PER_WORD):
            codes = [word >> 2 * i & 3 for word in words]
            number = (at - 2) * _PER_WORD + i
            bad = [rank for rank, c in enumerate(codes) if c == WRONG]
            if not bad and len(set(codes)) > 1:
                bad = [rank for rank, c in enumerate(codes) if c == MISSING]
            if bad:
                says = _SAYS[codes[bad[0]]]
                others = ", on others it has one" if codes[bad[0]] == MISSING else ""
                return f"{op}: {names[number]} {says} on ranks {bad}{others}; no parameter has changed"
    for rank, theirs in enumerate(of_ranks):
        if theirs[0] != mine[0]:
            return f"{op}: ranks 0 and {rank} have other parameters, dtypes of gradients, or rules"
    for rank, theirs in enumerate(of_ranks):
        if theirs[1] != mine[1]:
            return f"{op}: ranks 0 and {rank} have other rates (lr, betas, step ...); nothing has changed"
    return ""


def not_finite(op: str, norm: float) -> RuntimeError:
    """The error that the option `error_if_nonfinite` asks for."""
    return RuntimeError(f"{op}: the norm of all gradients is {norm}; no parameter has changed")
