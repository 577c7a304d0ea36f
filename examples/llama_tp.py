"""Tensor-parallel Llama: Hugging Face's model and its own tensor-parallel plan, compiled by autofuse.

Nothing in the model knows of autofuse. Transformers shards the weights and puts an all_reduce behind the
embedding, `o_proj` and `down_proj` (forward), and behind the input gradients of `q_proj`, `k_proj`, `v_proj`,
`gate_proj` and `up_proj` (backward), and an all_gather behind `lm_head`. autofuse fuses each of them with the
matmul before it, or with the rows that the embedding reads, in training and in greedy decoding with a static
cache, where the matmul has one row.

    python examples/llama_tp.py
    torchrun --nproc-per-node 2 examples/llama_tp.py --layers 4

The text is the source of Python's standard library, a token a byte. Losses are printed beside those of eager,
from the same weights and batches. Gradients, losses and decoded tokens must agree, or the script fails.
"""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Step, agree, compile_each, launch, race, show, train_beside
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.distributed import DistributedConfig

import autofuse

GRADIENT_TOLERANCE = 1e-5
"""Of float32, summed in another order."""
LOSS_TOLERANCE = 1e-4
"""The same after some steps of training, each of which adds to the difference."""


def make_model(args: Namespace, device: torch.device) -> nn.Module:
    """A Llama with the same random weights in every call, sharded by the plan that transformers has."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        bos_token_id=None,
        eos_token_id=None,
    )
    parallel, _, mesh = LlamaForCausalLM.prepare_distribute_model(
        DistributedConfig(tp_size=dist.get_world_size())
    )
    model: nn.Module = LlamaForCausalLM(config)
    return LlamaForCausalLM.maybe_distribute_model(model.to(device), parallel, mesh)


def read_text() -> Tensor:
    """The sources of the standard library's modules, one after the other, as uint8."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def make_batches(args: Namespace, device: torch.device) -> Iterator[Tensor]:
    """Random windows of the text, int64 `[batch, length]`, the same on all ranks, without end."""
    text = read_text()
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - args.length, (args.batch, 1), generator=generator)
        yield text[starts + torch.arange(args.length)].long().to(device)


def make_step(model: nn.Module, call: Callable[..., Any]) -> Step:
    """`step(tokens) -> loss`: one step of AdamW. `call` is the model or what it was compiled to."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = call(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def make_decoder(model: Any, call: Callable[..., Any], prompt: Tensor, length: int) -> Callable[[], Tensor]:
    """`decode() -> logits [batch, 1, vocab]`, one greedy token a call. The prompt runs eagerly, before."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    with torch.no_grad():
        token = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)

    def decode() -> Tensor:
        nonlocal token
        with torch.no_grad():
            logits: Tensor = call(token, past_key_values=cache).logits
            token = logits.argmax(-1)  # now: the next replay of a CUDA graph writes over the logits
        return logits

    return decode


def run(args: Namespace, device: torch.device) -> None:
    models = {name: make_model(args, device) for name in ("eager", "inductor", "autofuse")}
    calls = compile_each(models, args.policy)
    steps = {name: make_step(models[name], calls[name]) for name in models}
    batches = make_batches(args, device)
    with autofuse.debug() as report:
        train_beside(models, steps, batches, args.steps, GRADIENT_TOLERANCE, LOSS_TOLERANCE)
        batch = next(batches)
        race("training step", {name: partial(step, batch) for name, step in steps.items()}, args.rounds)

        # One model from here on: the one that autofuse trained, run in three ways.
        model = models["autofuse"].eval()
        calls = compile_each(dict.fromkeys(models, model), args.policy)
        prompt = batch[:1, : args.prompt]
        decoders = {
            name: make_decoder(model, call, prompt, args.prompt + args.tokens + args.rounds + 1)
            for name, call in calls.items()
        }
        logits = {
            name: torch.cat([decoders[name]() for _ in range(args.tokens)], 1)
            for name in ("eager", "autofuse")
        }
        tokens = {name: values.argmax(-1) for name, values in logits.items()}
        show(f"\nprompt   {bytes(prompt[0].tolist())!r}")
        for name, decoded in tokens.items():
            show(f"{name:<8} {bytes(decoded[0].tolist())!r}")
        agree("tokens", [tokens["autofuse"]], [tokens["eager"]], 0.0)
        agree("logits", [logits["autofuse"]], [logits["eager"]], GRADIENT_TOLERANCE)
        race("decoding step, 1 token", decoders, args.rounds)
    show(f"\n{report}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64 * ranks")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens of a training window")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16, help="tokens to decode")
    launch(parser, run)
