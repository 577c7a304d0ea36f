"""The expert cells: one expert matmul of a mixture-of-experts layer, and the all-to-all beside it.

With W ranks, E experts on each, R rows for the experts of this rank and weights [E, K, N]:

    expert_matmul_all_to_all    combine: R rows [R, K] @ [E, K, N], second matmul (intermediate -> hidden);
                                every row [N] goes back to the rank of its token
    all_to_all_expert_matmul    dispatch: every row [K] goes to the rank of its expert; [R, K] @ [E, K, N],
                                first matmul (hidden -> gate and up together, 2 * intermediate; in some
                                cells they are two weights)

    limit    max(matmul alone, bytes that the busiest rank sends or receives / link rate) + a flag

A token goes to `top_k` experts. Routing is `even`, the same number of rows from every rank to every expert,
or `zipf`: experts are drawn with weights 1, 1/2, 1/3, ..., the same for the tokens of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from autofuse.bench.gpu.exchange.rows import Rates
from autofuse.bench.gpu.ratios import BYTES, FLAG_US


@dataclass(frozen=True)
class Model:
    """Sizes of a layer, over all ranks."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


MODELS = {
    "mixtral-8x7b": Model(4096, 14336, 8, 2),
    "deepseek-v3": Model(7168, 2048, 256, 8),
    "gpt-oss-120b": Model(2880, 2880, 128, 4),
}
COMBINE, DISPATCH = "expert_matmul_all_to_all", "all_to_all_expert_matmul"
ROUTINGS = ("even", "zipf")
TOKENS = (128, 1024, 4096, 16384)
QUICK_TOKENS = (128, 4096)
APART_TOKENS = (128, 4096)
"""Tokens with which gate and up are also measured as two weights."""
SEED = 1


@dataclass(frozen=True)
class Cell:
    """An op at one size. `tokens`: of every rank; `weights`: that have the N columns, side by side."""

    op: str
    model: str
    tokens: int
    world: int
    routing: str
    weights: int = 1

    @property
    def name(self) -> str:
        return f"{self.op} {self.model} tokens={self.tokens} {self.kind}"

    @property
    def kind(self) -> str:
        return self.routing if self.weights == 1 else f"{self.routing} weights={self.weights}"

    @property
    def labels(self) -> dict[str, str]:
        return {
            "model": self.model,
            "tokens a rank": str(self.tokens),
            "routing": self.routing,
            "weights": str(self.weights),
        }

    @property
    def combines(self) -> bool:
        return self.op == COMBINE

    @property
    def even(self) -> bool:
        return self.routing == "even"

    @property
    def experts(self) -> int:
        """Experts of one rank."""
        return MODELS[self.model].experts // self.world

    @property
    def k(self) -> int:
        model = MODELS[self.model]
        return model.intermediate if self.combines else model.hidden

    @property
    def n(self) -> int:
        model = MODELS[self.model]
        return model.hidden if self.combines else 2 * model.intermediate

    @property
    def columns(self) -> int:
        """Columns of each weight."""
        return self.n // self.weights

    @property
    def width(self) -> int:
        """Columns that are exchanged."""
        return MODELS[self.model].hidden

    @property
    def sent(self) -> int:
        """Rows that the tokens of a rank are to all experts."""
        return self.tokens * MODELS[self.model].top_k

    @cached_property
    def counts(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """`counts[s][d][e]`: rows of the tokens of rank s for expert e of rank d; known to all ranks."""
        model = MODELS[self.model]
        if self.even:
            return (((self.sent // model.experts,) * self.experts,) * self.world,) * self.world
        generator = torch.Generator().manual_seed(SEED)
        weights = (torch.randperm(model.experts, generator=generator) + 1.0).reciprocal()
        rows = []
        for _ in range(self.world):
            drawn = torch.multinomial(weights.expand(self.tokens, -1), model.top_k, generator=generator)
            of_rank = drawn.flatten().bincount(minlength=model.experts).view(self.world, self.experts)
            rows.append(tuple(map(tuple, of_rank.tolist())))
        return tuple(rows)

    @property
    def most_rows(self) -> int:
        """For the experts of one rank."""
        return max(sum(sum(source[d]) for source in self.counts) for d in range(self.world))

    @property
    def most_moved(self) -> int:
        """Rows that a rank sends to others or receives from them."""
        ranks = range(self.world)
        parts = [[sum(self.counts[s][d]) for d in ranks] for s in ranks]
        sent = [sum(parts[r]) - parts[r][r] for r in ranks]
        received = [sum(parts[s][r] for s in ranks) - parts[r][r] for r in ranks]
        return max(*sent, *received)

    @property
    def roughly_us(self) -> float:
        flops, weights = 2 * self.most_rows * self.k * self.n, self.experts * self.k * self.n
        return max(flops / 700e6, weights * BYTES / 4e6)

    def limit(self, compute_us: float | None, rates: Rates) -> float | None:
        """Microseconds of a perfect fusion; None if the matmul alone is not known."""
        if compute_us is None:
            return None
        return max(compute_us, self.most_moved * self.width * BYTES / rates.link / 1e3) + FLAG_US


def cells(world: int, quick: bool) -> list[Cell]:
    """All cells, or a few. ValueError for a world that cannot share out the experts."""
    for name, model in MODELS.items():
        if model.experts % world:
            raise ValueError(
                f"{name}: {world} ranks cannot share out {model.experts} experts; start 2, 4 or 8 ranks"
            )
    # Most tokens first: memory for rows that are not dropped is as large as the first call says.
    found = [
        Cell(op, model, tokens, world, routing)
        for op in (COMBINE, DISPATCH)
        for model in MODELS
        for routing in ROUTINGS
        for tokens in reversed(QUICK_TOKENS if quick else TOKENS)
    ]
    apart = [
        replace(cell, weights=2) for cell in found if cell.op == DISPATCH and cell.tokens in APART_TOKENS
    ]
    return found + apart * (not quick)
