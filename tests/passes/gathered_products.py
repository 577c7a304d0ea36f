"""Products whose parts are gathered: logits of an lm_head, and what looks like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from .dense import Build, gathered, group, plain
from .harness import Program

K, N = 12, 10
MG, AG = "matmul_all_gather", "all_gather_matmul"
X3, W2 = (2, 6, K), (N, K)
BF16 = torch.bfloat16


class Head(nn.Module):
    """The end of a language model, its vocabulary cut by columns."""

    def __init__(self, vocabulary: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K)
        self.lm_head = nn.Linear(K, vocabulary, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


def head(
    bias: bool = False, uneven: int = 0, dtype: torch.dtype = torch.float32, grad: bool = False
) -> Build:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(0)  # replicated
        plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        model = Head(N * world - uneven, bias).to(dtype)
        model = parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
        return model, (torch.randn(*X3, dtype=dtype, requires_grad=grad),)

    return build


def logits(dim: int) -> Callable[..., Tensor]:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return gathered(F.linear(x, w), dim)

    return fn


def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return gathered(F.linear(x, w, b), -1).float()


def cast_before(x: Tensor, w: Tensor) -> Tensor:
    return gathered(F.linear(x, w).float(), -1) * 2


def cast_behind(x: Tensor, w: Tensor) -> Tensor:
    whole = funcol.all_gather_tensor(F.linear(x, w), 0, group()).float()
    return torch.cat(whole.chunk(dist.get_world_size()), -1).softmax(-1)


def capped(x: Tensor, w: Tensor) -> Tensor:
    return gathered(F.linear(x, w) / 30.0, -1)


def tanh_before(x: Tensor, w: Tensor) -> Tensor:
    return gathered(F.linear(x, w).tanh(), -1)


def last_token(x: Tensor, w: Tensor) -> Tensor:
    return gathered(F.linear(x, w), -1)[:, -1, :].argmax(-1).float()


def without_padding(x: Tensor, w: Tensor) -> Tensor:
    return gathered(F.linear(x, w), -1)[..., :-1]


def cut_up(*ends: int, leaves: int = 0) -> Callable[..., Tensor]:
    """Reads the gathered columns in slices, as q, k and v of one projection. ends: the columns where slices
    end; the part of a rank may end elsewhere. leaves: how many of the last columns nobody reads."""

    def fn(x: Tensor, w: Tensor) -> list[Tensor]:
        whole = gathered(F.linear(x, w), -1)
        size = whole.shape[-1] - leaves
        spans = zip((0, *ends), (*ends, size), strict=True)
        return [whole[..., first:last].sin() * (i + 1) for i, (first, last) in enumerate(spans)]

    return fn


def split_up(x: Tensor, w: Tensor) -> list[Tensor]:
    whole = gathered(F.linear(x, w), -1)
    return [piece.sin() * (i + 1) for i, piece in enumerate(whole.split([9, 7, whole.shape[-1] - 16], -1))]


def rotated(x: Tensor, w: Tensor) -> list[Tensor]:
    """Of the first slice a half of each head is turned."""
    whole = gathered(F.linear(x, w), -1)
    q = whole[..., :16].unflatten(-1, (2, 8))
    return [q[..., :4].sin(), q[..., 4:], whole[..., 16:].cos()]


def padded_pieces(x: Tensor, w: Tensor) -> list[Tensor]:
    """The part of every rank but the last ends in padding."""
    *pieces, last = gathered(F.linear(x, w), -1).chunk(dist.get_world_size(), -1)
    return [*(piece[..., :-1].sin() for piece in pieces), last.cos()]


def of_one_rank(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_gather_tensor(F.linear(x, w), 0, group()).chunk(dist.get_world_size())[0] + 1


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    out = torch.empty(y.shape[0] * dist.get_world_size(), *y.shape[1:], dtype=y.dtype)
    dist.all_gather_into_tensor(out, y)
    return out.relu()


def into_a_list(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    outs = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, y)
    return torch.cat(outs, -1)


def stacked_and_moved(x: Tensor, w: Tensor) -> Tensor:
    """As vLLM has it: `[W, B, S, N]`, then moved beside the columns."""
    y = F.linear(x, w)
    whole = funcol.all_gather_tensor(y, 0, group()).view(dist.get_world_size(), *y.shape)
    return whole.movedim(0, 2).reshape(*y.shape[:2], -1)


def heads(x: Tensor, w: Tensor) -> Tensor:
    """Gathers the heads of a projection."""
    y = F.linear(x, w).view(2, 6, 2, N // 2).transpose(1, 2).contiguous()
    return gathered(y, 1).relu()


def columns_first(x: Tensor, w: Tensor) -> Tensor:
    return gathered(F.linear(x[0], w).t().contiguous(), 0).t() + 1


def also_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w)
    return gathered(y, -1), y.amax(-1)


def read_inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w)
    return gathered(y * 2, -1), y + 1


def read_twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = funcol.all_gather_tensor(F.linear(x, w), 0, group())
    return torch.cat(y.chunk(dist.get_world_size()), -1), y.sum(0)


def then_multiplied(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.linear(funcol.all_gather_tensor(F.linear(x, w), 0, group()), v)


def batch(x: Tensor, w: Tensor) -> Tensor:
    return gathered(torch.bmm(x, w), -1)


def sum_of_two(x: Tensor, v: Tensor, z: Tensor, w: Tensor) -> Tensor:
    return gathered(F.linear(x, v) + F.linear(z, w), 1)


def fuses(fn: Callable[..., Any], *shapes: Any, **options: Any) -> Program:
    return Program(plain(fn, *shapes), {"inference": [MG]}, **options)


def stays(reason: str, fn: Callable[..., Any], *shapes: Any, **options: Any) -> Program:
    return Program(plain(fn, *shapes), kept={"inference": [reason]}, **options)


def keys_and_values(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Of packed weights; queries stay."""
    q, k, v = F.linear(x, w, b).split([4, 4, 2], -1)
    return q.sin(), gathered(k.contiguous(), 1).sin(), gathered(v.contiguous(), 1).cos()


PROGRAMS: dict[str, Program] = {
    "keys and values": Program(plain(keys_and_values, X3, W2, (N,)), {"inference": [MG, MG]}, worlds=(2, 4)),
    "keys and values, dynamic": Program(
        plain(keys_and_values, X3, W2, (N,)), {"inference": [MG, MG]}, dynamic=True
    ),
    "DTensor's lm_head": Program(head(), {"inference": [MG]}, worlds=(2, 4)),
    "DTensor's lm_head, bias": Program(head(bias=True), {"inference": [MG]}),
    "DTensor's lm_head, bf16": Program(head(dtype=BF16), {"inference": [MG]}, tolerance=0.02),
    "DTensor's lm_head, dynamic": Program(head(), {"inference": [MG]}, dynamic=True),
    "DTensor's lm_head, uneven": Program(head(uneven=1), kept={"inference": ["uneven"]}, worlds=(2, 4)),
    "DTensor's lm_head, training": Program(
        head(grad=True), {"forward": [MG], "backward": ["matmul_all_reduce"]}, grad=True, worlds=(2, 4)
    ),
    "rows": fuses(logits(0), X3, W2, worlds=(2, 4)),
    "middle dim": fuses(logits(1), X3, W2, worlds=(2, 4)),
    "columns": fuses(logits(-1), X3, W2, worlds=(2, 4)),
    "columns of a matrix": fuses(logits(1), (5, K), W2),
    "one row": fuses(logits(-1), (1, 1, K), W2),
    "bias and cast": fuses(biased, X3, W2, (N,)),
    "cast before": fuses(cast_before, X3, W2),
    "cast behind": fuses(cast_behind, X3, W2),
    "capped": fuses(capped, X3, W2),
    "tanh before": stays("no_compute", tanh_before, X3, W2),
    "last token": fuses(last_token, X3, W2),
    "padding is cut off": stays("uneven", without_padding, X3, W2),
    "of one rank": stays("uneven", of_one_rank, X3, W2),
    "cut up": fuses(cut_up(5, 9), X3, W2),
    "cut up at the borders of ranks": fuses(cut_up(10, 15), X3, W2),
    "cut up but for the end": stays("uneven", cut_up(5, 9, leaves=1), X3, W2),
    "split up": fuses(split_up, X3, W2),
    "padding of pieces is cut off": stays("uneven", padded_pieces, X3, W2),
    "cut up and rotated": fuses(rotated, X3, W2),
    "in place": fuses(in_place, X3, W2, worlds=(2, 4)),
    "into a list": fuses(into_a_list, X3, W2),
    "stacked and moved": fuses(stacked_and_moved, X3, W2),
    "heads": fuses(heads, X3, W2),
    "columns first": fuses(columns_first, X3, W2),
    "also returned": fuses(also_returned, X3, W2),
    "read inside": stays("extra_users", read_inside, X3, W2),
    "read twice": fuses(read_twice, X3, W2),
    "then multiplied": Program(plain(then_multiplied, X3, W2, (7, N)), {"inference": [AG]}),
    "batch of matmuls": stays("no_compute", batch, X3, (2, K, N)),
    "sum of two": fuses(sum_of_two, X3, W2, (2, 6, 7), (N, 7)),
    "training": Program(
        plain(logits(-1), X3, W2, grad=True), {"forward": [MG]}, {"backward": ["no_compute"]}, grad=True
    ),
}
