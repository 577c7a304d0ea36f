"""Predicted against measured times of the benchmarks on H200.

`h200.json` has the cells of the GPU benchmarks: compute alone (the fastest), compute and NCCL one after the
other, and the fused op, with the file that each comes from. Uneven routing is drawn as the benchmark does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from autofuse.bench.gpu.experts.cells import Cell as Routing
from autofuse.lowering import ops  # noqa: F401  (registers the ops that plans name)
from autofuse.lowering.simulate.problems import Problem

EXPERTS = {  # hidden, intermediate, experts, experts a token
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "deepseek-v3": (7168, 2048, 256, 8),
    "gpt-oss-120b": (2880, 2880, 128, 4),
}
DIM, ROWS = 256, 100_000
"""Columns and rows of every table."""


@dataclass(frozen=True)
class Cell:
    """An op at one size, and its measured microseconds; None: not measured, or not fused.

    Dense: the matmul over all ranks is `[tokens, k] @ [k, n]` (a gather: `[tokens, n] @ [n, k]`). Embedding:
    `tokens` bags of `n` elements on every rank, of `k` rows each. Experts: `label` names model and routing.
    """

    op: str
    label: str
    world: int
    tokens: int
    n: int
    k: int
    compute_us: float | None
    apart_us: float | None
    fused_us: float | None
    source: str

    @property
    def name(self) -> str:
        pooling = f" pooling={self.k}" if "embedding" in self.op else ""
        return f"{self.op} {self.label} tokens={self.tokens}{pooling} world={self.world}"

    @property
    def problem(self) -> Problem:
        op, world, tokens, n, k = self.op, self.world, self.tokens, self.n, self.k
        if op == "embedding_bag_all_to_all":
            return Problem(op, world, tokens // world, k, n)
        if "embedding_bag" in op:
            return Problem(op, world, tokens // world, k, n, n // DIM, height=ROWS)
        if "expert" in op:
            model, routing = self.label.split()
            hidden, intermediate, experts, top = EXPERTS[model]
            rows, count = max(1, tokens * top // experts), experts // world
            counts = None if routing == "even" else Routing(op, model, tokens, world, routing).counts
            inner, cols = (
                (intermediate, hidden) if op == "expert_matmul_all_to_all" else (hidden, 2 * intermediate)
            )
            return Problem(op, world, rows, inner, cols, count, counts=counts)
        if op == "all_gather_matmul":
            return Problem(op, world, tokens, n, k // world)
        if op == "matmul_all_gather":
            return Problem(op, world, tokens, k, n // world)
        return Problem(op, world, tokens, k // world, n)


def cells() -> list[Cell]:
    """The measured cells."""
    return [Cell(**each) for each in json.loads(Path(__file__).with_name("h200.json").read_text())]
