"""Prefill and decoding of a tensor-parallel Llama at real layer sizes, compiled in several ways.

Hugging Face's model with its own tensor-parallel plan, random weights, a few layers. On GPUs the dtype is
bfloat16 and the layers are those of Llama-70B; `async TP` is stock Inductor with torch's own fusions switched
on. autofuse fuses the all_reduces behind `o_proj` and `down_proj`, and the all_gather of the logits, with the
matmuls before them.

    torchrun --nproc-per-node 4 examples/llama_serving.py --layers 4
    python examples/llama_serving.py --hidden 256 --intermediate 896 --heads 8 --kv-heads 4 --layers 2

Logits must agree with eager, or the script fails.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import agree, launch, race, show
from llama_tp import make_decoder
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.distributed import DistributedConfig

import autofuse

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of the largest logit; both sides round to the dtype after every op, and a layer has some twenty."""


def make_model(args: Namespace, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A Llama with random weights, sharded by the plan that transformers has."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=2 * max(args.prompt, 64),
        bos_token_id=None,
        eos_token_id=None,
    )
    parallel, _, mesh = LlamaForCausalLM.prepare_distribute_model(
        DistributedConfig(tp_size=dist.get_world_size())
    )
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(config).to(dtype)
    return LlamaForCausalLM.maybe_distribute_model(model.eval(), parallel, mesh)


def compile_each(model: nn.Module, args: Namespace, device: torch.device) -> dict[str, Callable[..., Any]]:
    """The model, and what it is compiled to, by name."""
    # Dynamo counts what it has compiled of a function, for all of these together, and has a limit.
    torch.compiler.reset()
    graphs = {"triton.cudagraphs": args.graphs}
    calls: dict[str, Callable[..., Any]] = {
        "eager": model,
        "inductor": torch.compile(model, backend="inductor", options=graphs),
    }
    if device.type == "cuda":
        options = {"_micro_pipeline_tp": True, **graphs}
        calls["async TP"] = torch.compile(model, backend="inductor", options=options)
    calls["autofuse"] = torch.compile(model, backend="autofuse", options={"policy": args.policy, **graphs})
    return calls


def make_prefill(model: Any, call: Callable[..., Any], prompt: Tensor) -> Callable[[], Tensor]:
    """`prefill() -> logits [batch, 1, vocab]` of the prompt's last token, from an empty cache every time."""
    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1])
    with torch.no_grad():
        model(prompt, past_key_values=cache, logits_to_keep=1)  # which allocates it, once and for all

    def prefill() -> Tensor:
        cache.reset()
        with torch.no_grad():
            logits: Tensor = call(prompt, past_key_values=cache, logits_to_keep=1).logits
        return logits

    return prefill


def run(args: Namespace, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = make_model(args, device, dtype)
    torch.manual_seed(1)
    prompt = torch.randint(1024, (args.batch, args.prompt), device=device)
    with autofuse.debug() as report:
        calls = compile_each(model, args, device)
        prefills = {name: make_prefill(model, call, prompt) for name, call in calls.items()}
        agree("prefill", [prefills["autofuse"]()], [prefills["eager"]()], TOLERANCE[dtype])
        race(f"prefill, {prompt.numel()} tokens", prefills, args.rounds)
        calls = compile_each(model, args, device)
        length = args.prompt + args.rounds + 2
        decoders = {name: make_decoder(model, call, prompt, length) for name, call in calls.items()}
        agree("decoding", [decoders["autofuse"]()], [decoders["eager"]()], TOLERANCE[dtype])
        race(f"decoding step, {args.batch} tokens", decoders, args.rounds)
    torch.compiler.reset()  # NCCL does not end while there are graphs of its kernels
    show(f"\n{report}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--intermediate", type=int, default=28672)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--graphs", action="store_true", help="replay what is compiled from CUDA graphs")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    launch(parser, run)
