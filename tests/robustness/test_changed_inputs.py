"""What compiles never raises later: compiled programs are called again with inputs that changed in shape,
dtype, strides or gradient. Where eager works, they serve them or are compiled anew, with eager's numbers."""

import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.passes import dense, experts, recommendation
from tests.passes.harness import Program, passes_only
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
MODULES = {m.__name__.rsplit(".", 1)[-1]: m for m in (dense, recommendation, experts)}
CHANGES_EACH = 3

Change = Callable[[Tensor], Tensor]


def _strided(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t


def _floating(change: Change) -> Change:
    return lambda t: change(t) if t.is_floating_point() else t


# What becomes of every tensor argument, and of the first alone.
ALL: dict[str, Change] = {
    "transposed strides": _transposed,
    "strides of two": _strided,
    "bfloat16": _floating(lambda t: t.bfloat16()),
    "float64": _floating(lambda t: t.double()),
    "gradients": _floating(lambda t: t.detach().clone().requires_grad_(not t.requires_grad)),
}
FIRST: dict[str, Change] = {
    "twice the rows": lambda t: torch.cat([t, t]),
    "a row more": lambda t: torch.cat([t, t[:1]]),
    "a row": lambda t: t[:1],
    "no rows": lambda t: t[:0],
    "twice dim 1": lambda t: torch.cat([t, t], 1) if t.dim() > 2 else t,
    "one of dim 1": lambda t: t[:, :1] if t.dim() > 2 else t,
    "expanded": lambda t: t[:1].expand_as(t),
}


def _changed(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with one change; gradients are wanted of what wanted them before."""
    if name in ALL:
        return pytree.tree_map_only(torch.Tensor, lambda t: _leaf(ALL[name], t, name == "gradients"), args)
    first, *rest = pytree.tree_leaves(args)
    spec = pytree.tree_structure(args)
    return pytree.tree_unflatten([_leaf(FIRST[name], first, False), *rest], spec)


def _leaf(change: Change, t: Tensor, own: bool) -> Tensor:
    return change(t) if own else change(t.detach()).requires_grad_(t.requires_grad)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], grad: bool) -> tuple[list[Tensor] | None, str]:
    """Outputs and gradients; None and the error if it raises."""
    try:
        with torch.set_grad_enabled(grad):
            out = fn(*args)
            outputs = [o for o in pytree.tree_leaves(out) if isinstance(o, torch.Tensor)]
            leaves = [t for t in pytree.tree_leaves(args) if t.requires_grad] if grad else []
            wanted = [o.float().sum() for o in outputs if o.requires_grad]
            grads = torch.autograd.grad(sum(wanted), leaves, allow_unused=True) if wanted and leaves else ()
            return [_local(t.detach()) for t in (*outputs, *grads) if t is not None], ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _local(t: Any) -> Tensor:
    t = t.to_local() if hasattr(t, "to_local") else t
    return t.to_dense() if t.is_sparse else t


def _wrong(actual: list[Tensor], expected: list[Tensor]) -> str:
    if len(actual) != len(expected):
        return f"{len(actual)} results instead of {len(expected)}"
    for a, b in zip(actual, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.shape} {a.dtype} instead of {b.shape} {b.dtype}"
        loose = 0.06 if b.dtype in (torch.bfloat16, torch.float16) else 1e-4
        scale = b.double().abs().max().item() if b.numel() else 0.0
        if b.numel() and not (a.double() - b.double()).abs().max().item() <= loose * max(scale, 1e-6):
            return f"off by {(a.double() - b.double()).abs().max().item():g} of {scale:g}"
    return ""


def _fuzz(
    rank: int, world: int, module: str, name: str, changes: list[str], dynamic: bool | None
) -> tuple[int, list[str]]:
    """Number of changes that eager could do, and what went wrong with those. Where torch.compile itself
    differs from eager (in-place collectives have a gradient only when compiled), the unfused graph counts."""
    program: Program = MODULES[module].PROGRAMS[name]
    torch._dynamo.reset()
    torch.manual_seed(rank)
    fn, args = program.build(world, rank)
    unfused = torch.compile(fn, backend=passes_only("never"), dynamic=dynamic)
    compiled = torch.compile(fn, backend=passes_only(), dynamic=dynamic)
    done, problems = 0, []
    with torch._dynamo.config.patch(recompile_limit=64, capture_scalar_outputs=True):
        for change in ("", *changes, ""):
            try:
                changed = _changed(change, args) if change else args
            except Exception:
                continue  # no such tensor
            grad = program.grad or change == "gradients"
            expected, _ = _call(fn, changed, grad)
            if expected is None:
                continue
            done += 1
            actual, problem = _call(compiled, changed, grad)
            problem = problem if actual is None else _wrong(actual, expected)
            if problem:
                expected, _ = _call(unfused, changed, grad)
                if expected is None or (actual is not None and not _wrong(actual, expected)):
                    continue
                problems.append(f"{name}, {change or 'as built'}: {problem}")
    return done, problems


CASES = [
    ("dense", "in place"),
    ("dense", "reduce_scatter dim 1"),
    ("recommendation", "rows"),
]
MORE_CASES = [
    ("dense", "sum of two"),
    ("dense", "scaled rows and columns"),
    ("dense", "all_gather, q k v"),
    ("experts", "fixed capacity"),
    ("dense", "also returned"),
    ("dense", "all_gather dim 1"),
    ("dense", "Megatron's function"),
    ("recommendation", "stacked, batch first"),
    ("experts", "dropless"),
]


@pytest.mark.parametrize(
    ("module", "name"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_CASES)]
)
def test_changed_inputs(ranks: Ranks, module: str, name: str) -> None:
    generator = random.Random(zlib.crc32(name.encode()))
    changes = generator.sample([*ALL, *FIRST], CHANGES_EACH)
    dynamic = generator.choice([None, True])
    for done, problems in ranks(2).run(_fuzz, module, name, changes, dynamic, timeout=200):
        assert done >= 2
        assert not problems
