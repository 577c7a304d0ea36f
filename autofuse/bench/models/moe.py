"""A Mixtral-like mixture of experts, dropless: top-2 routing, experts sharded over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from autofuse.bench.models.work import Cell, Work, serving_work, training_work, wider, world_group

TOP = 2


class Experts(nn.Module):
    """A mixture of `experts` gated experts `w2(silu(w1 x) * w3 x)`; each rank has `experts / world` of them.
    The router computes in float32. exact: the experts run as plain matmuls, in the dtype of the weights."""

    w1: nn.Parameter
    w3: nn.Parameter
    w2: nn.Parameter

    def __init__(self, world: int, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.world, self.experts, self.local, self.exact = world, experts, experts // world, False
        self.norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, experts, bias=False)
        for name, shape in {"w1": (dim, hidden), "w3": (dim, hidden), "w2": (hidden, dim)}.items():
            weight = torch.randn(self.local, *shape, dtype=torch.bfloat16) * shape[0] ** -0.5
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        """`x: [tokens, dim]` -> the same."""
        normed = self.norm(x.float())
        scores, chosen = self.gate(normed).softmax(-1).topk(TOP)
        # From here on a row is one (token, expert) pair, sorted by expert: `TOP * tokens` rows.
        experts, order = chosen.flatten().sort(stable=True)
        tokens = order // TOP
        counts = experts.new_zeros(self.experts).scatter_add(0, experts, torch.ones_like(experts))
        # [source, local expert]: the rows that come from every rank for every expert here.
        arriving = _all_to_all(counts).view(self.world, self.local)
        inputs = counts.view(self.world, self.local).sum(1).tolist()
        outputs = arriving.sum(1).tolist()

        rows = _all_to_all(normed.to(self.w1.dtype)[tokens], outputs, inputs)
        # Rows arrive by source, then expert; the grouped matmul wants them by expert.
        expert = torch.arange(self.local, device=x.device).repeat(self.world)
        expert = expert.repeat_interleave(arriving.flatten(), output_size=rows.shape[0])
        by_expert = expert.argsort(stable=True)
        ends = arriving.sum(0).cumsum(0).int()
        sorted_rows = rows[by_expert]
        gated = F.silu(self._matmul(sorted_rows, self.w1, ends)) * self._matmul(sorted_rows, self.w3, ends)
        results = self._matmul(gated, self.w2, ends)
        results = torch.empty_like(rows).index_put((by_expert,), results)
        returned = _all_to_all(results, inputs, outputs)

        weighted = returned.to(scores.dtype) * scores.flatten()[order][:, None]
        return x + torch.zeros_like(normed).index_add(0, tokens, weighted).to(x.dtype)

    def _matmul(self, rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        if not self.exact:
            return F.grouped_mm(rows, w, offs=ends)
        parts = rows.tensor_split(ends[:-1].tolist())
        return torch.cat([part @ each for part, each in zip(parts, w, strict=True)])


def _all_to_all(x: Tensor, outputs: list[int] | None = None, inputs: list[int] | None = None) -> Tensor:
    return all_to_all_single_autograd(x.contiguous(), outputs, inputs, world_group())


def work(trains: bool, experts: int, dim: int, hidden: int, tokens: int, device: torch.device) -> Work:
    dtype = torch.bfloat16  # grouped matmuls are made for it
    with device:
        torch.manual_seed(0)
        gate = nn.Linear(dim, experts, bias=False)
        torch.manual_seed(1 + dist.get_rank())
        model = Experts(dist.get_world_size(), experts, dim, hidden)
        x, target = torch.randn(tokens, dim).to(dtype), torch.randn(tokens, dim)
    model.gate.load_state_dict(gate.state_dict())

    def exact() -> tuple[Experts, Sequence[Tensor]]:
        wide = copy.deepcopy(model)
        wide.exact = True
        for name in ("w1", "w2", "w3"):
            setattr(wide, name, nn.Parameter(getattr(model, name).detach().to(wider(dtype))))
        return wide, [x.to(wider(dtype))]

    def served() -> Sequence[Tensor]:
        wide, inputs = exact()
        return [wide(*inputs)]

    if trains:
        return training_work(model, [x], target, exact)
    return serving_work(model, [x], served)


def cells(quick: bool, world: int) -> list[Cell]:
    name, sizes = ("moe tiny", (2 * world, 32, 64, 64)) if quick else ("mixtral8x7b", (8, 4096, 14336, 4096))
    return [
        Cell(f"{name} layer {what} {sizes[-1]}", partial(work, what == "train", *sizes))
        for what in ("serve", "train")
    ]
