"""ZeRO-1 by hand: reduce_scatter, an optimizer on this rank's slice, all_gather; compiled, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import autofuse
from tests.ranks import RankPool

from .harness import passes_only

Ranks = Callable[[int], RankPool]
State = dict[str, Any]
"""Tensors, and the numbers `rank` and `world`. Whole: p, p16, g, g16, M, V. Slices of the rank: m, v, and
parameters w, w16. Sums of g16 are exact in its dtype: nothing else is equal whatever the order."""

UPDATE = "reduce_scatter_update_all_gather"
STEPS, LR, EPS, DECAY, B1, B2 = 3, 1e-2, 1e-8, 0.1, 0.9, 0.99


def reduced(s: State, op: str = "avg", name: str = "g") -> Tensor:
    return funcol.reduce_scatter_tensor(s[name], op, 0, dist.group.WORLD)


def gathered(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD)


def adam(s: State, p: Tensor, g: Tensor) -> Tensor:
    """What the parameter becomes; moments change in place."""
    s["m"].lerp_(g, 1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    return p * (1 - LR * DECAY) - LR * (s["m"] / (s["v"].sqrt() + EPS))


def chunk(s: State, name: str = "p") -> Tensor:
    return s[name].chunk(s["world"])[s["rank"]]


def adamw(s: State) -> None:
    s["p"].copy_(gathered(adam(s, chunk(s), reduced(s))))


def in_place(s: State) -> None:
    """Slices are views that change in place, and collectives write to given tensors."""
    g, n = torch.empty_like(s["m"]), s["m"].shape[0]
    dist.reduce_scatter_tensor(g, s["g"])
    p = s["p"].narrow(0, s["rank"] * n, n)
    g.add_(p, alpha=DECAY)
    s["m"].mul_(B1).add_(g, alpha=1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    p.addcdiv_(s["m"], s["v"].sqrt().add_(EPS), value=-LR)
    dist.all_gather_into_tensor(s["p"], p)


def flat(s: State) -> None:
    g = funcol.reduce_scatter_tensor(s["g"].flatten(), "sum", 0, dist.group.WORLD)
    p = s["p"].view(-1).chunk(s["world"])[s["rank"]]
    p.sub_(g + DECAY * s["p"].view(-1).chunk(s["world"])[s["rank"]], alpha=LR)
    dist.all_gather_into_tensor(s["p"].view(-1), p)


def whole_states(s: State) -> None:
    """Of which views change in place."""
    slices = {name: chunk(s, name.upper()) for name in "mv"}
    p = chunk(s)
    p.copy_(adam(slices, p, reduced(s)))
    dist.all_gather_into_tensor(s["p"], p)


def flat_states(s: State) -> None:
    g = funcol.reduce_scatter_tensor(s["g"].flatten(), "sum", 0, dist.group.WORLD)
    m, p = (s[name].view(-1).chunk(s["world"])[s["rank"]] for name in "Mp")
    m.mul_(0.9).add_(g)
    s["p"].copy_(gathered(p - LR * m).view_as(s["p"]))


def columns(s: State) -> None:
    """The slices are columns."""
    g = funcol.reduce_scatter_tensor(s["g"], "avg", 1, dist.group.WORLD)
    p = s["p"].chunk(s["world"], 1)[s["rank"]]
    s["p"].copy_(funcol.all_gather_tensor(p - LR * g, 1, dist.group.WORLD))


def momentum(s: State) -> None:
    """The parameter itself is sliced; it is gathered for the next forward."""
    s["m"].mul_(0.9).add_(reduced(s))
    s["w"].add_(s["m"], alpha=-LR)
    s["p"].copy_(gathered(s["w"]))


def of_tensors(s: State) -> None:
    """The step and the rate are tensors."""
    s["t"].add_(1)
    g = reduced(s)
    m, v = B1 * s["m"] + (1 - B1) * g, B2 * s["v"] + (1 - B2) * g**2
    u = (m / (1 - B1 ** s["t"])) / (torch.sqrt(v / (1 - B2 ** s["t"])) + EPS)
    s["p"].copy_(gathered(chunk(s) - s["lr"] * u))
    s["m"].copy_(m)
    s["v"].copy_(v)


def narrow(s: State) -> None:
    """Gradient and parameter have 16 bits."""
    g = reduced(s, "sum", "g16").float()
    s["p16"].copy_(gathered(adam(s, chunk(s, "p16").float(), g).bfloat16()))


def narrow_slice(s: State) -> None:
    """So has the parameter that is a slice."""
    g = reduced(s, "sum", "g16").float()
    s["w16"].copy_(adam(s, s["w16"].float(), g))
    s["p16"].copy_(gathered(s["w16"]))


def master(s: State) -> None:
    g = reduced(s, "sum", "g16").float()
    s["w"].copy_(adam(s, s["w"], g))
    s["p16"].copy_(gathered(s["w"].bfloat16()))


def two(s: State) -> None:
    """All gradients are reduced before the first parameter is updated."""
    gradients = [reduced(s), reduced(s, "sum", "g16").float()]
    s["p"].copy_(gathered(adam(s, chunk(s), gradients[0])))
    s["p16"].copy_(gathered((chunk(s, "p16").float() - LR * gradients[1]).bfloat16()))


_FUSED = (
    whole_states,
    flat_states,
    adamw,
    in_place,
    flat,
    columns,
    momentum,
    of_tensors,
    narrow,
    narrow_slice,
    master,
    two,
)
FUSED = {f.__name__: f for f in _FUSED}


def not_gathered(s: State) -> None:
    s["w"].copy_(adam(s, s["w"], reduced(s)))


def sum_is_read(s: State) -> Tensor:
    g = reduced(s)
    s["p"].copy_(gathered(adam(s, chunk(s), g)))
    return g.square().sum()


def slice_is_read(s: State) -> Tensor:
    new = adam(s, chunk(s), reduced(s))
    s["p"].copy_(gathered(new))
    return new.sum()


def gathered_twice(s: State) -> None:
    s["w"].copy_(adam(s, s["w"], reduced(s)))
    s["p"].copy_(gathered(s["w"]))
    s["p16"].copy_(gathered(s["w"].bfloat16()))


def of_two_parameters(s: State) -> None:
    s["p"].copy_(gathered(chunk(s) + s["w"] - LR * reduced(s)))


def clipped(s: State) -> None:
    """By the norm over the slices of all ranks."""
    g = reduced(s)
    norm = funcol.all_reduce(g.square().sum(), "sum", dist.group.WORLD).sqrt()
    g = g * torch.clamp(0.1 / (norm + 1e-6), max=1.0)
    s["p"].copy_(gathered(adam(s, chunk(s), g)))


def another_slice(s: State) -> None:
    """Two states of one tensor."""
    m, v = s["M"].chunk(s["world"])
    m.mul_(0.9).add_(reduced(s))
    new = chunk(s) - LR * m
    v.add_(m)
    s["p"].copy_(gathered(new))


def state_is_gathered(s: State) -> None:
    s["m"].mul_(0.9).add_(reduced(s))
    s["w"].add_(s["m"], alpha=-LR)
    s["p"].copy_(gathered(s["m"]))


def cubed(s: State) -> None:
    g = reduced(s)
    s["p"].copy_(gathered(chunk(s) - LR * g * g * g))


KEPT = {
    not_gathered: ("unsupported_variant", "not gathered in this graph"),
    sum_is_read: ("extra_users", "besides the update"),
    slice_is_read: ("extra_users", "reads the new slice"),
    gathered_twice: ("extra_users", "gathered 2 times"),
    of_two_parameters: ("unsupported_variant", "is computed from"),
    clipped: ("unsupported_variant", "is computed from what is reduced: clipping of slices"),
    another_slice: ("unsupported_variant", "is computed from"),
    state_is_gathered: ("unsupported_variant", "gathers a state"),
    cubed: ("unsupported_variant", "no update of an optimizer that is known"),
}
STEPS_BY_NAME = {f.__name__: f for f in (*_FUSED, *KEPT)}


def make(rank: int, world: int, shape: tuple[int, int]) -> State:
    torch.manual_seed(5)
    p, n = torch.randn(shape), shape[0] // world
    s: State = {"p": p, "p16": p.bfloat16(), "t": torch.tensor(1.0), "lr": torch.tensor(LR)}
    torch.manual_seed(50 + rank)
    g, m, v = torch.randn(shape), torch.randn(n, shape[1]), torch.rand(n, shape[1])
    w = p[rank * n :][:n].clone()
    s |= {"M": torch.randn(shape), "V": torch.rand(shape)}
    s |= {"g": g, "g16": (4 * g).round().bfloat16(), "m": m, "v": v, "w": w, "w16": w.bfloat16()}
    return s | {"rank": rank, "world": world}


def check(
    rank: int, world: int, name: str, shape: tuple[int, int], how: dict[str, Any]
) -> list[tuple[str, Any, str]]:
    """Compiled it leaves the tensors that eager leaves, to roundings; the sites."""
    torch._dynamo.reset()
    step = STEPS_BY_NAME[name]
    expected, found = make(rank, world, shape), make(rank, world, shape)
    call, outs = torch.compile(step, fullgraph=True, **how), []
    with autofuse.debug() as report, torch.no_grad():
        for _ in range(STEPS):
            for s, f in ((expected, step), (found, call)):
                outs.append(f(s))
            if outs[-1] is not None:
                torch.testing.assert_close(*outs[-2:])
            for key, want in expected.items():
                if isinstance(want, Tensor):
                    rtol = 2e-5 if want.dtype == torch.float32 else 2.0**-7
                    torch.testing.assert_close(found[key], want, rtol=rtol, atol=2e-6)
    return [
        (site.collective, site.pattern if site.fused else site.reason and site.reason.value, site.detail)
        for site in report.sites
    ]


GENERATED = {"backend": "autofuse", "options": {"policy": "always"}}
BOTH = [("reduce_scatter", UPDATE, ""), ("all_gather", UPDATE, "")]
TWICE = [site for site in BOTH for _ in range(2)]


@pytest.mark.parametrize("generated", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FUSED)
def test_fused(ranks: Ranks, name: str, generated: bool) -> None:
    how = GENERATED if generated else {}
    assert ranks(2).run(_run, name, (62, 66), how, timeout=200) == [BOTH if name != "two" else TWICE] * 2


@pytest.mark.parametrize(("world", "shape"), [(3, (9, 111)), (2, (1500, 1400))])
def test_sizes(ranks: Ranks, world: int, shape: tuple[int, int]) -> None:
    """Slices that end inside of a bucket, and several calls."""
    for name in ("adamw", "master"):
        assert ranks(world).run(_run, name, shape, {}, timeout=200) == [BOTH] * world


@pytest.mark.parametrize("name", [f.__name__ for f in KEPT])
def test_kept(ranks: Ranks, name: str) -> None:
    reason, detail = KEPT[STEPS_BY_NAME[name]]
    for sites in ranks(2).run(_run, name, (62, 66), {}, timeout=200):
        collective, why, text = sites[0]
        assert (collective, why) == ("reduce_scatter", reason)
        assert detail in text


def _run(
    rank: int, world: int, name: str, shape: tuple[int, int], how: dict[str, Any]
) -> list[tuple[str, Any, str]]:
    return check(rank, world, name, shape, how or {"backend": passes_only()})
