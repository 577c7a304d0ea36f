"""Where the rows of an expert cell lie on one rank, in both orders, and the steps between the two.

exchange order    by rank of the token, then expert: as rows arrive in a dispatch and leave in a combine
expert order      by expert, then rank of the token: as they are multiplied
"""

from __future__ import annotations

import torch
from torch import Tensor

from autofuse.bench.gpu.exchange.work import exchange
from autofuse.bench.gpu.experts.cells import Cell


class Route:
    """`ends`: [E], int32, where the rows of each expert end; `positions`: [R], the place in exchange order
    of every row in expert order; `inverse`: the reverse; `expert`: [R], of every row in expert order.

    `held`: rows that the rank has for its experts by rank of the token; `sent`: rows of its own tokens by
    rank of the expert; `per_expert`: rows of each expert; `by_expert`: [E, W], the same by rank of the token.
    """

    def __init__(self, cell: Cell, rank: int, device: torch.device) -> None:
        by_source = torch.tensor([source[rank] for source in cell.counts])  # [W, E]
        self.cell = cell
        self.held: list[int] = by_source.sum(1).tolist()
        self.sent: list[int] = [sum(part) for part in cell.counts[rank]]
        self.rows = sum(self.held)
        self.rank, self.by_expert = rank, by_source.t()
        of_expert = by_source.sum(0)
        self.per_expert: list[int] = of_expert.tolist()
        self.ends = of_expert.cumsum(0).to(device, torch.int32)
        self.expert = torch.arange(cell.experts).repeat_interleave(of_expert).to(device)
        # A row's expert and, among the rows of one expert, its rank sort exchange order into expert order.
        experts = torch.arange(cell.experts).repeat(cell.world).repeat_interleave(by_source.flatten())
        self.positions = experts.argsort(stable=True).to(device)
        self.inverse = self.positions.argsort()

    def to_experts(self, rows: Tensor, out: Tensor) -> Tensor:
        """Exchange order to expert order: [R, columns]."""
        return self._in_order(rows, out, self.cell.world, self.positions)

    def to_exchange(self, rows: Tensor, out: Tensor) -> Tensor:
        """Expert order to exchange order: [R, columns]."""
        return self._in_order(rows, out, self.cell.experts, self.inverse)

    def _in_order(self, rows: Tensor, out: Tensor, runs: int, places: Tensor) -> Tensor:
        """The rows at `places`: [R, columns]. Of even cells they are `runs` x others blocks, transposed."""
        if not self.cell.even:
            return torch.index_select(rows, 0, places, out=out)
        others = self.cell.world * self.cell.experts // runs
        blocks = rows.view(runs, others, -1, rows.shape[1]).transpose(0, 1)
        out.view(blocks.shape).copy_(blocks)
        return out

    def dispatch(self, rows: Tensor, out: Tensor) -> Tensor:
        """Rows of this rank's tokens, by expert, to the ranks of their experts, in exchange order."""
        return exchange(out, rows, *((None, None) if self.cell.even else (self.held, self.sent)))

    def combine(self, rows: Tensor, out: Tensor) -> Tensor:
        """Rows in exchange order back to the ranks of their tokens, by expert."""
        return exchange(out, rows, *((None, None) if self.cell.even else (self.sent, self.held)))
