"""Data-parallel training of a BERT: the optimizer's step and the exchange of gradients as one op.

Hugging Face's model learns to fill in masked bytes of the source of Python's standard library. Every rank has
batches of its own. `autofuse.optim.AdamW` averages the gradients over the ranks, updates on each rank the
elements that it owns, and hands out the parameters: there is no DDP, and no rank has all of the state.

    python examples/data_parallel.py
    torchrun --nproc-per-node 2 examples/data_parallel.py --layers 4 --dtype bfloat16 --in-backward

Losses are printed beside those of torch's AdamW in float64, on the batches of all ranks. In float32 they must
agree, or the script fails. Then the memory and the time of a step are compared with DDP and torch's AdamW.
"""

import os
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import agree, launch, race, show
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

import autofuse

LOSS_TOLERANCE = 1e-4
"""Of float32 against float64, over some steps."""
MASK = 256
RATES = {"lr": 1e-3, "weight_decay": 0.01}


def make_model(args: Namespace, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A BERT with the same random weights in every call and on every rank."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=257,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        max_position_embeddings=args.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config).to(device=device, dtype=dtype)


def read_text() -> Tensor:
    """The sources of the standard library's modules, one after the other, as int64."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def batches(args: Namespace, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless pairs (tokens with masks, labels) of a rank; a label of -100 does not count."""
    text, generator = read_text(), torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(len(text) - args.length, (args.batch,), generator=generator)
        tokens = torch.stack([text[s : s + args.length] for s in starts.tolist()])
        masked = torch.rand(tokens.shape, generator=generator) < 0.15
        masked[:, 0] = True
        yield tokens.masked_fill(masked, MASK), tokens.masked_fill(~masked, -100)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    tokens, labels = (t.to(device) for t in batch)
    loss: Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


def run(args: Namespace, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, args.dtype)
    model = make_model(args, device, dtype)
    optimizer = getattr(autofuse.optim, args.optimizer)(
        model.named_parameters(), master_weights=dtype != torch.float32, in_backward=args.in_backward, **RATES
    )
    exact = make_model(args, device, torch.float64)
    reference = torch.optim.AdamW(exact.parameters(), **RATES)
    own, of_ranks = batches(args, rank), [batches(args, r) for r in range(world)]
    compared = args.optimizer == "AdamW"

    losses: dict[str, list[Tensor]] = {"ours": [], "exact": []}
    show("step     float64   autofuse")
    for number in range(args.steps):
        reference.zero_grad()
        every = [loss_of(exact, next(b), device) for b in of_ranks]
        torch.stack(every).mean().backward()
        reference.step()

        loss = loss_of(model, next(own), device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses["ours"].append(loss.detach())
        losses["exact"].append(every[rank].detach())
        show(f"{number:4d}  {every[rank].item():10.5f} {loss.item():10.5f}")
    if compared and dtype == torch.float32:
        agree("losses", losses["ours"], losses["exact"], LOSS_TOLERANCE)
    weights = [p.detach().double().sum() for p in model.parameters()]
    others = [torch.empty(len(weights), dtype=torch.float64, device=device) for _ in range(world)]
    dist.all_gather(others, torch.stack(weights))
    agree("parameters of rank 0 and this one", [others[rank]], [others[0]], 0.0)

    twin = DistributedDataParallel(make_model(args, device, dtype))
    torchs = torch.optim.AdamW(twin.parameters(), fused=True, **RATES)

    def step_of_torch() -> None:
        loss_of(twin, next(own), device).backward()
        torchs.step()
        torchs.zero_grad()

    def step() -> None:
        loss_of(model, next(own), device).backward()
        optimizer.step()
        optimizer.zero_grad()

    step_of_torch()
    show_memory(model, optimizer, torchs)
    race("training step", {"DDP": step_of_torch, "autofuse": step}, args.rounds)


def show_memory(model: nn.Module, optimizer: Any, torchs: torch.optim.Optimizer) -> None:
    """What a rank holds of state, with torch's AdamW and sliced."""
    count = sum(p.numel() for p in model.parameters())
    before = sum(v.nbytes for state in torchs.state.values() for v in state.values())
    states = optimizer.state_dict()["state"].values()
    after = sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))
    show(f"\n{count:,} parameters; state of a rank: {before:,} bytes with torch's AdamW, {after:,} sliced")
    show(autofuse.memory_summary())


if __name__ == "__main__":
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--optimizer", choices=("AdamW", "LAMB"), default="AdamW")
    parser.add_argument("--in-backward", action=BooleanOptionalAction, default=False)
    launch(parser, run)
