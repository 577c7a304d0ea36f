"""A whole training step, data-parallel: forward, backward, exchange of gradients, and AdamW.

A decoder of GPT-2's sizes learns to predict tokens. Every rank has tokens of its own. DDP overlaps the
exchange with the backward, FSDP2 with the next forward, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autofuse import optim

from .peers import Peer, shard
from .rows import ALONE, OURS

HEAD = 64
"""Width of an attention head."""
RATES: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder, and of a rank's batch."""

    layers: int
    hidden: int
    vocabulary: int
    sequences: int
    length: int


TRAINING = {"training GPT-2, 2 layers, 128 tokens": Model(2, 256, 1024, 2, 64)}
"""The rows on CPU ranks."""
TRAINING_ON_GPUS = {
    "training GPT-2, 4096 tokens": Model(12, 768, 50257, 4, 1024),
    "training GPT-2 medium, 4096 tokens": Model(24, 1024, 50257, 4, 1024),
}


class Block(nn.Module):
    """A layer: causal attention, then an MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return y


class Decoder(nn.Module):
    """`[sequences, length]` tokens to the loss of predicting each from those before it."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes.hidden) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


def training_peers(sizes: Model, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Peer]]:
    """Peers by name, ours first. Their parameters are compared with ours, but not those of FSDP2, which are
    parts, and not those of a step without an exchange."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    batch = (sizes.sequences, sizes.length)
    tokens = torch.randint(sizes.vocabulary, batch, generator=generator, device=device)

    def made() -> Decoder:
        torch.manual_seed(0)
        return Decoder(sizes).to(device, dtype)

    def stepping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        def step() -> None:
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    for in_backward in (False, True):
        model = made()
        ours = optim.AdamW(model.parameters(), in_backward=in_backward, **RATES)
        yield OURS + " in the backward" * in_backward, (stepping(model, ours), list(model.parameters()))

    model = made()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    yield "DDP", (stepping(wrapped, _adamw(model)), list(model.parameters()))

    model = made()
    shard(model, model.blocks, device)
    yield "FSDP2", (stepping(model, _adamw(model)), [])

    model = made()
    yield ALONE, (stepping(model, _adamw(model)), [])


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True, **RATES)
