"""Architectures of Hugging Face's transformers under their own tensor-parallel plans, on 2 ranks: trained,
and run on prompts of several lengths.

Spellings of attention, norms, gated MLPs and experts differ between them. Each gives the numbers of eager.
A site is kept only for the reason `no_compute`, in training.
"""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autofuse
from autofuse.passes.report import Report
from tests.passes.harness import passes_only
from tests.ranks import RankPool

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
SHARED = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
LATENT = {
    "num_key_value_heads": 4, "head_dim": 16, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 1,
}  # fmt: skip
TOLERANCE = 2e-5
"""Of float32, summed in another order."""

ARCHITECTURES: dict[str, tuple[dict[str, Any], Counter[str]]]
ARCHITECTURES = {
    "Mistral": ({}, Counter(matmul_all_reduce=16, matmul_all_gather=1)),
    "Gemma2": ({}, Counter(matmul_all_reduce=16, matmul_all_gather=1)),
    "Cohere2": ({}, Counter(matmul_all_reduce=16, matmul_all_gather=1)),
    "Glm4": ({}, Counter(matmul_all_reduce=14, matmul_all_gather=5)),
    "Olmo2": ({}, Counter(matmul_all_reduce=16, matmul_all_gather=9)),
    "GPTNeoX": ({}, Counter(matmul_all_reduce=10, matmul_all_gather=1)),
    "Phi3": ({}, Counter(matmul_all_reduce=10, matmul_all_gather=9)),
    "Nemotron": ({}, Counter(matmul_all_reduce=14, matmul_all_gather=1)),
    "GptOss": (EXPERTS, Counter(matmul_all_reduce=2, matmul_all_gather=1)),
    "MiniMaxM2": (EXPERTS, Counter(matmul_all_reduce=12, matmul_all_gather=9)),
    "DeepseekV3": (EXPERTS | LATENT, Counter(matmul_all_reduce=9, matmul_all_gather=1)),
    "Qwen3Next": (EXPERTS | SHARED, Counter(matmul_all_reduce=16, matmul_all_gather=7)),
}
"""By the name of the class: sizes besides `SIZES`, and the ops of a training step."""

LENGTHS = 33, 47, 1, 64
"""Of prompts: the first one is compiled for any length, the third one for itself."""
SERVED: dict[str, tuple[dict[str, Any], Counter[str]]] = {
    "Qwen3": ({}, Counter(matmul_all_reduce=10, matmul_all_gather=2)),
    "Mixtral": (EXPERTS, Counter(matmul_all_reduce=10, matmul_all_gather=2)),
    "Olmo2": ({}, Counter(matmul_all_reduce=10, matmul_all_gather=14)),
}
"""As `ARCHITECTURES`, of the forward of both graphs."""


def _model(name: str, sizes: dict[str, Any], world: int) -> nn.Module:
    transformers = importlib.import_module("transformers")
    distributed = importlib.import_module("transformers.distributed")
    made = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    plan, _, mesh = made.prepare_distribute_model(distributed.DistributedConfig(tp_size=world))
    found: nn.Module = made(getattr(transformers, f"{name}Config")(**{**SIZES, **sizes}))
    for p in found.parameters():
        nn.init.normal_(p, std=0.05)
    return made.maybe_distribute_model(found, plan, mesh)


def _tokens(length: int) -> Tensor:
    return torch.randint(1, 255, (2, length), generator=torch.Generator().manual_seed(length))


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-9))


def _train(rank: int, world: int, name: str, sizes: dict[str, Any]) -> tuple[float, Counter[str], list[str]]:
    """Trains one step. Returns the largest relative error of logits and gradients, against eager; how often
    each pattern was fused; the reasons of kept sites, and graph breaks."""
    tokens = _tokens(33)

    def trained(model: nn.Module, call: Callable[..., Any]) -> list[Tensor]:
        logits = _local(call(tokens, use_cache=False).logits)
        logits.logsumexp(-1).mean().backward()
        return [logits.detach(), *(_local(p.grad) for p in model.parameters() if p.grad is not None)]

    torch._dynamo.reset()
    eager, other = (_model(name, sizes, world) for _ in range(2))
    wanted = trained(eager, eager)
    with autofuse.debug() as report:
        found = trained(other, torch.compile(other, backend=passes_only()))
    return max(map(_error, found, wanted)), *_sites(report)


def _serve(rank: int, world: int, name: str, sizes: dict[str, Any]) -> tuple[float, Counter[str], list[str]]:
    """Runs prompts of all lengths. Returns what `_train` does."""
    torch._dynamo.reset()
    model = _model(name, sizes, world).eval()
    with torch.no_grad(), autofuse.debug() as report:
        compiled = torch.compile(model, backend=passes_only(), dynamic=True)
        logits = (
            [_local(call(_tokens(length), use_cache=False).logits) for call in (compiled, model)]
            for length in LENGTHS
        )
        errors = [_error(*both) for both in logits]
    return max(errors), *_sites(report)


def _sites(report: Report) -> tuple[Counter[str], list[str]]:
    kept = [f"{site.reason.value}: {site.detail}" for site in report.sites if not site.fused]
    return Counter(site.pattern for site in report.fused), kept + [str(b) for b in report.graph_breaks]


def _local(t: Any) -> Any:
    return t.to_local() if hasattr(t, "to_local") else t


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training(name: str, ranks: Callable[[int], RankPool]) -> None:
    sizes, ops = ARCHITECTURES[name]
    for error, fused, kept in ranks(2).run(_train, name, sizes, timeout=250):
        assert error <= TOLERANCE
        assert fused == ops
        assert all(why.startswith("no_compute") for why in kept), kept


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SERVED)
def test_prompts_of_any_length(name: str, ranks: Callable[[int], RankPool]) -> None:
    sizes, ops = SERVED[name]
    for error, fused, kept in ranks(2).run(_serve, name, sizes, timeout=250):
        assert error <= TOLERANCE
        assert (fused, kept) == (ops, [])
