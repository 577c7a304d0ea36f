"""Tails on real ranks, against eager torch: a stack of Llama's blocks, and random chains behind sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autofuse
from tests.ranks import RankPool

from .chains import ReduceBackward, ReduceForward
from .harness import passes_only
from .test_chains import drawn

Ranks = Callable[[int], RankPool]
BACKENDS = ["passes", pytest.param("autofuse", marks=pytest.mark.full)]
"""The graphs as they stand, and the code that Inductor generates."""


def backend_of(name: str) -> Any:
    return passes_only(schedule="every") if name == "passes" else "autofuse"


def errors(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Of each tensor relative to its largest value, in units of what the dtype allows."""
    found = []
    for a, b in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        allowed = 1e-5 if b.dtype == torch.float32 else 3e-2
        found.append(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30) / allowed))
    return found


# --- a model ------------------------------------------------------------------------------------------

HIDDEN, HEADS, INNER, LAYERS = 32, 4, 48, 2


class RMSNorm(nn.Module):
    """Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(HIDDEN) / 8)
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * x.to(dtype)


class Block(nn.Module):
    """This rank's part of a block: its heads, and its columns of the feed-forward layer."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.heads = HEADS // world
        self.norms = nn.ModuleList([RMSNorm(), RMSNorm()])
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN // world, bias=False)
        self.out = nn.Linear(HIDDEN // world, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, INNER // world, bias=False)
        self.up = nn.Linear(HIDDEN, INNER // world, bias=False)
        self.down = nn.Linear(INNER // world, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = ReduceBackward.apply(self.norms[0](x))
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + ReduceForward.apply(self.out(h), "sum")
        h = ReduceBackward.apply(self.norms[1](x))
        return x + ReduceForward.apply(self.down(F.silu(self.gate(h)) * self.up(h)), "sum")


def train(rank: int, world: int, dtype: torch.dtype, backend: str) -> tuple[list[float], list[str]]:
    """Errors of the output and all gradients, and the tails of the forward graph."""
    torch.manual_seed(rank)
    model = nn.Sequential(*(Block(world) for _ in range(LAYERS)), RMSNorm()).to(dtype)
    torch.manual_seed(9)
    for norm in [m for m in model.modules() if isinstance(m, RMSNorm)]:
        norm.weight.data = (1 + torch.randn(HIDDEN) / 8).to(dtype)  # the same on all ranks
    x = torch.randn(2, 6, HIDDEN, dtype=dtype)
    torch._dynamo.reset()
    results = []
    with autofuse.debug() as report, autofuse.config.patch(policy="always", schedule="every"):
        for call in (model, torch.compile(model, backend=backend_of(backend))):
            own = x.clone().requires_grad_()
            model.zero_grad()
            out = call(own)
            (out.float() * torch.arange(HIDDEN).cos()).sum().backward()
            results.append([out.detach(), own.grad, *(p.grad.clone() for p in model.parameters())])
    kinds = {graph.name: graph.kind for graph in report.graphs}
    tails = [site.tail for site in report.sites if kinds[site.graph] == "forward"]
    return errors(results[1], results[0]), tails


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_llama(dtype: torch.dtype, backend: str, ranks: Ranks) -> None:
    norm = "rms 1e-06 keep; mul %1"
    if dtype == torch.bfloat16:
        norm = "to float32; rms 1e-06 keep; to bfloat16; mul %1"
    for found, tails in ranks(2).run(train, dtype, backend, timeout=180):
        assert max(found) < 1, found
        # The partitioner saves the first sum, too, since it is no dearer than the new residual.
        assert [tail.removeprefix("keep; ") for tail in tails] == [f"add %0; keep; {norm}"] * (2 * LAYERS)


# --- random chains ------------------------------------------------------------------------------------

N = 24
STAGES = (
    "residual",
    "residual",
    "rms",
    "llama",
    "layer norm",
    "bias",
    "scale",
    "relu",
    "clamp",
    "mask",
    "read",
    "view",
    "rsub",
)


@dataclass(frozen=True)
class Stack:
    """`blocks`: by all_reduce, what follows it. `residual`: whether the residual stream is the sum so far."""

    blocks: tuple[tuple[str, ...], ...]
    dtype: torch.dtype
    rows: tuple[int, int]
    stream: bool
    training: bool


STACKS = st.builds(
    Stack,
    st.lists(
        st.lists(st.sampled_from(STAGES), min_size=1, max_size=5).map(tuple), min_size=1, max_size=3
    ).map(tuple),
    st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    st.sampled_from([(1, 1), (2, 3), (1, 8), (4, 4)]),
    st.booleans(),
    st.booleans(),
)


def outputs(stack: Stack, x: Tensor, r: Tensor, v: Tensor, *weights: Tensor) -> list[Tensor]:
    read: list[Tensor] = []
    mask = torch.arange(N).sin() > 0.5
    for stages, w in zip(stack.blocks, weights, strict=True):
        y = ReduceForward.apply(F.linear(x, w), "sum")
        for stage in stages:
            if stage == "residual":
                y = r + y
                r = y if stack.stream else r
            elif stage == "read":
                read.append(y)
            else:
                y = _apply(stage, y, v, mask)
        x = y
    return [x, *read]


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _apply(stage: str, y: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    wide = _wide(y)
    if stage == "rms":
        return F.rms_norm(y, (N,), v, 0.125)
    if stage == "llama":
        return v * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 0.125)).to(y.dtype)
    if stage == "layer norm":
        return F.layer_norm(y, (N,), v, v, 0.125)
    if stage == "view":
        return (y.flatten(0, 1) * 0.5).view(y.shape)
    if stage == "mask":
        return y.masked_fill(mask, 0.25)
    if stage == "clamp":
        return y.clamp(-1, 0.75)
    return {"bias": y + v, "scale": wide.mul(1.5).to(y.dtype), "relu": y.relu(), "rsub": 1 - y}[stage]


def compare(rank: int, world: int, stacks: list[Stack]) -> list[tuple[list[float], list[str]]]:
    """By stack, how much larger than eager's the errors of outputs and gradients are, and the tails.

    Both are compared with float64: of 3 ranks gloo rounds each sum of two.
    """
    found = []
    for stack in stacks:
        torch.manual_seed(0)
        shapes = (*stack.rows, N), (*stack.rows, N), (N,), *[(N, N)] * len(stack.blocks)
        args = [torch.randn(shape) / 2 for shape in shapes]
        torch.manual_seed(1 + rank)
        args[3:] = [torch.randn(N, N) / N**0.5 for _ in stack.blocks]
        args = [a.to(stack.dtype).requires_grad_(stack.training) for a in args]
        exact_args = [a.detach().double().requires_grad_(stack.training) for a in args]
        compiled = torch.compile(outputs, backend=passes_only(schedule="every"))
        results = []
        torch._dynamo.reset()
        with autofuse.debug() as report, torch.set_grad_enabled(stack.training):
            for call, inputs in ((outputs, exact_args), (outputs, args), (compiled, args)):
                out = call(stack, *inputs)
                loss = sum(
                    ((_wide(o).flatten() * torch.arange(o.numel()).cos()).sum() for o in out),
                    torch.zeros(()),
                )
                grads = torch.autograd.grad(loss, inputs, allow_unused=True) if stack.training else ()
                results.append([*(o.detach() for o in out), *(g for g in grads if g is not None)])
        exact, eager, ours = results
        exact = [e.to(t.dtype) for e, t in zip(exact, eager, strict=True)]
        more = [b - a for a, b in zip(errors(eager, exact), errors(ours, exact), strict=True)]
        found.append((more, [site.tail for site in report.sites]))
    return found


def some_stacks(count: int) -> list[Stack]:
    found: list[Stack] = []

    @drawn(count)
    @given(STACKS)
    def collect(stack: Stack) -> None:
        found.append(stack)

    collect()
    return found


@pytest.mark.parametrize("examples", [10, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_random_stacks(world: int, examples: int, ranks: Ranks) -> None:
    stacks = some_stacks(examples)
    for results in ranks(world).run(compare, stacks, timeout=400):
        for stack, (found, tails) in zip(stacks, results, strict=True):
            assert max(found) < 1, (stack, found, tails)
        assert sum(bool(tail) for _, tails in results for tail in tails) >= examples / 2
