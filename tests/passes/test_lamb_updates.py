"""LAMB written in tensor ops behind an all_reduce: its spellings on real ranks, compiled, against float64."""

from __future__ import annotations

from collections.abc import Callable
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
Trust = Callable[[Tensor, Tensor], Tensor]

UPDATE = "all_reduce_update"
STEPS, LR, EPS, DECAY, B1, B2 = 3, 1e-2, 1e-6, 0.1, 0.9, 0.99


def direction(s: State, op: str = "avg", decay: float = DECAY) -> Tensor:
    g = funcol.all_reduce(s["g"], op, dist.group.WORLD).to(s["m"].dtype)
    s["m"].lerp_(g, 1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    return s["m"] / (s["v"].sqrt() + EPS) + decay * s["p"]


def guarded(of_p: Tensor, of_u: Tensor) -> Tensor:
    return torch.where(of_p > 0, torch.where(of_u > 0, of_p / of_u, 1.0), 1.0)


def by(s: State, norm: Callable[[Tensor], Tensor] = Tensor.norm, trust: Trust = guarded) -> None:
    u = direction(s)
    s["p"].sub_(LR * trust(norm(s["p"]), norm(u)) * u)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": Tensor.norm,
    "vector_norm": torch.linalg.vector_norm,
    "linalg_norm": torch.linalg.norm,
    "wide": lambda x: torch.linalg.vector_norm(x, dtype=torch.float64).to(x.dtype),
    "flat": lambda x: x.view(-1).norm(),
    "product": lambda x: (x * x).sum().sqrt(),
    "pow": lambda x: x.pow(2).sum().sqrt(),
    "power": lambda x: (x**2).sum() ** 0.5,
    "square": lambda x: x.square().sum().sqrt(),
    "foreach": lambda x: torch._foreach_norm([x])[0],
    "dot": lambda x: torch.dot(x.view(-1), x.view(-1)).sqrt(),
}

TRUSTS: dict[str, Trust] = {
    "no guard": lambda of_p, of_u: of_p / of_u,
    "both": lambda of_p, of_u: torch.where((of_p > 0) & (of_u > 0), of_p / of_u, 1.0),
    "product of norms": lambda of_p, of_u: torch.where(of_p * of_u != 0, of_p / of_u, 1.0),
    "either": lambda of_p, of_u: torch.where(
        (of_p == 0) | (of_u == 0), torch.ones_like(of_p), of_p.clamp(0, 10) / of_u
    ),
    "limited": lambda of_p, of_u: of_p.clamp(max=10) / of_u,
    "limited before": lambda of_p, of_u: guarded(of_p.clamp(0, 10), of_u),
}


def bias_corrected(s: State) -> None:
    """By numbers, in place; the mean is a sum that is divided."""
    g = funcol.all_reduce(s["g"], "sum", dist.group.WORLD) / dist.get_world_size()
    s["m"].mul_(B1).add_(g, alpha=1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    u = (s["m"] / 0.19).div_((s["v"] / 0.0199).sqrt_().add_(EPS))
    u.add_(s["p"], alpha=DECAY)
    s["p"].add_(u * guarded(s["p"].norm(), u.norm()), alpha=-LR)


def of_tensors(s: State) -> None:
    """The step and the rate are tensors, and the update is written out."""
    s["t"].add_(1)
    g = funcol.all_reduce(s["g"], "avg", dist.group.WORLD)
    m, v = B1 * s["m"] + (1 - B1) * g, B2 * s["v"] + (1 - B2) * g**2
    u = (m / (1 - B1 ** s["t"])) / (torch.sqrt(v / (1 - B2 ** s["t"])) + EPS) + DECAY * s["p"]
    ratio = guarded(s["p"].norm(), u.norm())
    s["p"].copy_(s["p"] - s["lr"] * ratio * u)
    s["m"].copy_(m)
    s["v"].copy_(v)


def no_decay(s: State) -> None:
    u = direction(s, decay=0.0)
    s["p"].sub_(LR * guarded(s["p"].norm(), u.norm()) * u)


def terms_apart(s: State) -> None:
    """Both terms of the direction are scaled by themselves."""
    g = funcol.all_reduce(s["g"], "avg", dist.group.WORLD)
    s["m"].lerp_(g, 1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    q = s["m"] / (s["v"].sqrt() + EPS)
    ratio = LR * guarded(s["p"].norm(), (q + DECAY * s["p"]).norm())
    s["p"].copy_(s["p"] * (1 - ratio * DECAY) - ratio * q)


def ratio_is_read(s: State) -> Tensor:
    u = direction(s)
    ratio = guarded(s["p"].norm(), u.norm())
    s["p"].sub_(LR * ratio * u)
    return ratio


def narrow(s: State) -> None:
    """Gradient and parameter have 16 bits, the states 32."""
    p = s["p"].to(s["m"].dtype)
    u = direction({**s, "p": p}, "sum")
    s["p"].copy_(p - LR * guarded(p.norm(), u.norm()) * u)


FUSED: dict[str, Callable[[State], Any]] = {
    **{name: partial(by, norm=norm) for name, norm in NORMS.items()},
    **{name: partial(by, trust=trust) for name, trust in TRUSTS.items()},
    "zero": by,
    **{f.__name__: f for f in (bias_corrected, of_tensors, no_decay, terms_apart, ratio_is_read, narrow)},
}


def of_another(s: State) -> None:
    """The norm of a state."""
    u = direction(s)
    s["p"].sub_(LR * (s["m"].norm() / u.norm()) * u)


def of_old_state(s: State) -> None:
    of_v = s["v"].norm()
    u = direction(s)
    s["p"].sub_(LR * (of_v / u.norm()) * u)


def of_new(s: State) -> None:
    """The norm of the parameter behind a decay."""
    u = direction(s, decay=0.0)
    p = s["p"] * (1 - LR * DECAY)
    s["p"].copy_(p - LR * (p.norm() / u.norm()) * u)


def of_part(s: State) -> None:
    """The norm of the direction without its decay."""
    g = funcol.all_reduce(s["g"], "avg", dist.group.WORLD)
    s["m"].lerp_(g, 1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    q = s["m"] / (s["v"].sqrt() + EPS)
    s["p"].sub_(LR * (s["p"].norm() / q.norm()) * (q + DECAY * s["p"]))


def of_rows(s: State) -> None:
    u = direction(s)
    s["p"].sub_(LR * (s["p"].norm(dim=1, keepdim=True) / u.norm(dim=1, keepdim=True)) * u)


_SCALED = "by which the update is scaled, is computed from what is reduced"
KEPT: dict[str, tuple[Callable[[State], Any], str]] = {
    "limited ratio": (
        partial(by, trust=lambda of_p, of_u: (of_p / of_u).clamp(max=1.0)),
        "a trust ratio of 0.01*Min(1.0, |p|/|u|)",
    ),
    "eps": (
        partial(by, trust=lambda of_p, of_u: of_p / (of_u + EPS)),
        "a trust ratio of 0.01*|p|/(|u| + 1.0e-6)",
    ),
    "half a guard": (
        partial(by, trust=lambda of_p, of_u: torch.where(of_u > 0, of_p / of_u, 1.0)),
        "a trust ratio of 0.01*|p|/|u| that is [0",
    ),
    "squares": (partial(by, norm=lambda x: x.square().sum()), "a trust ratio of 0.01*|p|**2/|u|**2"),
    "sum of absolute values": (partial(by, norm=lambda x: x.norm(1)), _SCALED),
    "rounded": (partial(by, norm=lambda x: x.norm().bfloat16().float()), _SCALED),
    "of_another": (of_another, _SCALED),
    "of_old_state": (of_old_state, "the norm of another tensor than the parameter"),
    "of_new": (of_new, _SCALED),
    "of_part": (of_part, "a decay that is in no norm"),
    "of_rows": (of_rows, "no update of an optimizer that is known"),
}
STEP_OF = FUSED | {name: step for name, (step, _) in KEPT.items()}


def make(rank: int, name: str, shape: tuple[int, ...]) -> State:
    dtype = torch.bfloat16 if name == "narrow" else torch.float32
    torch.manual_seed(5)
    s = {
        "p": torch.randn(shape).to(dtype) * (name != "zero"),
        "m": torch.randn(shape),
        "v": torch.rand(shape),
    }
    s |= {"t": torch.tensor(1.0), "lr": torch.tensor(LR)}
    torch.manual_seed(50 + rank)
    return s | {"g": (torch.randint(-8, 9, shape) / 4).to(dtype)}  # sums are exact


def check(
    rank: int, world: int, name: str, shape: tuple[int, ...], how: dict[str, Any]
) -> list[tuple[Any, str]]:
    """Compiled, tensors are those of float64 to roundings, and equal on all ranks; the sites."""
    torch._dynamo.reset()
    step, found = STEP_OF[name], make(rank, name, shape)
    call = torch.compile(step, fullgraph=True, **(how or {"backend": passes_only()}))
    with autofuse.debug() as report, torch.no_grad():
        for _ in range(STEPS):
            exact = {key: x.double() for key, x in found.items()}
            wanted, got = step(exact), call(found)
            if got is not None:
                torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=0)
            for key, want in exact.items():
                eps = torch.finfo(found[key].dtype).eps
                torch.testing.assert_close(
                    found[key].double(), want, rtol=0, atol=2 * eps * float(want.abs().max())
                )
    for key in "pmv":
        assert_same_bits(found[key])
    return became(report)


@pytest.mark.parametrize("name", FUSED)
def test_fused(ranks: Ranks, name: str) -> None:
    assert ranks(2).run(check, name, (31, 65), {}, timeout=200) == [[(UPDATE, "")]] * 2


@pytest.mark.full
@pytest.mark.parametrize("name", ["of_tensors", "limited before", "narrow", "ratio_is_read"])
def test_generated(ranks: Ranks, name: str) -> None:
    how = {"backend": "autofuse", "options": {"policy": "always"}}
    assert ranks(2).run(check, name, (31, 65), how, timeout=200) == [[(UPDATE, "")]] * 2


@pytest.mark.parametrize(("world", "shape"), [(3, (5, 1111)), (2, (1500, 1400))])
def test_sizes(ranks: Ranks, world: int, shape: tuple[int, int]) -> None:
    """Several tiles, and several calls."""
    assert ranks(world).run(check, "norm", shape, {}, timeout=200) == [[(UPDATE, "")]] * world


@pytest.mark.parametrize("name", KEPT)
def test_kept(ranks: Ranks, name: str) -> None:
    for sites in ranks(2).run(check, name, (31, 65), {}, timeout=200):
        ((reason, detail),) = sites
        assert reason == "unsupported_variant"
        assert KEPT[name][1] in detail, detail


@pytest.mark.parametrize("on_gpus", [False, True])
def test_kept_on_gpus(on_gpus: bool) -> None:
    def step(g: Tensor, m: Tensor, v: Tensor, p: Tensor) -> None:
        g = funcol.all_reduce(g, "avg", "0")
        new_m, new_v = torch.lerp(m, g, 1 - B1), B2 * v + (1 - B2) * g * g
        u = new_m / (new_v.sqrt() + EPS) + DECAY * p
        new_p = p - LR * ((p * p).sum().sqrt() / (u * u).sum().sqrt()) * u
        for old, new in ((m, new_m), (v, new_v), (p, new_p)):
            old.copy_(new)

    with fake_group(2), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        graph = make_fx(step)(*(torch.empty(8, 9) for _ in range(4))).graph
        (site,) = fuse(moved(graph) if on_gpus else graph, Settings(policy="always"), "inference", "0").sites
    assert site.reason is (Reason.NO_KERNEL_FOR_DEVICE if on_gpus else None), site.detail
    assert site.fused is not on_gpus
