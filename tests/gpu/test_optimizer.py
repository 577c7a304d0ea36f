"""autofuse.optim on GPUs, beside torch's optimizers in float64 on the batches of all ranks."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autofuse
from tests.gpu.conftest import WORLDS
from tests.ranks import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
}


def _loss(network: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = network(x.to(next(network.parameters()).dtype))
    return (y - 1).square().mean()


def _train(rank: int, world: int, name: str, options: dict[str, Any]) -> float:
    torch.manual_seed(3)
    sizes = (65, 300, 7)
    network = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))).cuda()
    exact = copy.deepcopy(network).double()
    clip = options.get("max_norm")
    ours = getattr(autofuse.optim, name)(network.named_parameters(), **OPTIONS[name], **options)
    torchs = getattr(torch.optim, name)(exact.parameters(), **OPTIONS[name])
    for step in range(5):
        generators = [torch.Generator("cuda").manual_seed(9 * step + r) for r in range(world)]
        x = [torch.randn(9, 65, generator=g, device="cuda") for g in generators]
        _loss(network, x[rank]).backward()
        ours.step()
        ours.zero_grad()
        torch.stack([_loss(exact, each) for each in x]).mean().backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(exact.parameters(), clip)
            torch.testing.assert_close(ours.grad_norm.double(), norm, rtol=1e-4, atol=0)
        torchs.step()
        torchs.zero_grad()
        for a, b in zip(network.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    torchs.load_state_dict(ours.full_state_dict())
    ours.load_state_dict(torchs.state_dict())
    network[0].bias.grad = torch.ones_like(network[0].bias) if rank else None
    if not options.get("in_backward"):
        with pytest.raises(ValueError, match=r"0.bias has no gradient on ranks \[0\]"):
            ours.step()
    return float(sum(p.double().sum() for p in network.parameters()))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {}),
        ("AdamW", {"max_norm": 0.1}),
        ("AdamW", {"in_backward": True}),
        ("SGD", {"master_weights": True}),
    ],
)
def test_as_torch(
    gpu_ranks: Callable[[int], RankPool], world: int, name: str, options: dict[str, Any]
) -> None:
    sums = gpu_ranks(world).run(_train, name, options, timeout=120)
    assert sums == [sums[0]] * world
