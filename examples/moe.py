"""Dropless mixture of experts: top-2 routing, experts sharded over ranks, as many rows as the router sends.

Every rank sorts its tokens by expert and sends each row to the rank of its expert (dispatch); the experts
there are grouped matmuls over ragged groups; the results travel back (combine). How many rows go where is
known only at run time. autofuse fuses the dispatch with the expert matmuls that read it (they start on rows
that have arrived), and the combine with the one that writes it (rows go straight to their token's rank): two
exchanges in the forward and two in the backward. The exchange of the counts stays: no matmul is near it.

    python examples/moe.py
    torchrun --nproc-per-node 4 examples/moe.py --experts 16

Losses are printed beside those of eager, from the same weights and batches. Gradients and losses must agree
with eager, or the script fails. The experts are bfloat16, which is what grouped matmuls are made for.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Step, all_to_all, compile_each, launch, race, show, train_beside
from torch import Tensor, nn

import autofuse

EPS = torch.finfo(torch.bfloat16).eps
GRADIENT_TOLERANCE = 4 * EPS
"""What the experts compute is rounded to bfloat16 some eight times on the way to a gradient, by EPS / 2."""
LOSS_TOLERANCE = EPS / 8
"""The mean over many elements, whose roundings are independent."""

TOP = 2


class MixtureOfExperts(nn.Module):
    """`experts` gated experts `w2(silu(w1 x) * w3 x)`, of which every rank has `experts / world`."""

    def __init__(self, world: int, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.world, self.experts, self.local = world, experts, experts // world
        self.norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(self.local, dim, hidden, dtype=torch.bfloat16))
        self.w3 = nn.Parameter(torch.empty(self.local, dim, hidden, dtype=torch.bfloat16))
        self.w2 = nn.Parameter(torch.empty(self.local, hidden, dim, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """`x: [tokens, dim]` float32 -> the same."""
        x = self.norm(x)
        scores, chosen = self.gate(x).softmax(-1).topk(TOP)
        # From here on a row is one (token, expert) pair, sorted by expert: `TOP * tokens` rows.
        experts, order = chosen.flatten().sort(stable=True)
        tokens = order // TOP
        counts = experts.new_zeros(self.experts).scatter_add(0, experts, torch.ones_like(experts))
        # [source, local expert]: the rows that come from every rank for every expert here.
        arriving = all_to_all(counts).view(self.world, self.local)
        inputs = counts.view(self.world, self.local).sum(1).tolist()
        outputs = arriving.sum(1).tolist()

        rows = all_to_all(x.bfloat16()[tokens], outputs, inputs)
        # Rows arrive by source, then expert; the grouped matmul wants them by expert.
        expert = torch.arange(self.local, device=x.device).repeat(self.world)
        expert = expert.repeat_interleave(arriving.flatten(), output_size=rows.shape[0])
        by_expert = expert.argsort(stable=True)
        ends = arriving.sum(0).cumsum(0).int()
        sorted_rows = rows[by_expert]
        gated = F.silu(F.grouped_mm(sorted_rows, self.w1, offs=ends))
        gated = gated * F.grouped_mm(sorted_rows, self.w3, offs=ends)
        results = F.grouped_mm(gated, self.w2, offs=ends)
        results = torch.empty_like(rows).index_put((by_expert,), results)
        returned = all_to_all(results, inputs, outputs)

        weighted = returned.float() * scores.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, tokens, weighted)


def make_model(args: Namespace, device: torch.device) -> MixtureOfExperts:
    """The same weights in every call; experts differ between ranks, gate and norm do not."""
    torch.manual_seed(0)
    with device:
        model = MixtureOfExperts(dist.get_world_size(), args.experts, args.dim, args.hidden)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    for weight in (model.w1, model.w3, model.w2):
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
    return model


def make_batches(args: Namespace, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens of this rank and what the layer should add to them, `[tokens, dim]` each, without end."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        x = torch.randn(args.tokens, args.dim, generator=generator)
        yield x.to(device), x.roll(1, 1).tanh().to(device)


def make_step(model: MixtureOfExperts, call: Callable[..., Any]) -> Step:
    """`step(batch) -> loss` of this rank's tokens: one step of SGD on the mean over all ranks' tokens."""
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        optimizer.zero_grad()
        loss = F.mse_loss(call(x), target)
        (loss / dist.get_world_size()).backward()
        for replicated in (model.gate.weight, model.norm.weight):
            dist.all_reduce(replicated.grad)
        optimizer.step()
        return loss.detach()

    return step


def run(args: Namespace, device: torch.device) -> None:
    torch._dynamo.config.capture_scalar_outputs = True  # the splits stay in the graph
    models = {name: make_model(args, device) for name in ("eager", "inductor", "autofuse")}
    calls = compile_each(models, args.policy)
    steps = {name: make_step(models[name], calls[name]) for name in models}
    batches = make_batches(args, device)
    with autofuse.debug() as report:
        train_beside(models, steps, batches, args.steps, GRADIENT_TOLERANCE, LOSS_TOLERANCE)
        batch = next(batches)
        race("training step", {name: partial(step, batch) for name, step in steps.items()}, args.rounds)
    show(f"\n{report}")


if __name__ == "__main__":
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each rank")
    parser.add_argument("--experts", type=int, default=8, help="experts of all ranks")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    launch(parser, run)
