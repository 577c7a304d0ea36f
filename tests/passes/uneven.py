"""Programs whose splits are numbers of each rank: those of rank 0 of 2 are equal, by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .experts import COMBINE, DISPATCH, exchange
from .harness import Program

INNER, COLUMNS = 6, 4


def sends(rank: int, world: int) -> list[int]:
    """Rows for every rank; rank 0 sends and receives 6 for each."""
    return [6 if 0 in (rank, dest) else 8 + 2 * (dest == rank) for dest in range(world)]


def receives(rank: int, world: int) -> list[int]:
    return [sends(source, world)[rank] for source in range(world)]


def swap(x: Tensor, scale: int = 1, back: bool = False) -> Tensor:
    """The exchange with `scale` entries of `x` a row."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [scale * s for s in sends(rank, world)]
    outputs = [scale * s for s in receives(rank, world)]
    return exchange(x, inputs, outputs) if back else exchange(x, outputs, inputs)


def combine(x: Tensor, w: Tensor) -> Tensor:
    return swap(x @ w[0])


def combine_with_bias(x: Tensor, w: Tensor) -> Tensor:
    return swap(torch.addmm(w[1, 0], x, w[0]) * 0.5).relu()


def combine_in_three_dims(x: Tensor, w: Tensor) -> Tensor:
    return swap((x @ w[0]).view(-1, 2, 2))


def combine_flat(x: Tensor, w: Tensor) -> Tensor:
    return swap((x @ w[0]).view(-1), COLUMNS)


def combine_and_read(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w[0]
    return swap(y), y.sin()


def combine_experts(x: Tensor, w: Tensor) -> Tensor:
    return swap(torch.bmm(x.view(2, -1, INNER), w).view(-1, COLUMNS))


def combine_interleaved_experts(x: Tensor, w: Tensor) -> Tensor:
    return swap(torch.bmm(x.view(2, -1, INNER), w).transpose(0, 1).reshape(-1, COLUMNS))


def combine_looped_experts(x: Tensor, w: Tensor) -> Tensor:
    return swap(torch.cat([F.linear(c, w[i].t()) for i, c in enumerate(x.chunk(2))]))


def combine_permuted(x: Tensor, w: Tensor) -> Tensor:
    return swap((x @ w[0])[x[:, 0].argsort()])


def combine_put(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w[0]
    order = x[:, 0].argsort()
    return swap(torch.zeros_like(y).scatter(0, order[:, None].expand(-1, COLUMNS), y))


def dispatch(x: Tensor, w: Tensor) -> Tensor:
    return swap(x) @ w[0]


def dispatch_to_two(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    rows = swap(x)
    return rows @ w[0], torch.addmm(w[1, 0], rows, w[1]), rows.sum(0)


def dispatch_experts(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(swap(x).view(2, -1, INNER), w)


def dispatch_interleaved_experts(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(swap(x).view(-1, 2, INNER).transpose(0, 1), w)


def dispatch_looped_experts(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return tuple(c @ w[i] for i, c in enumerate(swap(x).chunk(2)))


def there_and_back(x: Tensor, w: Tensor) -> Tensor:
    return swap(F.gelu(swap(x) @ w[0]) @ w[1].t(), back=True)


def splits_from_data(x: Tensor, w: Tensor) -> Tensor:
    counts = ((x[:, 0] > 0).long()[:, None] == torch.arange(dist.get_world_size())).sum(0)
    inputs, outputs = counts.tolist(), exchange(counts).tolist()
    rows = x[(x[:, 0] > 0).long().argsort(stable=True)]
    return exchange(F.gelu(exchange(rows, outputs, inputs) @ w[0]) @ w[1].t(), inputs, outputs)


def build(fn: Callable[..., Any], grad: bool = False) -> Callable[[int, int], tuple]:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(rank)
        x = torch.randn(sum(sends(rank, world)), INNER, requires_grad=grad)
        return fn, (x, torch.randn(2, INNER, COLUMNS, requires_grad=grad))

    return build


COMBINES = (
    combine,
    combine_with_bias,
    combine_in_three_dims,
    combine_flat,
    combine_and_read,
    combine_experts,
    combine_interleaved_experts,
    combine_permuted,
    combine_put,
)
DISPATCHES = (
    dispatch,
    dispatch_to_two,
    dispatch_experts,
    dispatch_interleaved_experts,
)
# A rank with an odd number of rows has chunks of unequal lengths.
LOOPS = (combine_looped_experts, dispatch_looped_experts)


def name(fn: Callable[..., Any]) -> str:
    return fn.__name__.replace("_", " ")


PROGRAMS: dict[str, Program] = {
    **{name(fn): Program(build(fn), {"inference": [COMBINE]}) for fn in COMBINES},
    **{name(fn): Program(build(fn), {"inference": [DISPATCH]}) for fn in DISPATCHES},
    **{name(fn): Program(build(fn), kept={"inference": ["uneven"]}) for fn in LOOPS},
    "splits from data": Program(
        build(splits_from_data), {"inference": [DISPATCH, COMBINE]}, {"inference": ["no_compute"]}
    ),
    "there and back": Program(build(there_and_back), {"inference": [DISPATCH, COMBINE]}),
}
