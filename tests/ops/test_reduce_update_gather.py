"""reduce_update_gather by itself, against torch's optimizers in float64: fused and with plain collectives."""

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import autofuse
from autofuse.lowering.buckets import BUCKET, buckets_of
from autofuse.lowering.cpu import update_executor
from autofuse.lowering.cpu.scratch import scratch, scratch_bytes
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.update_rules import NUMBERS, RULES, adam_terms, lamb_terms, numbers_at, sgd_terms
from autofuse.optim import traced  # noqa: F401  (defines optimizer_step)
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
OP = "reduce_update_gather"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LR, BETAS, EPS, DECAY, STEPS = 0.125, (0.9, 0.99), 1e-2, 0.25, 3
LARGEST = 4.0


@dataclass(frozen=True)
class Case:
    """`tensors`: (numel, dtype, whether it has a gradient)."""

    tensors: tuple[tuple[int, torch.dtype, bool], ...]
    optimizer: str = "adamw"
    reduce_op: str = "avg"
    max_norm: float = 0.0
    master: bool = False
    order: str = "direct"
    tile: tuple[int, int] = (update_executor.TILE, update_executor.TILES)
    fused: bool = True


class Lamb:
    """LAMB in float64, as its docstring says; `excluded` parameters have a trust of 1."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params, self.t, self.trust = params, 0, 1.0
        self.m = [torch.zeros_like(p) for p in params]
        self.v = [torch.zeros_like(p) for p in params]

    def step(self) -> None:
        self.t += 1
        for i, (p, m, v) in enumerate(zip(self.params, self.m, self.v, strict=True)):
            if p.grad is None:
                continue
            m.mul_(BETAS[0]).add_(p.grad, alpha=1 - BETAS[0])
            v.mul_(BETAS[1]).add_(p.grad**2, alpha=1 - BETAS[1])
            u = m / (1 - BETAS[0] ** self.t) / ((v / (1 - BETAS[1] ** self.t)).sqrt() + EPS)
            u += DECAY * p.detach()
            of_p, of_u = p.detach().norm(), u.norm()
            trust = float(of_p / of_u) if of_p > 0 and of_u > 0 and adapts(i) else 1.0
            self.trust = max(self.trust, trust)
            p.detach().sub_(u, alpha=LR * trust)


def adapts(tensor: int) -> bool:
    return tensor % 3 != 1


def exact_optimizer(name: str, params: list[Tensor]) -> torch.optim.Optimizer | Lamb:
    moments = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    sgd = {"lr": LR, "weight_decay": DECAY}
    if name == "lamb":
        return Lamb(params)
    makers = {
        "adamw": lambda: torch.optim.AdamW(params, **moments),
        "adam": lambda: torch.optim.Adam(params, **moments),
        "amsgrad": lambda: torch.optim.AdamW(params, **moments, amsgrad=True, maximize=True),
        "sgd": lambda: torch.optim.SGD(params, **sgd),
        "momentum": lambda: torch.optim.SGD(params, **sgd, momentum=0.75, dampening=0.5),
        "nesterov": lambda: torch.optim.SGD(params, **sgd, momentum=0.75, nesterov=True),
    }
    return makers[name]()


def row(name: str, t: int, tensor: int) -> tuple[str, list[float]]:
    """The rule and the numbers of a tensor."""
    if name == "lamb":
        return "lamb", numbers_at(lamb_terms(BETAS, EPS, DECAY, adapts(tensor)), t, LR)
    if name in ("adamw", "adam", "amsgrad"):
        rule, negated = ("amsgrad", True) if name == "amsgrad" else ("adam", False)
        return rule, numbers_at(adam_terms(BETAS, EPS, DECAY, name != "adam", negated), t, LR)
    momentum, dampening = {"sgd": (0.0, 0.0), "momentum": (0.75, 0.5), "nesterov": (0.75, 0.0)}[name]
    rule = "sgd" if name == "sgd" else "momentum"
    return rule, numbers_at(sgd_terms(momentum, dampening, DECAY, name == "nesterov"), t, LR)


def gradients(case: Case, rank: int, step: int) -> list[Tensor | None]:
    """Multiples of 1/4, so that sums are exact."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [
        (torch.randint(-8, 9, (n,), generator=generator) / 4).to(dtype) if has else None
        for n, dtype, has in case.tensors
    ]


def _run(rank: int, world: int, case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    # The parts of ranks have different norms.
    params = [
        (torch.randn(n, generator=generator) * torch.linspace(0.1, 4, n)).to(dtype)
        for n, dtype, _ in case.tensors
    ]
    exact = [p.double().requires_grad_() for p in params]
    optimizer = exact_optimizer(case.optimizer, exact)
    rule = row(case.optimizer, 1, 0)[0]
    owned = buckets_of(tuple(n for n, *_ in case.tensors), world)
    states = [torch.zeros(owned.owned(rank)) for _ in RULES[rule].states]
    if case.master:
        whole = torch.cat([torch.zeros(0), *(p.float() for p in params)])
        states.append(whole[owned.starts[rank] : owned.starts[rank + 1]].clone())
    op = FUSED_OPS[OP]
    run = getattr(torch.ops.autofuse, OP) if case.fused else lambda *given: op.reference(op.parse(given))
    sizes = {"TILE": case.tile[0], "TILES": case.tile[1]}
    for cached in (update_executor.part_of, update_executor.piece_shapes):
        cached.cache_clear()
    with patch.multiple(update_executor, **sizes):
        for t in range(1, STEPS + 1):
            with scratch(workspace_for(dist.group.WORLD.group_name), 1) as kept:
                kept.fill_(torch.nan)
            versions = [p._version for p in params]
            rows = [row(case.optimizer, t, i)[1] for i in range(len(params))]
            norm = run(
                params, gradients(case, rank, t), states, torch.tensor(rows, dtype=torch.float64), rule,
                case.reduce_op, case.max_norm, False, [f"p{i}" for i in range(len(params))],
                dist.group.WORLD.group_name, case.order, "test",
            )  # fmt: skip
            check(case, world, t, params, exact, optimizer, norm)
            assert [p._version > v for p, v in zip(params, versions, strict=True)] == [
                has for *_, has in case.tensors
            ]
    for cached in (update_executor.part_of, update_executor.piece_shapes):
        cached.cache_clear()
    return params


def check(
    case: Case,
    world: int,
    t: int,
    params: list[Tensor],
    exact: list[Tensor],
    optimizer: torch.optim.Optimizer | Lamb,
    norm: Tensor,
) -> None:
    """The parameters after a step, which then goes on from what was rounded."""
    of_ranks = [gradients(case, r, t) for r in range(world)]
    scale = 1 / world if case.reduce_op == "avg" else 1.0
    for i, p in enumerate(exact):
        given = [g[i] for g in of_ranks]
        p.grad = None if given[0] is None else scale * sum(g.double() for g in given)
    total = torch.stack(
        [torch.zeros((), dtype=torch.float64)] + [p.grad.norm() for p in exact if p.grad is not None]
    )
    if case.max_norm:
        torch.testing.assert_close(norm.double(), total.norm(), rtol=1e-6, atol=0)
        for p in exact:
            if p.grad is not None:
                p.grad *= min(1.0, case.max_norm / (float(total.norm()) + 1e-6))
    optimizer.step()
    # An error of the gradient, whose terms are at most LARGEST, is an error of lr / eps times that.
    small = 16 * t * torch.finfo(torch.float32).eps * (1 + LARGEST * world / EPS)
    for i, (p, want) in enumerate(zip(params, exact, strict=True)):
        rounding = torch.finfo(p.dtype).eps * want.detach().abs() + torch.finfo(p.dtype).smallest_normal
        error = (p.double() - want.detach()).abs()
        trust = optimizer.trust if isinstance(optimizer, Lamb) else 1.0
        assert bool((error <= rounding + LR * small * trust).all()), (i, t, float(error.max()), case)
        if not case.master:
            want.detach().copy_(p)


OPTIMIZERS = ("adamw", "adam", "amsgrad", "sgd", "momentum", "nesterov", "lamb")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    uniform = draw(st.sampled_from((*DTYPES, None)))
    dtypes = st.sampled_from(DTYPES) if uniform is None else st.just(uniform)
    size = st.sampled_from((0, 1, 5, 63, BUCKET - 1, BUCKET, BUCKET + 1, 3 * BUCKET + 7))
    has = st.sampled_from((True, True, True, False))
    return Case(
        tensors=tuple(draw(st.lists(st.tuples(size, dtypes, has), min_size=1, max_size=8))),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        reduce_op=draw(st.sampled_from(("sum", "avg"))),
        max_norm=draw(st.sampled_from((0.0, 0.0, 2.0, 1e9))),
        master=draw(st.booleans()),
        order=draw(st.sampled_from(("direct", "oblivious"))),
        tile=draw(st.sampled_from(((96, 2), (1000, 3), (1 << 15, 16)))),
        fused=draw(st.sampled_from((True, True, False))),
    )


@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases(), world=st.sampled_from((2, 2, 3, 4)))
def test_exact(ranks: Ranks, case: Case, world: int) -> None:
    found = ranks(world).run(_run, case)
    for params in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(params, found[0], strict=True)), case


def _disagree(rank: int, world: int, fused: bool) -> None:
    op = FUSED_OPS[OP]
    run = getattr(torch.ops.autofuse, OP) if fused else lambda *given: op.reference(op.parse(given))
    names = ["first", "second"]
    params = [torch.ones(4, 3), torch.ones(2000)]
    owned = buckets_of((12, 2000), world).owned(rank)
    lr = torch.tensor([numbers_at(sgd_terms(0.5, 0, 0, False), 1, LR)] * 2, dtype=torch.float64)
    whole = [torch.ones(4, 3), torch.ones(2000)]
    mine = rank == world - 1
    for grads, numbers, finite, says in (
        (
            [whole[0], None if mine else whole[1]],
            lr,
            False,
            rf"second has no gradient on ranks \[{world - 1}\]",
        ),
        ([whole[0].t() if mine else whole[0], whole[1]], lr, False, "first has a gradient that is"),
        ([whole[0], whole[1].half() if mine else whole[1]], lr, False, "dtypes of gradients"),
        (whole, 2 * lr if mine else lr, False, "other rates"),
        ([whole[0], whole[1] / (0 if mine else 1)], lr, True, "norm of all gradients is inf"),
    ):
        state = torch.zeros(owned)
        with pytest.raises((ValueError, RuntimeError), match=says):
            run(params, grads, [state], numbers, "momentum", "sum", 0.0, finite, names,
                dist.group.WORLD.group_name, "direct", "test")  # fmt: skip
        assert all(bool((p == 1).all()) for p in params)
        assert not state.any()
    # The group stays usable.
    run(params, whole, [state], lr, "momentum", "sum", 0.0, False, names, dist.group.WORLD.group_name,
        "direct", "test")  # fmt: skip
    assert all(bool((p == 1 - LR * world).all()) for p in params)


def _keeps_sums(rank: int, world: int) -> None:
    group = dist.new_group(list(range(world))).group_name
    params, grads = [torch.ones(3000)], [torch.ones(3000)]
    owned = buckets_of((3000,), world).owned(rank)
    numbers = torch.tensor([numbers_at(sgd_terms(0, 0, 0, False), 1, LR)], dtype=torch.float64)
    for max_norm, kept in ((0.0, 0), (1.0, 4 * owned), (1.0, 4 * owned)):
        torch.ops.autofuse.reduce_update_gather(
            params, grads, [], numbers, "sgd", "sum", max_norm, False, ["p"], group, "direct", "test"
        )
        assert scratch_bytes(workspace_for(group)) == kept
    assert "steps of optimizers that clip" in autofuse.memory_summary(group)


def test_a_step_that_clips_keeps_its_memory(ranks: Ranks) -> None:
    ranks(2).run(_keeps_sums)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "reference"])
def test_nothing_is_written_where_ranks_disagree(ranks: Ranks, fused: bool) -> None:
    ranks(3).run(_disagree, fused)


def _refused(rank: int, world: int) -> None:
    params = [torch.ones(4)]
    numbers = torch.zeros(1, NUMBERS)
    owned = torch.zeros(buckets_of((4,), world).owned(rank))
    for states, rule, order, says in (
        ([], "momentum", "direct", "0 states; momentum has 1"),
        ([owned.double()], "momentum", "direct", "a state is torch.float64"),
        ([torch.zeros(7)], "momentum", "direct", r"a state is torch.float32 \[7\]"),
        ([], "sgd", "ring", "use order='direct'"),
    ):
        with pytest.raises(ValueError, match=says):
            torch.ops.autofuse.reduce_update_gather(
                params, params, states, numbers, rule, "sum", 0.0, False, ["p"], dist.group.WORLD.group_name,
                order, "test",
            )  # fmt: skip


def test_refused(ranks: Ranks) -> None:
    ranks(2).run(_refused)


def test_norm_where_the_parameters_are() -> None:
    """No host waits for it, and graphs know where it is."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        p = torch.empty(3, device="cuda")
        numbers = torch.empty(1, NUMBERS, dtype=torch.float64, device="cpu")
        norm = torch.ops.autofuse.reduce_update_gather(
            [p], [p], [], numbers, "sgd", "sum", 1.0, False, ["p"], "group", "direct", "here"
        )
        step = torch.ops.autofuse.optimizer_step([p], [p], [], True, 0)
    assert (norm.shape, norm.device) == (step.shape, step.device) == ((), p.device)
