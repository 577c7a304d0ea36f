"""What happens on some ranks only: all raise the same error with the name of the parameter, and nothing has
changed. Copies, exceptions in the backward, arguments."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autofuse
from autofuse.optim import in_backward
from tests.optim.test_optimizers import batch, loss_of, model
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
SGD = autofuse.optim.SGD


def _one_rank(rank: int, world: int) -> list[str]:
    """The errors, one of each case. In each the last rank alone does something."""
    mine, said = rank == world - 1, []

    def refused(make: Callable[[nn.Sequential], Any], change: Callable[[nn.Sequential, Any], object]) -> None:
        network = model()
        optimizer = make(network)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(network, batch(rank, step)).backward()
            if step:
                break
            optimizer.step()
        before = copy.deepcopy((network.state_dict(), optimizer.state_dict()["state"]))
        if mine:
            change(network, optimizer)
        for _ in range(2):  # the group is as usable as before
            with pytest.raises(ValueError, match="no parameter has changed") as error:
                optimizer.step()
        said.append(str(error.value))
        assert all(torch.equal(p, before[0][name]) for name, p in network.state_dict().items())
        after = optimizer.state_dict()["state"]
        for number, states in before[1].items():
            assert all(
                torch.equal(torch.as_tensor(v), torch.as_tensor(after[number][k])) for k, v in states.items()
            )

    def plain(network: nn.Sequential, **options: Any) -> Any:
        return autofuse.optim.AdamW(network.named_parameters(), 0.1, **options)

    def in_two(network: nn.Sequential) -> Any:
        """Two rules are two batches."""
        named = list(network.named_parameters())
        return SGD([{"params": named[:2]}, {"params": named[2:], "momentum": 0.9}], 0.1)

    def lose(network: nn.Sequential, _: Any) -> None:
        network[1].bias.grad = None

    def sparse(network: nn.Sequential, _: Any) -> None:
        network[1].bias.grad = network[1].bias.grad.to_sparse()

    def wide(network: nn.Sequential, _: Any) -> None:
        network[1].bias.grad_dtype = None
        network[1].bias.grad = network[1].bias.grad.double()

    def option(key: str, value: Any) -> Callable[[nn.Sequential, Any], None]:
        def change(_: nn.Sequential, optimizer: Any) -> None:
            optimizer.param_groups[-1][key] = value

        return change

    def add(_: nn.Sequential, optimizer: Any) -> None:
        extra = nn.Parameter(torch.ones(3))
        extra.grad = torch.ones(3)
        optimizer.add_param_group({"params": [("extra", extra)]})

    refused(in_two, lose)
    refused(in_two, sparse)
    refused(plain, wide)
    refused(in_two, option("momentum", 0.0))
    refused(in_two, option("lr", 0.5))
    refused(plain, option("betas", (1.0, 1.0)))
    refused(plain, option("amsgrad", True))
    refused(plain, add)
    refused(lambda network: plain(network, max_norm=1.0), add)
    # A rank on which nothing is to be trained.
    network = model().requires_grad_(not mine)
    with pytest.raises(ValueError, match="no parameter has changed") as error:
        plain(network).step()
    said.append(str(error.value))
    # A rank whose loss does not depend on the model.
    network = model()
    optimizer = plain(network, in_backward=True)
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(ValueError, match="no parameter has changed") as error:
        (optimizer.step if mine else loss_of(network, batch(rank, 0)).backward)()
    said.append(str(error.value))
    assert all(torch.equal(p, before[name]) for name, p in network.state_dict().items())
    return said


def test_one_rank(ranks: Ranks) -> None:
    found = ranks(3).run(_one_rank)
    assert found[0] == found[1] == found[2]
    expected = [
        "1.bias has no gradient on ranks [2]",
        "1.bias has a gradient that is sparse",
        "1.bias has a gradient that is sparse or of other shape, dtype",
        "rank 2: the group of 1.weight was made for the rule momentum",
        "other rates: rank 0 has 1.weight with",
        "rank 2: the options of the group of 0.weight",
        "rank 2: the group of 0.weight was made for the rule adam",
        "rank 2 has extra [3]",
        "and not extra",
        "rank 2 has no parameter",
        "has no gradient on ranks [2]",
    ]
    for text, says in zip(found[0], expected, strict=True):
        assert says in text


def _copies(rank: int, world: int) -> None:
    """deepcopy, pickle and torch.save of a model with its optimizer go on as the original does."""
    for inside in (False, True):
        network = model()
        optimizer = autofuse.optim.AdamW(network.parameters(), 0.1, master_weights=True, in_backward=inside)
        pairs: list[tuple[nn.Sequential, Any]] = [(network, optimizer)]
        for step in range(3):
            for each, its in pairs:
                loss_of(each, batch(rank, step)).backward()
                its.step()
                its.zero_grad()
            if step == 0:
                buffer = io.BytesIO()
                torch.save(pairs[0], buffer)
                buffer.seek(0)
                pairs.append(torch.load(buffer, weights_only=False))
                pairs += [copy.deepcopy(pairs[0]), pickle.loads(pickle.dumps(pairs[0]))]
        assert len({p.data_ptr() for each, _ in pairs for p in each.parameters()}) == 4 * len(pairs)
        for each, _ in pairs[1:]:
            for a, b in zip(network.parameters(), each.parameters(), strict=True):
                assert torch.equal(a, b)


class Stumbles(torch.autograd.Function):
    """The identity; its backward raises an exception where `gives` is false."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gives: bool) -> Tensor:
        ctx.gives = gives
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if not ctx.gives:
            raise ArithmeticError("stumbled")
        return grads[0], None


def _exceptions(rank: int, world: int) -> None:
    """A backward that raises an exception half way does not disturb the next one."""
    network = model()
    with patch.object(in_backward, "BATCH_BYTES", 700):
        optimizer = SGD(network.parameters(), 0.1, in_backward=True)
    assert len(optimizer._batches) > 1
    with pytest.raises(ArithmeticError):
        network[1](Stumbles.apply(network[0](batch(rank, 0)), False)).sum().backward()
    twin = copy.deepcopy(network)
    follower = SGD(twin.parameters(), 0.1)
    optimizer.zero_grad()
    for step in range(2):
        network[1](Stumbles.apply(network[0](batch(rank, step)), True)).sum().backward()
        assert all(p.grad is None for p in network.parameters())
        twin[1](twin[0](batch(rank, step))).sum().backward()
        follower.step()
        follower.zero_grad()
        for a, b in zip(network.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b)


def _arguments(rank: int, world: int) -> None:
    """What torch takes and what it does not; options that come with a state; parameters without elements."""
    for name in ("foreach", "fused", "differentiable"):
        with pytest.raises(TypeError, match=f"{name}.*leave them out"):
            autofuse.optim.AdamW(model().parameters(), **{name: True})
    for refused in ({"in_backward": True}, {"error_if_nonfinite": True}):
        with pytest.raises(ValueError, match="capturable"):
            autofuse.optim.AdamW(model().parameters(), capturable=True, **refused)
    with pytest.raises(ValueError, match="max_norm=0"):
        SGD(model().parameters(), 0.1, max_norm=0.0)
    with pytest.raises(TypeError, match="order of a set"):
        SGD(set(model().parameters()), 0.1)
    # A group that torch refuses leaves no trace.
    optimizer, late = SGD(model().parameters(), 0.1), nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="non-leaf"):
        optimizer.add_param_group({"params": [late, late * 2]})
    optimizer.add_param_group({"params": [late]})
    # Rates that are tensors, as the state of torch's optimizer; the rule is that of the state.
    network, twin = model(), model()
    tensors = {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.9), torch.tensor(0.99))}
    ours = autofuse.optim.AdamW(network.parameters(), **tensors)
    theirs = torch.optim.AdamW(twin.parameters(), 0.1, (0.9, 0.99), amsgrad=True)
    for step in range(3):
        loss_of(twin, batch(0, step)).backward()
        theirs.step()
        theirs.zero_grad()
        if step:
            loss_of(network, batch(0, step)).backward()
        ours.step()
        ours.zero_grad()
        if step == 0:
            network.load_state_dict(twin.state_dict())
            ours.load_state_dict(theirs.state_dict())
        for a, b in zip(network.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    # No elements at all; a state that does not fit changes nothing.
    empty = nn.Parameter(torch.ones(0, 3))
    optimizer = autofuse.optim.LAMB([empty], max_norm=1.0, master_weights=True)
    empty.grad = torch.ones_like(empty)
    optimizer.step()
    for made in (optimizer.state_dict, optimizer.full_state_dict, optimizer.sharded_state_dict):
        optimizer.load_state_dict(made())
    assert optimizer._batches[0].steps == [1]
    wrong = copy.deepcopy(ours.full_state_dict())
    wrong["state"][3]["exp_avg"] = torch.ones(2)
    wrong["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match=r"parameter 3 .* has 2 elements"):
        ours.load_state_dict(wrong)
    assert float(ours.param_groups[0]["lr"]) < 1
    longer = SGD(model().parameters(), 0.1)
    longer.full_state_dict()
    if rank:
        longer.add_param_group({"params": [late]})
    with pytest.raises(ValueError, match="other parameters: rank 0 has no parameter, rank 1 has parameter 4"):
        longer.full_state_dict()
    # A GradScaler is refused once, and does not stay.
    scaler = torch.amp.GradScaler("cpu")
    optimizer = SGD(network.parameters(), 0.1)
    scaler.scale(loss_of(network, batch(rank, 0))).backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(optimizer)
    optimizer.step()


@pytest.mark.parametrize("case", [_copies, _exceptions, _arguments])
def test_use(ranks: Ranks, case: Callable[[int, int], None]) -> None:
    ranks(2).run(case)
