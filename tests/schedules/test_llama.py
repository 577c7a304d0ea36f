"""A whole Llama of Hugging Face with its plan, trained under every schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autofuse
from tests.passes.harness import passes_only
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
TOKENS, STEPS = (1, 16), 2


def llama(world: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    plan, _, mesh = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(tp_size=world))
    model: nn.Module = LlamaForCausalLM.maybe_distribute_model(LlamaForCausalLM(config), plan, mesh)
    return model


def trained(model: nn.Module, call: Callable[..., object]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps, and the parameters behind them."""
    tokens = torch.randint(0, 64, TOKENS, generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = call(input_ids=tokens, labels=tokens).loss  # type: ignore[attr-defined]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return losses, {name: p.detach() for name, p in whole.items()}


def _train(rank: int, world: int, declared: bool) -> dict[str, tuple[int | None, int, list[str]]]:
    """By schedule: the saved bytes, the all_reduces that scatter, and the forms of tails of the forward."""
    model = llama(world)
    losses, expected = trained(model, model)
    told = {}
    for schedule in ("unchanged", "every", "owner", "split"):
        torch._dynamo.reset()
        model = llama(world)
        if declared:
            autofuse.replicated(model, inputs=["input_ids", "labels"], gradients=True)
        compiled = torch.compile(model, backend=passes_only(policy="always", schedule=schedule))
        with autofuse.debug() as report:
            found, parameters = trained(model, compiled)
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
        for name, p in parameters.items():
            torch.testing.assert_close(p, expected[name], rtol=1e-4, atol=1e-5, msg=name)
        (forward, *_) = report.graphs
        forms = [s.tail_form for s in report.fused if s.graph == forward.name and s.tail_form]
        told[schedule] = forward.saved_bytes, sum(s.reductions for s in forward.schedules), forms
    dist.barrier()
    return told


@pytest.mark.full
@pytest.mark.parametrize("declared", [False, True])
def test_every_schedule_trains_alike(ranks: Ranks, declared: bool) -> None:
    sums = 5  # of 2 layers, and of the embedding
    for told in ranks(2).run(_train, declared, timeout=400):
        unchanged, split = told["unchanged"][0], told["split"][0]
        assert unchanged is not None
        assert split is not None
        assert told["unchanged"][1:] == (0, [])
        assert told["every"][1:] == (0, ["every"] * sums)
        assert told["owner"][1:] == (0, ["owner" if declared else "every"] * sums)
        assert told["split"][1] == (16 if declared else 3)
        assert (split < unchanged) == declared
