"""Clipping by the norm of all gradients, written in tensor ops behind all_reduces, and the updates: on real
ranks, compiled, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import autofuse
from autofuse.lowering.gpu import support
from autofuse.passes import Settings, fuse
from autofuse.passes.reasons import Reason
from tests.ranks import RankPool

from .harness import assert_same_bits, became, fake_group, passes_only
from .test_on_gpus import moved

Ranks = Callable[[int], RankPool]
State = dict[str, Tensor]
Gradients = Sequence[Tensor]
Factor = Callable[[Tensor], Tensor]

UPDATE = "all_reduce_update"
STEPS, LR, EPS, DECAY, B1, B2, MOST = 3, 1e-2, 1e-3, 0.1, 0.9, 0.99, 3.0
SHAPES = ((31, 65), (7,), (40, 30))


def reduced(s: State, op: str = "avg", names: str = "012") -> list[Tensor]:
    return [funcol.all_reduce(s[f"g{i}"], op, dist.group.WORLD).to(s["m0"].dtype) for i in names]


def sgd(s: State, gradients: Gradients) -> None:
    for i, g in enumerate(gradients):
        s[f"p{i}"].sub_(LR * g)


def momentum(s: State, gradients: Gradients) -> None:
    for i, g in enumerate(gradients):
        g = g + DECAY * s[f"p{i}"]
        s[f"m{i}"].mul_(0.9).add_(g)
        s[f"p{i}"].sub_(LR * s[f"m{i}"])


def adamw(s: State, gradients: Gradients) -> None:
    """Vectors have no decay."""
    for i, g in enumerate(gradients):
        p, m, v = (s[f"{name}{i}"] for name in "pmv")
        if p.dim() > 1:
            p.mul_(1 - LR * DECAY)
        m.lerp_(g, 1 - B1)
        v.mul_(B2).addcmul_(g, g, value=1 - B2)
        p.addcdiv_(m, v.sqrt().add_(EPS), value=-LR)


def adam(s: State, gradients: Gradients) -> None:
    """The decay is added to what is clipped, and rate and step are tensors."""
    s["t"].add_(1)
    for i, g in enumerate(gradients):
        g = g + DECAY * s[f"p{i}"]
        m, v = B1 * s[f"m{i}"] + (1 - B1) * g, B2 * s[f"v{i}"] + (1 - B2) * g * g
        u = (m / (1 - B1 ** s["t"])) / (torch.sqrt(v / (1 - B2 ** s["t"])) + EPS)
        s[f"p{i}"].copy_(s[f"p{i}"] - s["lr"] * u)
        s[f"m{i}"].copy_(m)
        s[f"v{i}"].copy_(v)


def lamb(s: State, gradients: Gradients) -> None:
    for i, g in enumerate(gradients):
        p, m, v = (s[f"{name}{i}"] for name in "pmv")
        m.lerp_(g, 1 - B1)
        v.mul_(B2).addcmul_(g, g, value=1 - B2)
        u = m / (v.sqrt() + EPS) + DECAY * p
        p.sub_(LR * (p.norm() / u.norm()) * u)


def stacked(gradients: Gradients) -> Tensor:
    return torch.stack([g.norm() for g in gradients]).norm()


def clamped(norm: Tensor) -> Tensor:
    return torch.clamp(MOST / (norm + 1e-6), max=1.0)


def clip(
    s: State,
    norm: Callable[[Gradients], Tensor] = stacked,
    factor: Factor = clamped,
    update: Callable[[State, Gradients], None] = sgd,
    op: str = "avg",
) -> None:
    gradients = reduced(s, op)
    by = factor(norm(gradients))
    update(s, [g * by for g in gradients])


NORMS: dict[str, Callable[[Gradients], Tensor]] = {
    "vector norms": lambda gs: torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g) for g in gs])
    ),
    "sum of squares": lambda gs: sum((g.pow(2).sum() for g in gs), torch.zeros(())).sqrt().to(gs[0].dtype),
    "sum of norms": lambda gs: sum(g.norm() ** 2 for g in gs) ** 0.5,  # type: ignore[return-value]
    "stack of squares": lambda gs: torch.stack([(g * g).sum() for g in gs]).sum().sqrt(),
    "foreach": lambda gs: torch.stack(list(torch._foreach_norm(list(gs)))).norm(),
    "get_total_norm": lambda gs: torch.nn.utils.get_total_norm(list(gs)),
    "joined": lambda gs: torch.cat([g.reshape(-1) for g in gs]).norm(),
    "wide": lambda gs: torch.stack([g.double().square().sum() for g in gs]).sum().sqrt().to(gs[0].dtype),
}

FACTORS: dict[str, Factor] = {
    "loose": lambda norm: torch.clamp(1e6 / (norm + 1e-6), max=1.0),
    "minimum": lambda norm: torch.minimum(torch.ones_like(norm), MOST / norm),
    "maximum": lambda norm: MOST / torch.maximum(norm, torch.full_like(norm, MOST)),
    "clamped norm": lambda norm: MOST / norm.clamp(min=MOST),
    "normalized": lambda norm: 1 / (norm + EPS),
    "doubled": lambda norm: clamped(norm) * 2,
}

UPDATES: dict[str, Callable[[State, Gradients], None]] = {
    f.__name__: f for f in (momentum, adamw, adam, lamb)
}


def divided(s: State) -> None:
    """The mean is a sum that is divided, then unscaled by a tensor, before the norm."""
    gradients = [g / dist.get_world_size() * s["scale"] for g in reduced(s, "sum")]
    by = clamped(stacked(gradients))
    adamw(s, [g * by for g in gradients])


def by_tensor(s: State) -> None:
    """The largest norm is a tensor."""
    gradients = reduced(s)
    by = torch.clamp(s["most"] / (stacked(gradients) + 1e-6), max=1.0)
    sgd(s, [g * by for g in gradients])


def of_one(s: State) -> None:
    (g,) = reduced(s, "sum", "0")
    sgd(s, [g * clamped(g.norm())])


def two_groups(s: State) -> None:
    first, *others = reduced(s)
    adamw(s, [first * clamped(first.norm()), *(g * clamped(stacked(others)) for g in others)])


def norm_is_read(s: State) -> tuple[Tensor, Tensor]:
    gradients = reduced(s)
    norm = stacked(gradients)
    by = clamped(norm)
    adamw(s, [g * by for g in gradients])
    return norm, by


def sums_are_read(s: State) -> tuple[Tensor, Tensor, Tensor]:
    gradients = reduced(s)
    by = clamped(stacked(gradients))
    scaled = [g * by for g in gradients]
    adamw(s, scaled)
    return gradients[1].abs().max(), scaled[2].sin(), s["m0"] + 1


def in_place(s: State) -> Tensor:
    """Gradients are reduced and clipped in place."""
    gradients = [s[f"g{i}"] for i in range(3)]
    for g in gradients:
        dist.all_reduce(g)
    norm = torch.nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, clamped(norm))
    adamw(s, gradients)
    return norm


def narrow(s: State) -> None:
    """Gradients and parameters have 16 bits."""
    gradients = reduced(s)
    by = clamped(stacked(gradients))
    for i, g in enumerate(gradients):
        s[f"m{i}"].mul_(0.9).add_(g * by)
        s[f"p{i}"].copy_(s[f"p{i}"].to(g.dtype) - LR * s[f"m{i}"])


def buffer(s: State, names: str = "012", *more: Tensor) -> Tensor:
    """Gradients of several tensors, reduced as one."""
    given = torch.cat([*(s[f"g{i}"].reshape(-1) for i in names), *more])
    return funcol.all_reduce(given, "avg", dist.group.WORLD)


def views(s: State, flat: Tensor, names: str = "012") -> list[Tensor]:
    sizes = [s[f"p{i}"].numel() for i in names]
    parts = flat[: sum(sizes)].split(sizes)
    return [x.view_as(s[f"p{i}"]) for i, x in zip(names, parts, strict=True)]


def flat(s: State) -> None:
    """There is more in the buffer than is read of it."""
    adamw(s, views(s, buffer(s, "012", s["scale"].expand(5))))


def flat_in_place(s: State) -> None:
    """The buffer is a tensor of the program, and its parts are cut out by their places."""
    dist.all_reduce(s["flat"])
    at = 0
    for i in range(3):
        n = s[f"p{i}"].numel()
        s[f"p{i}"].sub_(LR * s["flat"][at : at + n].view_as(s[f"p{i}"]))
        at += n


def flat_clipped(s: State) -> Tensor:
    whole = buffer(s)
    norm = whole.norm()
    by = clamped(norm)
    adamw(s, [g * by for g in views(s, whole)])
    return norm


def flat_scaled(s: State) -> None:
    """The buffer is scaled before it is cut."""
    whole = buffer(s)
    sgd(s, views(s, whole * clamped(whole.norm())))


def flat_averaged(s: State) -> Tensor:
    """It is a sum that is divided, and read before it is scaled and cut."""
    whole = buffer(s) * 2 / dist.get_world_size()
    norm = whole.norm()
    adamw(s, views(s, whole * clamped(norm)))
    return norm


def flat_squared(s: State) -> None:
    whole = buffer(s)
    sgd(s, views(s, whole * whole))


def flat_by_parts(s: State) -> None:
    gradients = views(s, buffer(s))
    by = clamped(stacked(gradients))
    lamb(s, [g * by for g in gradients])


def flat_is_read(s: State) -> tuple[Tensor, Tensor]:
    whole = buffer(s)
    gradients = views(s, whole)
    by = clamped(stacked(gradients))
    adamw(s, [g * by for g in gradients])
    return whole.abs().max(), gradients[1].sin()


def two_buffers(s: State) -> None:
    """One has all of one tensor."""
    gradients = [*views(s, buffer(s, "01"), "01"), *views(s, buffer(s, "2"), "2")]
    by = clamped(stacked(gradients))
    adamw(s, [g * by for g in gradients])


FUSED: dict[str, Callable[[State], Any]] = {
    **{name: partial(clip, norm=norm) for name, norm in NORMS.items()},
    **{name: partial(clip, factor=factor) for name, factor in FACTORS.items()},
    **{name: partial(clip, update=update) for name, update in UPDATES.items()},
    "many": partial(clip, update=adamw),
    **{
        f.__name__: f
        for f in (
            divided,
            by_tensor,
            of_one,
            two_groups,
            norm_is_read,
            sums_are_read,
            in_place,
            narrow,
            flat,
            flat_in_place,
            flat_clipped,
            flat_scaled,
            flat_averaged,
            flat_by_parts,
            flat_is_read,
            two_buffers,
        )
    },
}
SITES = {"of_one": 1, "two_buffers": 2}


def mixed(s: State) -> None:
    gradients = reduced(s)
    by = clamped(stacked(gradients))
    sgd(s, [g * by for g in gradients[:2]])
    s["m2"].mul_(0.9).add_(gradients[2] * by)
    s["p2"].sub_(LR * s["m2"])


def not_updated(s: State) -> Tensor:
    gradients = reduced(s)
    by = clamped(stacked(gradients))
    sgd(s, [g * by for g in gradients[:2]])
    return gradients[2] * by


def with_local(s: State) -> None:
    gradients = reduced(s)
    by = clamped(stacked([*gradients, s["m0"]]))
    sgd(s, [g * by for g in gradients])


def reduced_norm(s: State) -> None:
    """As over model parallel ranks."""
    gradients = reduced(s)
    square = funcol.all_reduce(stacked(gradients) ** 2, "sum", dist.group.WORLD)
    sgd(s, [g * clamped(square.sqrt()) for g in gradients])


def on_each_other(s: State) -> None:
    """A gradient is computed from another sum."""
    first = reduced(s, names="0")[0]
    second = funcol.all_reduce(s["g1"] * first[0, 0], "avg", dist.group.WORLD)
    by = clamped(stacked([first, second]))
    sgd(s, [first * by, second * by])


def flat_with_loss(s: State) -> Tensor:
    whole = buffer(s, "012", s["t"].reshape(1))
    adamw(s, views(s, whole))
    return whole[-1]


def flat_mixed(s: State) -> None:
    first, second, _ = views(s, buffer(s))
    s["p0"].sub_(LR * first)
    s["m1"].mul_(0.9).add_(second)
    s["p1"].sub_(LR * s["m1"])


def flat_overlapping(s: State) -> None:
    whole = buffer(s)
    s["p1"].sub_(LR * whole[:7])
    s["p2"].sub_(LR * whole[:1200].view(40, 30))


KEPT: dict[str, tuple[Callable[[State], Any], str]] = {
    "largest": (
        partial(clip, norm=lambda gs: torch.stack([g.abs().max() for g in gs]).max()),
        "is computed from what is reduced",
    ),
    "condition": (
        partial(clip, factor=lambda norm: torch.where(norm > MOST, MOST / norm, 1.0)),
        "is not known",
    ),
    "power": (partial(clip, factor=lambda norm: MOST / (norm**3 + EPS)), "not by one norm"),
    "shifted": (partial(clip, factor=lambda norm: MOST / (norm + 1) + 1), "a factor of"),
    "weighted": (
        partial(clip, norm=lambda gs: stacked([g * (1 + i) for i, g in enumerate(gs)])),
        "different multiples of gradients",
    ),
    "mixed": (mixed, "sgd and momentum are updates of one clipping"),
    "not_updated": (not_updated, "no tensor is updated by all_reduce_2, which is in the norm"),
    "with_local": (with_local, "a norm of more than gradients"),
    "reduced_norm": (reduced_norm, "is computed from what is reduced"),
    "on_each_other": (on_each_other, "is computed from"),
    "flat_squared": (flat_squared, "no matmul"),
    "flat_with_loss": (flat_with_loss, "updates no tensor, and is read"),
    "flat_mixed": (flat_mixed, "sgd and momentum are updates of one buffer"),
    "flat_overlapping": (flat_overlapping, "tensors are updated by the same elements"),
}
STEP_OF = FUSED | {name: step for name, (step, _) in KEPT.items()}


def make(rank: int, name: str) -> State:
    torch.manual_seed(5)
    shapes = ((1500, 400), (3,), (1, 1111)) if name == "many" else SHAPES
    dtype = torch.bfloat16 if name == "narrow" else torch.float32
    s = {
        "t": torch.tensor(1.0),
        "lr": torch.tensor(LR),
        "scale": torch.tensor(-0.5),
        "most": torch.tensor(MOST),
    }
    for i, shape in enumerate(shapes):
        s |= {f"p{i}": torch.randn(shape).to(dtype), f"m{i}": torch.randn(shape), f"v{i}": torch.rand(shape)}
    torch.manual_seed(50 + rank)
    # Sums are exact.
    s |= {f"g{i}": (torch.randint(-8, 9, shape) / 4).to(dtype) for i, shape in enumerate(shapes)}
    return s | {"flat": torch.cat([*(s[f"g{i}"].flatten() for i in range(3))])}


def check(rank: int, world: int, name: str, how: dict[str, Any]) -> list[tuple[Any, str]]:
    """Compiled, tensors and results are those of float64 to roundings, and equal on all ranks; the sites."""
    torch._dynamo.reset()
    step, found = STEP_OF[name], make(rank, name)
    call = torch.compile(step, fullgraph=True, **(how or {"backend": passes_only()}))
    with autofuse.debug() as report, torch.no_grad():
        for _ in range(STEPS):
            exact = {key: x.double() for key, x in found.items()}
            wanted, got = step(exact), call(found)
            several = isinstance(got, tuple)
            for x, want in zip(got, wanted, strict=True) if several else [(got, wanted)] * (got is not None):
                torch.testing.assert_close(x.double(), want, rtol=1e-5, atol=1e-6)
            for key, want in exact.items():
                eps = torch.finfo(found[key].dtype).eps
                torch.testing.assert_close(
                    found[key].double(), want, rtol=0, atol=3 * eps * float(want.abs().max())
                )
    for key in (key for key in found if key[0] in "pmv" and key != "most"):
        assert_same_bits(found[key])
    return became(report)


@pytest.mark.parametrize("name", FUSED)
def test_fused(ranks: Ranks, name: str) -> None:
    sites = [(UPDATE, "")] * SITES.get(name, 1 if name.startswith("flat") else 3)
    assert ranks(2).run(check, name, {}, timeout=200) == [sites] * 2


@pytest.mark.parametrize("name", ["adamw", pytest.param("in_place", marks=pytest.mark.full)])
def test_on_three_ranks(ranks: Ranks, name: str) -> None:
    assert ranks(3).run(check, name, {}, timeout=200) == [[(UPDATE, "")] * 3] * 3


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["adam", "lamb", "narrow", "sums_are_read", "in_place", "two_groups", "flat_is_read", "flat_in_place"],
)
def test_generated(ranks: Ranks, name: str) -> None:
    how = {"backend": "autofuse", "options": {"policy": "always"}}
    sites = [(UPDATE, "")] * (1 if name.startswith("flat") else 3)
    assert ranks(2).run(check, name, how, timeout=200) == [sites] * 2


@pytest.mark.parametrize("name", KEPT)
def test_kept(ranks: Ranks, name: str) -> None:
    for sites in ranks(2).run(check, name, {}, timeout=200):
        assert not any(pattern == UPDATE for pattern, _ in sites)
        assert any(KEPT[name][1] in detail for _, detail in sites), sites


@pytest.mark.parametrize("on_gpus", [False, True])
def test_kept_on_gpus(on_gpus: bool) -> None:
    def step(*given: Tensor) -> None:
        gradients = [funcol.all_reduce(g, "avg", "0") for g in given[:2]]
        by = (MOST / ((sum((g * g).sum() for g in gradients)).sqrt() + 1e-6)).clamp_max(1.0)  # type: ignore[union-attr]
        for p, g in zip(given[2:], gradients, strict=True):
            p.copy_(p - LR * (g * by))

    with fake_group(2), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        graph = make_fx(step)(*(torch.empty(8, 9) for _ in range(4))).graph
        sites = fuse(moved(graph) if on_gpus else graph, Settings(policy="always"), "inference", "0").sites
    assert [site.fused for site in sites] == [not on_gpus] * 2
    if on_gpus:
        assert sites[0].reason is Reason.NO_KERNEL_FOR_DEVICE
