"""Programs of mixtures of experts: fixed capacity and dropless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Program

COMBINE, DISPATCH = "expert_matmul_all_to_all", "all_to_all_expert_matmul"
LOCAL, D, H, TOKENS, CAPACITY, TOP = 2, 16, 24, 24, 6, 2


def exchange(x: Tensor, output: list[int] | None = None, inputs: list[int] | None = None) -> Tensor:
    assert dist.group.WORLD is not None
    if x.requires_grad:
        world = dist.get_world_size()
        equal = [x.shape[0] // world] * world
        return funcol.all_to_all_single_autograd(x, output or equal, inputs or equal, dist.group.WORLD)
    return funcol.wait_tensor(funcol.all_to_all_single(x, output, inputs, dist.group.WORLD))


class FixedCapacity(nn.Module):
    """Every expert takes `CAPACITY` tokens of every rank: [experts, capacity, D] is exchanged both ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.world = how, dist.get_world_size()
        self.gate = nn.Linear(D, LOCAL * self.world, bias=False)
        if how == "loop":
            self.up = nn.ModuleList(nn.Linear(D, H) for _ in range(LOCAL))
            self.down = nn.ModuleList(nn.Linear(H, D) for _ in range(LOCAL))
        else:
            self.w1 = nn.Parameter(torch.randn(LOCAL, D, H) * 0.1)
            self.w2 = nn.Parameter(torch.randn(LOCAL, H, D) * 0.1)
            self.w3 = nn.Parameter(torch.randn(LOCAL, D, H) * 0.1)

    def experts(self, x: Tensor) -> Tensor:
        """[world, local, capacity, D], source-major, to the same of results."""
        if self.how == "loop":
            parts = [self.down[i](F.gelu(self.up[i](c))) for i, c in enumerate(x.chunk(LOCAL, dim=1))]
            return torch.cat(parts, 1)
        h = x.transpose(0, 1).reshape(LOCAL, -1, D)
        if self.how == "gated":
            h = F.silu(torch.bmm(h, self.w1)) * torch.bmm(h, self.w3)
        else:
            h = F.gelu(torch.bmm(h, self.w1))
        return torch.bmm(h, self.w2).view(LOCAL, self.world, -1, D).transpose(0, 1).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = scores.argmax(-1)
        hot = F.one_hot(chosen, LOCAL * self.world).to(x.dtype)
        place = ((hot.cumsum(0) - 1) * hot).sum(-1).long()
        kept = (place < CAPACITY).to(x.dtype)[:, None]
        slot = F.one_hot(place.clamp(max=CAPACITY - 1), CAPACITY).to(x.dtype) * kept
        dispatch = hot.unsqueeze(-1) * slot.unsqueeze(1)
        weights = dispatch * scores.gather(1, chosen[:, None])[..., None]
        sent = torch.einsum("tec,td->ecd", dispatch, x)
        received = exchange(sent).view(self.world, LOCAL, CAPACITY, D)
        back = exchange(self.experts(received).view(LOCAL * self.world, CAPACITY, D).contiguous())
        return torch.einsum("tec,ecd->td", weights, back)


def expert_major(x: Tensor, counts: Tensor, world: int, sorts: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that came rank by rank, sorted by expert; their old places; rows of each expert."""
    table = counts.view(world, LOCAL)
    if sorts:
        expert = (
            torch.arange(LOCAL, device=x.device)
            .repeat(world)
            .repeat_interleave(counts, output_size=x.shape[0])
        )
        places = expert.argsort(stable=True)
        return x[places], places, table.sum(0)
    starts = (counts.cumsum(0) - counts).view(world, LOCAL)
    sizes, starts = table.t().reshape(-1), starts.t().reshape(-1)
    segment = torch.arange(sizes.shape[0], device=x.device).repeat_interleave(sizes, output_size=x.shape[0])
    rows = torch.arange(x.shape[0], device=x.device)
    places = starts[segment] + rows - (sizes.cumsum(0) - sizes)[segment]
    return x[places], places, table.sum(0)


class Dropless(nn.Module):
    """Top-2 routing; splits depend on the data; experts as grouped matmuls.

    Rows are brought into the order of experts by a sort, or by places that are counted; the rows of experts
    are counted by a scatter, or by a histogram. wide: rows are exchanged in float32, as the program has it,
    and cast for the experts (torchtitan). negative: places are counted from the last row. inverted: the
    results are chosen by the inverse of the places, so that the backward puts their gradients at places.
    chained: the splits that are received are computed from a split that is sent.
    """

    def __init__(
        self, sorts: bool = False, wide: bool = False, negative: bool = False, inverted: bool = False,
        chained: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.sorts, self.wide, self.negative, self.inverted = sorts, wide, negative, inverted
        self.chained = chained
        self.world = dist.get_world_size()
        self.gate = nn.Linear(D, LOCAL * self.world, bias=False)
        self.w1 = nn.Parameter(torch.randn(LOCAL, D, H) * 0.1)
        self.w3 = nn.Parameter(torch.randn(LOCAL, D, H) * 0.1)
        self.w2 = nn.Parameter(torch.randn(LOCAL, H, D) * 0.1)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        count = LOCAL * self.world
        top, chosen = self.gate(x).float().softmax(-1).topk(TOP, -1)
        if self.sorts:
            counts = chosen.new_zeros(count).scatter_add(0, chosen.view(-1), torch.ones_like(chosen.view(-1)))
        else:
            counts = torch.histc(chosen.float().view(-1), bins=count, min=0, max=count).long()
        order = chosen.view(-1).argsort(stable=True)
        token, score = order // TOP, top.view(-1)[order]
        with torch.no_grad():
            received = exchange(counts if self.sorts else counts.view(self.world, -1)).reshape(-1)
            leaving, arriving = (each.view(self.world, -1).sum(1) for each in (counts, received))
            inputs = leaving.tolist()
            outputs = (arriving + inputs[0] - leaving[0] if self.chained else arriving).tolist()
        sent = x.float() if self.wide else x
        rows = exchange(sent[token], outputs, inputs)
        arrived = rows
        rows, places, sizes = expert_major(rows, received, self.world, self.sorts)
        if self.negative:
            places = places - arrived.shape[0]
            rows = arrived[places]
        ends = sizes.cumsum(0).to(torch.int32)
        rows = rows.bfloat16()
        h = F.silu(torch._grouped_mm(rows, self.w1, offs=ends)) * torch._grouped_mm(rows, self.w3, offs=ends)
        y = torch._grouped_mm(h, self.w2, offs=ends).type_as(sent)
        if self.inverted:
            chosen_from = torch.empty_like(places)
            chosen_from[places] = torch.arange(places.shape[0], device=places.device)
            back = y[chosen_from]
        else:
            back = y.new_empty(arrived.shape)
            back[places] = y
        back = exchange(back, inputs, outputs)
        back = (back.float() * score[:, None]).to(x.dtype)
        return torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, D), back)


class OneExpert(nn.Module):
    """One expert a rank, as a grouped matmul of one group: rows are multiplied in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.world = dist.get_world_size()
        self.gate = nn.Linear(D, self.world, bias=False)
        self.w1 = nn.Parameter(torch.randn(1, D, H) * 0.1)
        self.w2 = nn.Parameter(torch.randn(1, H, D) * 0.1)
        self.to(torch.bfloat16)

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
        """Scores and tokens of the rows in the order in which they are sent, the end of the rows that arrive,
        and the rows to and from every rank."""
        score, chosen = self.gate(x).float().softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        with torch.no_grad():
            counts = F.one_hot(chosen, self.world).sum(0)
            received = exchange(counts)
            inputs, outputs = counts.tolist(), received.tolist()
        return score[order][:, None], order, received.sum(0, keepdim=True).to(torch.int32), inputs, outputs

    def expert(self, rows: Tensor, end: Tensor) -> Tensor:
        return torch._grouped_mm(torch._grouped_mm(rows, self.w1, offs=end).relu(), self.w2, offs=end)

    def forward(self, x: Tensor) -> Tensor:
        score, order, end, inputs, outputs = self.routed(x)
        back = exchange(self.expert(exchange(x[order], outputs, inputs), end), inputs, outputs)
        return torch.zeros_like(x).index_add(0, order, (back.float() * score).to(x.dtype))


def model(
    make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, grad: bool = False
) -> Callable[[int, int], tuple[Callable[..., Any], tuple[Any, ...]]]:
    def build(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.manual_seed(rank)
        return make(), (torch.randn(TOKENS, D, dtype=dtype, requires_grad=grad),)

    return build


BOTH = {"inference": [DISPATCH, COMBINE]}
TRAINED = {"forward": [DISPATCH, COMBINE], "backward": [DISPATCH, COMBINE]}
COUNTS = {"inference": ["no_compute"]}


def dropless(worlds: tuple[int, ...] = (2,), **how: bool) -> Program:
    """A training step in bfloat16."""
    build = model(lambda: Dropless(**how), torch.bfloat16, grad=True)
    return Program(build, TRAINED, {"forward": ["no_compute"]}, grad=True, tolerance=0.03, worlds=worlds)


PROGRAMS: dict[str, Program] = {
    "fixed capacity": Program(model(lambda: FixedCapacity("bmm")), BOTH, worlds=(2, 4)),
    "fixed capacity, training": Program(model(lambda: FixedCapacity("bmm"), grad=True), TRAINED, grad=True),
    "fixed capacity, gated, training": Program(
        model(lambda: FixedCapacity("gated"), grad=True), TRAINED, grad=True
    ),
    "loop": Program(model(lambda: FixedCapacity("loop")), BOTH, worlds=(2, 4)),
    "loop, training": Program(model(lambda: FixedCapacity("loop"), grad=True), TRAINED, grad=True),
    "dropless": Program(model(Dropless, torch.bfloat16), BOTH, COUNTS, tolerance=0.02, worlds=(2, 4)),
    "dropless, training": dropless(worlds=(2, 4)),
    "dropless, sorted, training": dropless(sorts=True),
    "dropless, negative places, training": dropless(negative=True),
    "dropless, inverted places, training": dropless(inverted=True),
    "dropless, wide, training": dropless(wide=True),
    "one expert, training": Program(
        model(OneExpert, torch.bfloat16, grad=True),
        TRAINED,
        {"forward": ["no_compute"]},
        grad=True,
        tolerance=0.03,
    ),
}
