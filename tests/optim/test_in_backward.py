"""Updates inside of the backward: the bits of a step behind it, accumulation, missing gradients."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse.optim import in_backward
from tests.optim.test_optimizers import OPTIONS, batch, loss_of, model
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


BATCHES = {(7, 33, 5): 3, (17, 17, 5): 2, (17, 17): 2}
"""By the sizes of a model."""


def both(backwards: bool = False, sizes: tuple[int, ...] = (7, 33, 5)) -> list[tuple[nn.Sequential, Any]]:
    """The same model twice: updated behind the backward, and in it, in several batches. backwards: parameters
    are given such that the last batch is the first to have its gradients."""
    pairs = []
    with patch.object(in_backward, "BATCH_BYTES", 700):
        for inside in (False, True):
            network = model(sizes=sizes)
            named = list(network.named_parameters())[:: -1 if backwards else 1]
            pairs.append((network, autofuse.optim.AdamW(named, in_backward=inside, **OPTIONS["AdamW"])))
    assert len(pairs[1][1]._batches) == BATCHES[sizes]
    return pairs


def same(pairs: list[tuple[nn.Sequential, Any]]) -> None:
    for a, b in zip(*(network.parameters() for network, _ in pairs), strict=True):
        assert torch.equal(a, b)


def _updates(rank: int, world: int) -> None:
    pairs = both()
    for step in range(3):
        for network, optimizer in pairs:
            loss_of(network, batch(rank, step)).backward()
            inside = optimizer._backward is not None
            assert all((p.grad is None) == inside for p in network.parameters())
            optimizer.step()
            optimizer.zero_grad()
        same(pairs)
    # Accumulation: two backwards, one update.
    for network, optimizer in pairs:
        if optimizer._backward is None:
            with pytest.raises(RuntimeError, match="without in_backward"):
                optimizer.no_sync()
            loss_of(network, batch(rank, 7)).backward()
        else:
            before = copy.deepcopy(network.state_dict())
            with optimizer.no_sync():
                loss_of(network, batch(rank, 7)).backward()
            assert all(torch.equal(p, before[name]) for name, p in network.state_dict().items())
        loss_of(network, batch(rank, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    same(pairs)
    # Parameters that no rank uses, then one that is no longer frozen.
    for network, optimizer in pairs:
        network[0](batch(rank, 9)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    same(pairs)
    state = pairs[1][1].full_state_dict()["state"]
    assert [int(states["step"]) for _, states in sorted(state.items())] == [5, 5, 4, 4]
    # A copy that is made while a parameter is frozen updates it later.
    for network, _ in pairs:
        network[1].bias.requires_grad_(False)
    pairs = [copy.deepcopy(pair) for pair in pairs]
    for frozen in (True, False):
        for network, optimizer in pairs:
            network[1].bias.requires_grad_(not frozen)
            loss_of(network, batch(rank, 10)).backward()
            assert frozen or (network[1].bias.grad is None) == (optimizer._backward is not None)
            optimizer.step()
            optimizer.zero_grad()
        same(pairs)


def _backwards(rank: int, world: int) -> None:
    pairs = both(backwards=True)
    for network, optimizer in pairs:
        loss_of(network, batch(rank, 0)).backward()
        optimizer.step()
    same(pairs)
    assert all(batch.steps == [1] * len(batch.params) for batch in pairs[1][1]._batches)


def test_updates(ranks: Ranks) -> None:
    ranks(3).run(_updates)
    ranks(3).run(_backwards)


def _late(rank: int, world: int) -> None:
    """Parameters that are added, and that are no longer frozen; the last parameter has no elements."""
    pairs = []
    for inside in (False, True):
        params = [nn.Parameter(torch.ones(n)) for n in (5, 3, 2, 0)]
        params[2].requires_grad_(False)
        pairs.append((params, autofuse.optim.SGD([params[0], *params[2:]], 0.1, in_backward=inside)))
    for step in range(6):
        for params, optimizer in pairs:
            if step == 2:
                optimizer.add_param_group({"params": [params[1]]})
                params[2].requires_grad_(True)
            sum((i + 1) * p.sum() for i, p in enumerate(params) if p.requires_grad).backward()
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(*(params for params, _ in pairs), strict=True):
            assert torch.equal(a, b)


def test_late_parameters(ranks: Ranks) -> None:
    ranks(2).run(_late)


def _wrong(rank: int, world: int) -> None:
    network, optimizer = both()[1]

    def run(x: Tensor) -> Tensor:
        y = network[0](x)
        return y.sum() if rank else network[1](y).sum()

    before = copy.deepcopy(network.state_dict())
    with pytest.raises(ValueError, match=r"1.bias has no gradient on ranks \[1\]"):
        run(batch(rank, 0)).backward()
    assert all(torch.equal(p, before[name]) for name, p in network.state_dict().items())
    optimizer.zero_grad()
    loss_of(network, batch(rank, 1)).backward()  # goes on
    assert not torch.equal(network[1].bias, before["1.bias"])
    for wrong in ({"max_norm": 1.0}, {"error_if_nonfinite": True}):
        with pytest.raises(ValueError, match="leave in_backward out"):
            autofuse.optim.SGD(model().parameters(), 0.1, in_backward=True, **wrong)
    # A weight that a later part of the backward still reads must not change unseen.
    p, q = (torch.ones(3, requires_grad=True) for _ in range(2))
    autofuse.optim.SGD([q, p], 0.1, in_backward=True)
    with pytest.raises(ValueError, match=r"parameter 0 .* by another optimizer"):
        autofuse.optim.SGD([p], 0.1, in_backward=True)
    held = p * q
    held.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held.sum().backward()


def test_wrong(ranks: Ranks) -> None:
    ranks(2).run(_wrong)


def _reentrant(rank: int, world: int) -> None:
    """Checkpoints that run backwards of their own, round a layer that is used twice."""

    def twice(layer: nn.Module, x: Tensor) -> Tensor:
        once = checkpoint(layer, x.requires_grad_(), use_reentrant=True)
        return checkpoint(layer, once, use_reentrant=True)

    for sizes in ((17, 17, 5), (17, 17)):  # of a last layer outside of checkpoints, and without
        pairs = both(sizes=sizes)
        for step in range(2):
            for network, optimizer in pairs:
                network[1:](twice(network[0], batch(rank, step, 17))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            same(pairs)
    network, _ = both(backwards=True, sizes=(17, 17, 5))[1]
    y = network[0](checkpoint(network[0], batch(rank, 0, 17).requires_grad_(), use_reentrant=True))
    with pytest.raises(RuntimeError, match=r"0\.weight has been updated, and got another gradient"):
        y.sum().backward()


def test_reentrant_checkpoints(ranks: Ranks) -> None:
    ranks(2).run(_reentrant)


def _compiled(rank: int, world: int) -> None:
    """In one graph, or with breaks round updates in the backward."""
    pairs = both()
    for network, optimizer in pairs:

        def step(x: Tensor, network: nn.Module = network, optimizer: Any = optimizer) -> None:
            loss_of(network, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        torch._dynamo.reset()
        compiled = torch.compile(step, backend="eager")
        for number in range(3):
            compiled(batch(rank, number))
    same(pairs)
    assert [b.steps for _, optimizer in pairs for b in optimizer._batches] == [[3] * 4, [3] * 2, [3], [3]]


def test_compiled_steps(ranks: Ranks) -> None:
    ranks(2).run(_compiled)
