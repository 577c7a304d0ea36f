"""autofuse.optim as users call it, against torch's optimizers in float64; its state; wrong use."""

import copy
import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import autofuse
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
EPS = 1e-3
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.05, "betas": (0.8, 0.95), "eps": EPS, "weight_decay": 0.1},
    "Adam": {"lr": 0.05, "eps": EPS, "weight_decay": 0.1, "amsgrad": True},
    "Adam, decoupled": {"lr": 0.05, "eps": EPS, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
}


def model(dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (7, 33, 5)) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers).to(dtype)


def batch(rank: int, step: int, width: int = 7) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(network: nn.Module, x: Tensor) -> Tensor:
    y = network(x.to(next(network.parameters()).dtype))
    return (y - 1).square().mean()


def train(rank: int, network: nn.Module, optimizer: Any, steps: range, world: int) -> list[float]:
    """`world` batches where a rank has all of them."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = torch.stack([loss_of(network, batch(r, step)) for r in range(rank, rank + world)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def groups(network: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in network.parameters() if p.dim() > 1]
    return [
        {"params": decayed},
        {"params": [p for p in network.parameters() if p.dim() < 2], "weight_decay": 0},
    ]


def _as_torch(rank: int, world: int, name: str, capturable: bool) -> None:
    """Losses and parameters over steps, with groups and a scheduler, as torch's in float64 on all batches."""
    ours, exact = model(), model(torch.float64)
    kind = name.partition(",")[0]
    given = OPTIONS[name] | ({"lr": torch.tensor(OPTIONS[name]["lr"])} if capturable else {})
    optimizer = getattr(autofuse.optim, kind)(groups(ours), **given, capturable=capturable)
    reference = getattr(torch.optim, kind)(groups(exact), **OPTIONS[name])
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, reference)]
    for step in range(6):
        # As in a captured graph: numbers stay on the device, and ranks compare nothing.
        with patch("autofuse.optim.sliced.is_captured", lambda *_, step=step: capturable and 1 < step < 4):
            train(rank, ours, optimizer, range(step, step + 1), 1)
        train(0, exact, reference, range(step, step + 1), world)
        for schedule in schedules:
            schedule.step()
        for a, b in zip(ours.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(reference.param_groups[0]["lr"])
    mine = sum(s.nbytes for b in optimizer._batches for s in b.states)
    whole = (
        sum(v.nbytes for s in reference.state.values() for k, v in s.items() if k != "step") / 2
    )  # of float64
    assert mine <= whole / world + 3 * 4 * 1024

    # torch's optimizer goes on from the whole state, and gives the same parameters as ours.
    twin = copy.deepcopy(ours)
    follower = getattr(torch.optim, kind)(groups(twin), **OPTIONS[name])
    follower.load_state_dict(optimizer.full_state_dict())
    train(rank, ours, optimizer, range(6, 7), 1)
    train(0, twin, follower, range(6, 7), world)
    for a, b in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # And ours from torch's.
    optimizer.load_state_dict(follower.state_dict())
    with torch.no_grad():
        for a, b in zip(ours.parameters(), twin.parameters(), strict=True):
            a.copy_(b)
    train(rank, ours, optimizer, range(7, 8), 1)
    train(0, twin, follower, range(7, 8), world)
    for a, b in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_as_torch(ranks: Ranks, name: str, capturable: bool) -> None:
    ranks(3).run(_as_torch, name, capturable)


def _lists(
    rank: int, world: int, sizes: list[int], half: bool, master: bool, clip: float | None
) -> list[Tensor]:
    torch.manual_seed(1)
    dtype = torch.bfloat16 if half else torch.float32
    params = [nn.Parameter(torch.randn(n).to(dtype)) for n in sizes]
    exact = [p.detach().double().requires_grad_() for p in params]
    optimizer = autofuse.optim.AdamW(params, master_weights=master, max_norm=clip, **OPTIONS["AdamW"])
    reference = torch.optim.AdamW(exact, **OPTIONS["AdamW"])
    for step in range(3):
        every = [
            [
                (torch.randint(-8, 9, (n,), generator=torch.Generator().manual_seed(9 * step + r)) / 4)
                for n in sizes
            ]
            for r in range(world)
        ]
        for i, (p, e) in enumerate(zip(params, exact, strict=True)):
            p.grad = every[rank][i].to(dtype)
            e.grad = sum(of_rank[i].double() for of_rank in every) / world
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(exact, clip)
        optimizer.step()
        reference.step()
        if clip is not None:
            assert optimizer.grad_norm is not None
            torch.testing.assert_close(optimizer.grad_norm.double(), norm, rtol=1e-6, atol=0)
        small = 1e-4 * (step + 1)
        for p, e in zip(params, exact, strict=True):
            bound = torch.finfo(dtype).eps * e.detach().abs() + small * 0.05
            assert bool(((p.detach().double() - e.detach()).abs() <= bound).all())
            if half and not master:
                e.detach().copy_(p.detach())
    return [p.detach() for p in params]


@settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.sampled_from((0, 1, 31, 1023, 1024, 1025, 4099)), min_size=1, max_size=6),
    world=st.sampled_from((2, 3, 4)),
    half=st.booleans(),
    master=st.booleans(),
    clip=st.sampled_from((None, 0.5, 100.0)),
)
def test_lists_of_sizes(
    ranks: Ranks, sizes: list[int], world: int, half: bool, master: bool, clip: float | None
) -> None:
    found = ranks(world).run(_lists, sizes, half, master, clip)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True))


def _states(rank: int, world: int, directory: str, start: bool) -> None:
    """Trains three steps and saves; in a group of another size goes on as if nothing had happened."""
    whole, local = Path(directory, "whole.pt"), Path(directory, f"local{rank}.pt")
    network = model(torch.bfloat16, (7, 130, 9))
    named = list(network.named_parameters())

    def make(params: Any) -> autofuse.optim.AdamW:
        return autofuse.optim.AdamW(params, master_weights=True, **OPTIONS["AdamW"])

    optimizer = make(named)
    if start:
        train(0, network, optimizer, range(3), 1)  # all ranks have the same batches
        torch.save(optimizer.state_dict(), local)
        dcp.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=f"{directory}/sharded")
        saved = optimizer.full_state_dict()
        if rank == 0:
            torch.save((network.state_dict(), saved), whole)
        buffer = io.BytesIO(local.read_bytes())
        again = make(named)
        again.load_state_dict(torch.load(buffer))
    else:
        weights, saved = torch.load(whole)
        network.load_state_dict(weights)
        again = make(named)
        sharded = again.sharded_state_dict()
        dcp.load({"optimizer": sharded}, checkpoint_id=f"{directory}/sharded")
        again.load_state_dict(sharded)
        optimizer.load_state_dict(saved)
        with pytest.raises(ValueError, match="group of another size"):
            make(named).load_state_dict(torch.load(local))
    for a, b in zip(optimizer._batches, again._batches, strict=True):
        assert a.steps == b.steps == [3] * 4
        assert all(torch.equal(x, y) for x, y in zip(a.states, b.states, strict=True))
    found = again.full_state_dict()["state"]
    for number, states in saved["state"].items():
        for key, value in states.items():
            assert torch.equal(found[number][key], value), key


def test_states_of_groups_of_other_sizes(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3).run(_states, str(tmp_path), True)
    ranks(2).run(_states, str(tmp_path), False)


def _loaded_while_frozen(rank: int, world: int) -> None:
    network = model()
    optimizer = autofuse.optim.AdamW(network.parameters(), **OPTIONS["AdamW"])
    train(rank, network, optimizer, range(2), 1)
    pairs = [(network, optimizer)]
    for state in (optimizer.full_state_dict(), copy.deepcopy(optimizer.state_dict())):
        twin = copy.deepcopy(network)
        twin[0].requires_grad_(False)
        pairs.append((twin, autofuse.optim.AdamW(twin.parameters(), **OPTIONS["AdamW"])))
        pairs[-1][1].load_state_dict(state)
        twin[0].requires_grad_(True)
    for pair in pairs:
        train(rank, *pair, range(2, 4), 1)
    for twin, _ in pairs[1:]:
        assert all(map(torch.equal, network.parameters(), twin.parameters()))


def test_states_of_frozen_parameters(ranks: Ranks) -> None:
    ranks(2).run(_loaded_while_frozen)


def _wrong(rank: int, world: int) -> None:
    mine = rank == world - 1

    def refused(says: str, change: Callable[[nn.Sequential], object], **options: Any) -> None:
        network = model()
        optimizer = autofuse.optim.SGD(network.named_parameters(), 0.1, **options)
        loss_of(network, batch(rank, 0)).backward()
        before = copy.deepcopy(network.state_dict())
        change(network)
        with pytest.raises((ValueError, RuntimeError), match=says):
            optimizer.step()
        assert all(torch.equal(p, before[name]) for name, p in network.state_dict().items())

    def lose(network: nn.Sequential) -> None:
        if mine:
            network[1].weight.grad = None

    def sparse(network: nn.Sequential) -> None:
        if mine:
            network[1].bias.grad = network[1].bias.grad.to_sparse()

    def overflow(network: nn.Sequential) -> None:
        if mine:
            network[0].bias.grad[0] = torch.inf

    refused(r"1.weight has no gradient on ranks \[2\]", lose)
    refused(r"1.bias has a gradient that is sparse .* on ranks \[2\]", sparse)
    refused("norm of all gradients is inf", overflow, error_if_nonfinite=True)
    network = model(sizes=(7, 33, 6 if mine else 5))
    optimizer = autofuse.optim.SGD(network.named_parameters(), 0.1)
    with pytest.raises(ValueError, match=r"rank 0 has 1.weight \[5, 33\].* rank 2 has 1.weight \[6, 33\]"):
        optimizer.step()
    twice = [{"params": [("one", network[0].weight)]}, {"params": [("two", network[0].weight)]}]
    with pytest.raises(ValueError, match="one is given twice, the second time as two"):
        autofuse.optim.SGD(twice, 0.1)
    for part in (slice(0, 3), slice(2, 4)):
        tied = [("one", network[0].bias), ("two", nn.Parameter(network[0].bias.data[part]))]
        with pytest.raises(ValueError, match="one and two share memory; make them one parameter"):
            autofuse.optim.SGD(tied, 0.1)
    with pytest.raises(ValueError, match="complex64"):
        autofuse.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], 0.1)
    sharded = parallelize_module(model(), init_device_mesh("cpu", (world,)), {"0": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"0.weight is a DTensor.* plain tensors"):
        autofuse.optim.SGD(sharded.named_parameters(), 0.1)
    with pytest.raises(TypeError, match="fused"):
        autofuse.optim.SGD(network.parameters(), 0.1, fused=True)
    optimizer = autofuse.optim.AdamW(model().parameters(), lr=0.1 + rank)
    with pytest.raises(ValueError, match="other rates"):
        optimizer.step()
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="no amsgrad, betas, eps: it is that of another optimizer"):
        optimizer.load_state_dict(torch.optim.SGD(network.parameters(), 0.1, momentum=0.9).state_dict())
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    scaler = torch.amp.GradScaler("cpu")
    network = model()
    optimizer = autofuse.optim.SGD(network.parameters(), 0.1)
    scaler.scale(loss_of(network, batch(rank, 0))).backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(optimizer)


def test_wrong_use(ranks: Ranks) -> None:
    ranks(3).run(_wrong)


def _kinds_of_parameters(rank: int, world: int) -> None:
    """Views that are not contiguous, tied layers, frozen and late parameters, a closure, float64."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3)).to(
        memory_format=torch.channels_last
    )
    network[2].weight = nn.Parameter(torch.randn(16, 3).t())
    exact = copy.deepcopy(network).double()
    network[0].bias.requires_grad_(False)
    exact[0].bias.requires_grad_(False)
    wide = nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = autofuse.optim.AdamW([*network.parameters(), wide], **OPTIONS["AdamW"])
    reference = torch.optim.AdamW(exact.parameters(), **OPTIONS["AdamW"])
    images = [torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for step in range(4):
        if step == 2:
            network[0].bias.requires_grad_(True)
            exact[0].bias.requires_grad_(True)

        def closure() -> Tensor:
            optimizer.zero_grad()
            wide.grad = torch.ones_like(wide)
            loss = network(images[rank].to(memory_format=torch.channels_last)).square().mean()
            loss.backward()
            return loss

        versions = [p._version for p in network.parameters() if p.requires_grad]
        assert float(optimizer.step(closure)) > 0
        after = [p._version for p in network.parameters() if p.requires_grad]
        assert all(b > a for a, b in zip(versions, after, strict=True))
        reference.zero_grad()
        torch.stack([exact(x.double()).square().mean() for x in images]).mean().backward()
        reference.step()
        for a, b in zip(network.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    assert float(wide.detach()[0]) < 1 - 3 * 0.05


def test_kinds_of_parameters(ranks: Ranks) -> None:
    ranks(2).run(_kinds_of_parameters)
