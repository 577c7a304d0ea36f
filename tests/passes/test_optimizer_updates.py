"""Steps of optimizers written in tensor ops behind an all_reduce: on real ranks, compiled, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import autofuse
from autofuse.passes.choice.choose import saved_us
from autofuse.passes.matchers.match import Match
from tests.ranks import RankPool

from .harness import became, passes_only

Ranks = Callable[[int], RankPool]
State = dict[str, Tensor]

UPDATE = "all_reduce_update"
STEPS, LR, EPS, DECAY, B1, B2 = 3, 1e-2, 1e-8, 0.1, 0.9, 0.99


def reduced(s: State, op: str = "avg") -> Tensor:
    return funcol.all_reduce(s["g"], op, dist.group.WORLD)


def adamw(s: State) -> None:
    """As torch.optim has it."""
    g, m, v, t = reduced(s), s["m"], s["v"], 2.0
    s["p"].mul_(1 - LR * DECAY)
    m.lerp_(g, 1 - B1)
    v.mul_(B2).addcmul_(g, g, value=1 - B2)
    denominator = (v.sqrt() / (1 - B2**t) ** 0.5).add_(EPS)
    s["p"].addcdiv_(m, denominator, value=-LR / (1 - B1**t))


def adamw_of_tensors(s: State) -> None:
    """The step and the rate are tensors, and the update is written out."""
    s["t"].add_(1)
    g = reduced(s, "sum")
    m, v = B1 * s["m"] + (1 - B1) * g, B2 * s["v"] + (1 - B2) * g**2
    u = (m / (1 - B1 ** s["t"])) / (torch.sqrt(v / (1 - B2 ** s["t"])) + EPS)
    s["p"].copy_(s["p"] - s["lr"] * (u + DECAY * s["p"]))
    s["m"].copy_(m)
    s["v"].copy_(v)


def adam_with_decay(s: State) -> None:
    g = reduced(s) + DECAY * s["p"]
    s["m"].mul_(B1).add_(g, alpha=1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    s["p"].addcdiv_(s["m"] / 0.1, (s["v"] / 0.02).sqrt().add_(EPS), value=-LR)


def divided(s: State) -> None:
    """The mean is a sum that is divided, and the update maximizes."""
    g = DECAY * s["p"] - reduced(s, "sum") / dist.get_world_size()
    s["m"].lerp_(g, 1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    s["p"].addcdiv_(s["m"], s["v"].sqrt().add_(EPS), value=-LR)


def unscaled(s: State) -> None:
    """As behind the scaler of a loss."""
    g = reduced(s) * (1 / (s["lr"] * 300))
    s["m"].mul_(B1).add_(g, alpha=1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    s["p"].addcdiv_(s["m"], s["v"].sqrt().add_(EPS), value=-LR)


def factors_of_16_bits(s: State) -> None:
    """Tensors of 16 bits without dims, by which the gradient is multiplied one after the other."""
    s["p"].sub_(reduced(s) * s["a16"] * s["b16"])


def momentum(s: State) -> None:
    g = reduced(s).add(s["p"], alpha=DECAY)
    s["m"].mul_(0.9).add_(g)
    s["p"].add_(s["m"], alpha=-LR)


def nesterov(s: State) -> None:
    g = reduced(s)
    s["m"].mul_(0.9).add_(g, alpha=0.8)
    s["p"].add_(g + 0.9 * s["m"], alpha=-LR)


def sgd(s: State) -> None:
    s["p"].sub_(LR * reduced(s))


def in_place(s: State) -> None:
    dist.all_reduce(s["g"])
    s["p"].sub_(LR * s["g"])


def sum_is_read(s: State) -> Tensor:
    g = reduced(s)
    s["p"].sub_(LR * g)
    return g.square().sum()


def between_is_read(s: State) -> Tensor:
    g = reduced(s)
    u = LR * g
    s["p"].sub_(u)
    return u.sin() + s["p"]


def narrow(s: State) -> None:
    """Gradient and parameter have 16 bits, the states 32."""
    g, p = reduced(s).float(), s["p"].float()
    s["m"].lerp_(g, 1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    s["p"].copy_(p - LR * (s["m"] / (s["v"].sqrt() + 0.1) + DECAY * p))


def narrow_sum_is_read(s: State) -> Tensor:
    g = reduced(s)
    s["p"].sub_(LR * g.float())
    return g.square().sum()


def master(s: State) -> None:
    """The parameter of 16 bits is rounded from one of 32."""
    g = reduced(s).float()
    s["m"].lerp_(g, 1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    s["w"].addcdiv_(s["m"], s["v"].sqrt().add_(0.1), value=-LR)
    s["p"].copy_(s["w"])


def narrow_moment(s: State) -> None:
    """The rounded moment is updated by the op as a parameter would be, and what follows is left."""
    s["m16"].copy_(0.9 * s["m16"].float() + reduced(s).float())
    s["p"].copy_(s["p"].float() - LR * s["m16"].float())


def narrow_moments(s: State) -> None:
    g = reduced(s).float()
    m, v = s["m16"].float().lerp(g, 1 - B1), B2 * s["v16"].float() + (1 - B2) * g * g
    s["m16"].copy_(m)
    s["v16"].copy_(v)
    s["p"].copy_(s["p"].float() - LR * m / (v.sqrt() + 0.1))


def averaged(s: State) -> None:
    """The running average of the parameter follows it."""
    adamw(s)
    s["w"].lerp_(s["p"], 0.01)


def foreach(s: State) -> None:
    g = [reduced(s, "sum")]
    torch._foreach_div_(g, 2.0)
    torch._foreach_lerp_([s["m"]], g, 1 - B1)
    torch._foreach_mul_([s["v"]], B2)
    torch._foreach_addcmul_([s["v"]], g, g, 1 - B2)
    roots = torch._foreach_add(torch._foreach_sqrt([s["v"]]), EPS)
    torch._foreach_addcdiv_([s["p"]], [s["m"]], roots, -LR)


def clipped(s: State) -> None:
    """The factor is computed from the sum."""
    g = reduced(s)
    s["p"].sub_(g * (LR / (g.norm() + EPS)))


def clipped_gradient(s: State) -> None:
    """As torch.nn.utils.clip_grad_norm_ does."""
    g = reduced(s)
    g = g * torch.clamp(0.1 / (g.norm() + 1e-6), max=1.0)
    s["m"].lerp_(g, 1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    s["p"].addcdiv_(s["m"], s["v"].sqrt().add_(EPS), value=-LR)


_FUSED = (
    narrow,
    narrow_moment,
    narrow_sum_is_read,
    master,
    adamw,
    averaged,
    foreach,
    adamw_of_tensors,
    adam_with_decay,
    divided,
    factors_of_16_bits,
    unscaled,
    momentum,
    nesterov,
    sgd,
    in_place,
    sum_is_read,
    between_is_read,
    clipped,
    clipped_gradient,
)
FUSED = {f.__name__: f for f in _FUSED}


def cubed(s: State) -> None:
    g = reduced(s)
    s["p"].sub_(LR * g * g * g)


def no_mean(s: State) -> None:
    """The first moment keeps all that it had."""
    g = reduced(s)
    s["m"].add_(g, alpha=0.5)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    s["p"].addcdiv_(s["m"], s["v"].sqrt().add_(EPS), value=-LR)


def rooted_before(s: State) -> None:
    """The root is of the second moment as it was."""
    g = reduced(s)
    root = s["v"].sqrt().add_(EPS)
    s["m"].lerp_(g, 1 - B1)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    s["p"].addcdiv_(s["m"], root, value=-LR)


def of_two_parameters(s: State) -> None:
    g = reduced(s)
    s["p"].sub_(LR * (g + s["m"]))


def narrow_between(s: State) -> None:
    """The scaled gradient is rounded."""
    g = reduced(s) * 0.3
    s["p"].copy_(s["p"].float() - g.float())


def decayed_at_a_rate_of_zero(s: State) -> None:
    """As in a warm-up. The decay is not scaled by the rate, and would be divided by it."""
    g = reduced(s)
    s["lr"].fill_(0.0)
    s["p"].mul_(1 - DECAY)
    s["p"].sub_(s["lr"] * g)


def first_momentum(s: State) -> None:
    """The first step writes the momentum and does not read it: its memory was never written before."""
    s["m"].copy_(reduced(s) + DECAY * s["p"])
    s["p"].sub_(LR * s["m"])


def by_a_beta_of_one(s: State) -> None:
    """What the first moment keeps is a tensor, which is 1 here: the moment stays as it is."""
    g, b1 = reduced(s), s["t"]
    s["m"].copy_(b1 * s["m"] + (1 - b1) * g)
    s["v"].mul_(B2).addcmul_(g, g, value=1 - B2)
    s["p"].addcdiv_(s["m"], s["v"].sqrt().add_(EPS), value=-LR)


_KEPT = (
    by_a_beta_of_one,
    cubed,
    decayed_at_a_rate_of_zero,
    first_momentum,
    no_mean,
    rooted_before,
    of_two_parameters,
    narrow_moments,
    narrow_between,
)
KEPT = {f.__name__: f for f in _KEPT}


def make(rank: int, shape: tuple[int, ...], layout: str) -> State:
    torch.manual_seed(5)
    s = {name: torch.randn(shape) for name in "pm"}
    s["v"], s["t"], s["lr"] = torch.rand(shape), torch.tensor(1.0), torch.tensor(LR)
    s["w"] = s["p"].clone()
    s |= {"a16": torch.tensor(0.1234).bfloat16(), "b16": torch.tensor(3.1415).bfloat16()}
    if layout == "transposed":
        s |= {name: s[name].t().contiguous().t() for name in "pv"}
    if layout == "narrow":
        s |= {"w": s["p"].clone(), "p": s["p"].bfloat16(), "m16": s["m"].bfloat16(), "v16": s["v"].bfloat16()}
    if layout == "unwritten":
        s["m"].fill_(torch.nan)
    torch.manual_seed(50 + rank)
    return s | {"g": torch.randn(shape, dtype=s["p"].dtype)}


def check(
    rank: int,
    world: int,
    step: Callable[[State], Any],
    shape: tuple[int, ...],
    layout: str,
    how: dict[str, Any],
) -> list[tuple[Any, str]]:
    """Compiled it leaves the tensors that eager leaves, to roundings; the sites."""
    torch._dynamo.reset()
    expected, found = make(rank, shape, layout), make(rank, shape, layout)
    call, outs = torch.compile(step, fullgraph=True, **how), []
    with autofuse.debug() as report, torch.no_grad():
        for _ in range(STEPS):
            for s, f in ((expected, step), (found, call)):
                outs.append(f(s))
            if outs[-1] is not None:
                torch.testing.assert_close(*outs[-2:])
            for name, want in expected.items():
                rtol = 2e-5 if want.dtype == torch.float32 else 2.0**-7
                torch.testing.assert_close(found[name], want, rtol=rtol, atol=2e-6)
    return became(report)


def _how(generated: bool) -> dict[str, Any]:
    if generated:
        return {"backend": "autofuse", "options": {"policy": "always"}}
    return {"backend": passes_only()}


def layout_of(name: str) -> str:
    if name == "first_momentum":
        return "unwritten"
    return "narrow" if name.startswith(("narrow", "master")) else ""


@pytest.mark.parametrize("generated", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FUSED)
def test_fused(ranks: Ranks, name: str, generated: bool) -> None:
    for shape, layout in (
        (((7, 300), "transposed"), ((1500, 700), "")) if name == "adamw" else (((31, 65), layout_of(name)),)
    ):
        found = ranks(2).run(_run, name, shape, layout, generated, timeout=200)
        assert found == [[(UPDATE, "")]] * 2


def test_on_four_ranks(ranks: Ranks) -> None:
    assert ranks(4).run(_run, "adamw", (5, 1111), "", False, timeout=200) == [[(UPDATE, "")]] * 4


@pytest.mark.parametrize("name", KEPT)
def test_kept(ranks: Ranks, name: str) -> None:
    for sites in ranks(2).run(_run, name, (31, 65), layout_of(name), False, timeout=200):
        assert len(sites) == 1
        for reason, detail in sites:
            assert reason == "unsupported_variant"
            assert detail.startswith("no update of an optimizer that is known")


def _run(
    rank: int, world: int, name: str, shape: tuple[int, ...], layout: str, generated: bool
) -> list[tuple[Any, str]]:
    return check(rank, world, {**FUSED, **KEPT}[name], shape, layout, _how(generated))


def _product(rank: int, world: int, better: str | None) -> list[tuple[str, str]]:
    """A gradient that is a product: the sites, whose results are those of eager. better: what is said to save
    more than predicted."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    x, y, p = torch.randn(16, 300), torch.randn(16, 300), torch.zeros(300, 300)

    def step(x: Tensor, y: Tensor, p: Tensor) -> None:
        p.sub_(LR * funcol.all_reduce(x.t() @ y, "avg", dist.group.WORLD))

    def saved(anchor: Any, match: Match, *more: Any) -> float | None:
        return 1e9 if match.pattern == better else saved_us(anchor, match, *more)

    expected, found = p.clone(), p.clone()
    with autofuse.debug() as report, torch.no_grad(), patch("autofuse.passes.fuse.saved_us", saved):
        step(x, y, expected)
        torch.compile(step, fullgraph=True, backend=passes_only())(x, y, found)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
    return [(site.pattern, site.detail) for site in report.fused]


@pytest.mark.parametrize("better", [None, UPDATE])
def test_product_and_update_compete(ranks: Ranks, better: str | None) -> None:
    """The op that is predicted to save more is taken, and the report says what both would save."""
    ((pattern, detail),) = ranks(2).run(_product, better, timeout=120)[0]
    saved = dict(each.rsplit(" ", 2)[:2] for each in detail.removeprefix("predicted to save: ").split(", "))
    assert saved.keys() == {"matmul_all_reduce", UPDATE}
    assert float(saved[pattern]) == max(map(float, saved.values()))
    assert better in (None, pattern)
