"""A compiled step that is written in tensor ops: all_reduces of the gradients, then AdamW of every tensor.

Every rank has all parameters and states. The number of the step is a tensor on the device, so that a CUDA
graph can replay the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from autofuse.lowering.ops.all_reduce_update import OP
from autofuse.lowering.update_rules import adam_terms, numbers_at

from .cells import Shapes
from .rows import OURS, WRITTEN

BETAS, LR, EPS, DECAY = (0.9, 0.999), 0.1, 1e-3, 0.01
"""With such a rate a step moves parameters of bfloat16, and with such an eps by what their gradients are."""

Step = tuple[Callable[[], object], list[Tensor]]
"""A step, and the parameters that it changes."""


def written_peers(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Step]]:
    """Ours first: the compiled program, and on GPUs the op by itself in every way of its kernels. Then the
    same program as Inductor compiles it; and one in which gradients are copied to one flat buffer."""
    yield OURS, _compiled(_each, shapes, dtype, device, backend="autofuse", options={"policy": "always"})
    if device.type == "cuda":
        yield from _by_name(shapes, dtype, device)
    yield "Inductor", _compiled(_each, shapes, dtype, device)
    if len(shapes) > 1:
        yield "Inductor, one flat all_reduce", _compiled(_flat, shapes, dtype, device)


def check_written(peers: dict[str, Step]) -> dict[str, Step]:
    """Makes the first step of every peer. AssertionError unless it has the parameters of AdamW in float64."""
    for name, (step, params) in peers.items():
        expected = [_first(p.detach(), g) for p, g in zip(params, _mean(_grads(params)), strict=True)]
        before = [p.detach().clone() for p in params]
        step()
        for p, old, wanted in zip(params, before, expected, strict=True):
            eps = torch.finfo(p.dtype).eps
            far = (p.detach().double() - wanted).abs() - 2 * eps * wanted.abs() - max(1e-5, LR * eps)
            assert bool((far <= 0).all()), f"{WRITTEN}, {name}: {float(far.max())} too far from AdamW"
            assert not torch.equal(p.detach(), old), f"{WRITTEN}, {name}: nothing has changed"
    return peers


def _first(p: Tensor, g: Tensor) -> Tensor:
    """The first update, in float64: both moments without bias are those of the gradient."""
    return p.double() * (1 - LR * DECAY) - LR * g.double() / (g.double().abs() + EPS)


def _mean(grads: Sequence[Tensor]) -> list[Tensor]:
    """Of the ranks; the sum is rounded, and the mean again."""
    found = []
    for g in grads:
        total = g.double()
        dist.all_reduce(total)
        found.append((total.to(g.dtype) / dist.get_world_size()).double())
    return found


def _params(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Parameters with gradients. The gradients of the ranks differ. They are multiples of 1 / 8, so that
    their sums are exact in any order."""
    weights, grads = (torch.Generator(device).manual_seed(seed) for seed in (0, 1 + dist.get_rank()))
    params = [torch.randn(s, generator=weights, device=device).to(dtype) for s in shapes]
    for p in params:
        p.grad = (torch.randint(-8, 9, p.shape, generator=grads, device=device) / 8).to(dtype)
    return params


def _grads(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _compiled(
    program: Callable[..., None], shapes: Shapes, dtype: torch.dtype, device: torch.device, **how: Any
) -> Step:
    """Of the current shapes alone."""
    params = _params(shapes, dtype, device)
    m, v = ([torch.zeros(p.shape, device=device) for p in params] for _ in range(2))
    given = params, _grads(params), m, v, torch.zeros((), device=device)
    # Code for each peer: dynamo compiles the same code for a few shapes and backends only.
    code = program.__code__.replace()
    compiled = torch.compile(FunctionType(code, globals()), fullgraph=True, dynamic=False, **how)

    def step() -> None:
        with torch.no_grad():
            compiled(*given)

    return step, params


def _each(
    params: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor], t: Tensor
) -> None:  # fmt: skip
    sums = [funcol.all_reduce(g, "avg", _group()) for g in grads]
    _update(params, sums, m, v, t)


def _flat(
    params: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor], t: Tensor
) -> None:  # fmt: skip
    whole = funcol.all_reduce(torch.cat([g.view(-1) for g in grads]), "avg", _group())
    parts = whole.split([g.numel() for g in grads])
    _update(params, [part.view(g.shape) for part, g in zip(parts, grads, strict=True)], m, v, t)


def _update(
    params: list[Tensor], grads: Sequence[Tensor], m: list[Tensor], v: list[Tensor], t: Tensor
) -> None:
    t.add_(1)
    first, root = 1 - BETAS[0] ** t, (1 - BETAS[1] ** t).sqrt()
    for p, total, of_m, of_v in zip(params, grads, m, v, strict=True):
        g, wide = total.float(), p.float()
        of_m.lerp_(g, 1 - BETAS[0])
        of_v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        p.copy_(wide * (1 - LR * DECAY) - LR / first * of_m / (of_v.sqrt() / root + EPS))


def _by_name(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Step]]:
    """The op without the program around it, in each of its ways and by plain collectives. Each step has the
    numbers of step 1, which lie on the GPU."""
    from autofuse.lowering.gpu import by_name

    for way in by_name.names(OP, _arguments(_params(shapes, dtype, device)), True):
        params = _params(shapes, dtype, device)
        yield f"{OURS} {way}", (partial(by_name.run, way, OP, _arguments(params)), params)


def _arguments(params: list[Tensor]) -> tuple[Any, ...]:
    device = params[0].device
    numbers = torch.tensor([numbers_at(adam_terms(BETAS, EPS, DECAY, True), 1, LR)], device=device)
    states = [torch.zeros(p.shape, device=device) for _ in range(2) for p in params]
    return (
        params, states, _grads(params), numbers, [0] * len(params), None, "adam", "avg",
        [False] * len(params), _group().group_name, "direct", "bench",
    )  # fmt: skip


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
