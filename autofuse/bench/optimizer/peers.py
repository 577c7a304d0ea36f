"""Steps of optimizers with their exchange of gradients: ours, and what torch has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autofuse import optim
from autofuse.lowering.buckets import buckets_of
from autofuse.lowering.update_rules import adam_terms, lamb_terms, numbers_at

from .cells import Shapes
from .rows import OURS, Options

OP = "reduce_update_gather"
BUCKET_BYTES = 25 << 20
"""Of the flat buffers, as in DDP."""
MAX_NORM = 1.0
FEW = 64
"""Most tensors of a step that Inductor compiles within seconds."""
RATES: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}

Peer = tuple[Callable[[], object], list[Tensor]]
"""A step, and the parameters that it changes."""


def peers(
    rule: str, shapes: Shapes, dtype: torch.dtype, device: torch.device, options: Options
) -> Iterator[tuple[str, Peer]]:
    """Peers by name, ours first; captured: those that a CUDA graph can replay."""
    captured, max_norm = options.captured, MAX_NORM if options.clipped else None
    rates = RATES | ({"capturable": True} if captured else {})
    params = _params(shapes, dtype, device)
    ours = getattr(optim, rule)(params, max_norm=max_norm, **rates)
    yield OURS, (ours.step, params)

    if params[0].is_cuda:
        from autofuse.lowering.gpu import by_name

        for way in by_name.names(OP, _arguments(rule, params, max_norm, captured), False):
            made = _params(shapes, dtype, device)
            arguments = _arguments(rule, made, max_norm, captured)
            yield f"{OURS} {way}", (partial(by_name.run, way, OP, arguments), made)

    if rule == "LAMB":
        yield from _lambs(shapes, dtype, device, max_norm)
        return

    params = _params(shapes, dtype, device)
    each = torch.optim.AdamW(params, fused=True, **rates)
    yield "all_reduce a tensor", (_after(_reduce_each, params, each, max_norm), params)

    params = _params(shapes, dtype, device)
    bucketed = torch.optim.AdamW(params, fused=True, **rates)
    yield "flat buckets", (_after(_reduce_buckets, params, bucketed, max_norm), params)

    yield "reduce_scatter, slice, all_gather", _flat(shapes, dtype, device, rates, max_norm)

    if captured:
        return
    if max_norm is None:
        params = _params(shapes, dtype, device)
        yield "FSDP2", (_fsdp2(params), [])

    from torch.distributed.optim import ZeroRedundancyOptimizer

    params = _params(shapes, dtype, device)
    if len(params) >= dist.get_world_size():
        zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, fused=True, **RATES)
        yield "ZeroRedundancyOptimizer", (_after(_reduce_buckets, params, zero, max_norm), params)


def _arguments(rule: str, params: list[Tensor], max_norm: float | None, captured: bool) -> tuple[Any, ...]:
    """Of the op: the first update."""
    group = dist.group.WORLD
    assert group is not None
    owned = buckets_of(tuple(p.numel() for p in params), group.size()).owned(group.rank())
    betas, decay, is_lamb = (0.9, 0.999), RATES["weight_decay"], rule == "LAMB"
    terms = lamb_terms(betas, 1e-6, decay, True) if is_lamb else adam_terms(betas, 1e-8, decay, True)
    row = [numbers_at(terms, 1, RATES["lr"])]
    numbers = torch.tensor(row, dtype=torch.float64, device="cpu").expand(len(params), -1)
    if captured:
        numbers = numbers.to(params[0].device, torch.float32)
    names = [f"parameter {i}" for i in range(len(params))]
    return (
        [p.detach() for p in params], _grads(params),
        [torch.zeros(owned, device=params[0].device) for _ in range(2)], numbers,
        "lamb" if is_lamb else "adam", "avg", max_norm or 0.0, False,
        names, group.group_name, "direct", "bench",
    )  # fmt: skip


def _params(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """With gradients that differ from rank to rank."""
    weights, grads = (torch.Generator(device).manual_seed(seed) for seed in (0, 1 + dist.get_rank()))
    params = [torch.randn(s, generator=weights, device=device).to(dtype).requires_grad_() for s in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=grads, device=device).to(dtype)
    return params


def _after(
    reduce: Callable[[list[Tensor]], None], params: list[Tensor], optimizer: Any, max_norm: float | None
) -> Callable[[], object]:
    def step() -> None:
        reduce(params)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()

    return step


def _grads(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _reduce_each(params: list[Tensor]) -> None:
    works = [dist.all_reduce(g, async_op=True) for g in _grads(params)]
    for work in works:
        work.wait()
    torch._foreach_div_(_grads(params), dist.get_world_size())


def _reduce_buckets(params: list[Tensor]) -> None:
    bucket: list[Tensor] = []
    nbytes = 0
    for g in [*_grads(params), None]:
        if bucket and (g is None or nbytes + g.nbytes > BUCKET_BYTES):
            flat = torch.cat([t.view(-1) for t in bucket])
            dist.all_reduce(flat)
            flat.div_(dist.get_world_size())
            parts = flat.split([t.numel() for t in bucket])
            torch._foreach_copy_([t.view(-1) for t in bucket], list(parts))
            bucket, nbytes = [], 0
        if g is not None:
            bucket.append(g)
            nbytes += g.nbytes


def _flat(
    shapes: Shapes, dtype: torch.dtype, device: torch.device, rates: dict[str, Any], max_norm: float | None
) -> Peer:
    """Gradients and parameters are views of two flat tensors, which is what ZeRO implementations keep."""
    world, rank = dist.get_world_size(), dist.get_rank()
    made = _params(shapes, dtype, device)
    length = -(-sum(p.numel() for p in made) // world) * world
    weights, grads = (torch.zeros(length, dtype=dtype, device=device) for _ in range(2))
    params, at = [], 0
    for p in made:
        params.append(weights[at : at + p.numel()].view(p.shape).copy_(p.detach()))
        grads[at : at + p.numel()].view(p.shape).copy_(p.grad)  # type: ignore[arg-type]
        at += p.numel()
    mine = weights.view(world, -1)[rank].detach().requires_grad_()
    optimizer = torch.optim.AdamW([mine], fused=True, **rates)

    def step() -> None:
        mine.grad = torch.empty_like(mine)
        dist.reduce_scatter_tensor(mine.grad, grads)
        mine.grad.div_(world)
        if max_norm is not None:
            squares = torch.linalg.vector_norm(mine.grad, dtype=torch.float32).square()
            dist.all_reduce(squares)
            mine.grad.mul_((max_norm / (squares.sqrt() + 1e-6)).clamp(max=1))
        optimizer.step()
        dist.all_gather_into_tensor(weights, mine.detach())

    return step, params


def _fsdp2(params: list[Tensor]) -> Callable[[], object]:
    """A step of FSDP2, which keeps the gathered parameters from the forward to the backward. The model
    computes nothing, so that the step consists of the exchanges and of AdamW."""

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, grads: list[Tensor], *given: Tensor) -> Tensor:
            ctx.grads = grads
            return given[0].new_zeros(())

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Any:
            return None, *ctx.grads

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = torch.nn.ParameterList(p.detach() for p in params)
            self.grads = _grads(params)

        def forward(self, given: Tensor) -> Tensor:  # on GPUs, FSDP2 expects an argument
            return Given.apply(self.grads, *self.all)

    model = Model()
    shard(model, (), params[0].device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **RATES)
    given = params[0].new_zeros(())

    def step() -> None:
        model(given).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def shard(model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> None:
    """Shard each layer, and the rest of the model, with FSDP2. Parameters that the forward has gathered stay
    gathered until the backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)


def _lambs(
    shapes: Shapes, dtype: torch.dtype, device: torch.device, max_norm: float | None
) -> Iterator[tuple[str, Peer]]:
    """Two peers of LAMB behind all_reduces: the update in foreach ops; and, for at most `FEW` tensors, the
    update of one tensor after another, compiled by Inductor."""
    params = _params(shapes, dtype, device)
    yield "all_reduce + foreach LAMB", (_lamb_step(_foreach_lamb, params, max_norm), params)
    if len(shapes) <= FEW:
        params = _params(shapes, dtype, device)
        torch._dynamo.reset()  # which compiles a function for a few shapes only
        compiled = torch.compile(_each_lamb, dynamic=False)
        yield "all_reduce + compiled LAMB", (_lamb_step(compiled, params, max_norm), params)


def _lamb_step(
    update: Callable[..., None], params: list[Tensor], max_norm: float | None
) -> Callable[[], object]:
    m, v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    t = torch.zeros((), device=params[0].device)

    @torch.no_grad()
    def step() -> None:
        t.add_(1)
        _reduce_buckets(params)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        update([p.detach() for p in params], _grads(params), m, v, 1 - 0.9**t, (1 - 0.999**t).sqrt())

    return step


def _foreach_lamb(
    params: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor], first: Tensor, root: Tensor
) -> None:
    torch._foreach_lerp_(m, grads, 0.1)
    torch._foreach_mul_(v, 0.999)
    torch._foreach_addcmul_(v, grads, grads, 0.001)
    divisors = torch._foreach_sqrt(v)
    torch._foreach_div_(divisors, root)
    torch._foreach_add_(divisors, 1e-6)
    u = torch._foreach_div(m, divisors)
    torch._foreach_div_(u, first)
    torch._foreach_add_(u, params, alpha=RATES["weight_decay"])
    factors = torch._foreach_div(torch._foreach_norm(params), torch._foreach_norm(u))
    torch._foreach_mul_(u, factors)
    torch._foreach_sub_(params, u, alpha=RATES["lr"])


def _each_lamb(
    params: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor], first: Tensor, root: Tensor
) -> None:
    for p, g, of_m, of_v in zip(params, grads, m, v, strict=True):
        of_m.lerp_(g, 0.1)
        of_v.mul_(0.999).addcmul_(g, g, value=0.001)
        u = of_m / first / (of_v.sqrt() / root + 1e-6) + RATES["weight_decay"] * p
        p.sub_(RATES["lr"] * p.norm() / u.norm() * u)
