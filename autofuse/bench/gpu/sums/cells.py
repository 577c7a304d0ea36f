"""The cells of sums: what a rank computes before a reduction adds it over the ranks, where that is no matmul.

With W ranks, T tokens or bags, and N columns of the result:

    experts   tensor parallelism: a rank has K / W of the depth K of the down-projections of all E experts
        multiply   rows of the tokens by the weight of their expert    [T * top, K / W] @ [E, K / W, N]
        add up     P = the weighted rows of the `top` experts of a token                    [T, N]
    tables    a rank has a part of the rows of every table
        pool       P = the rows that a bag names, `pooling` on this rank, of all tables     [T, N]
    vocabulary   a rank has V / W rows of the embedding of a model
        read       P = the rows of the tokens that this rank has, of others 0             [T, N]

    product   a matmul with one more stage
        multiply   P = x @ w, then a bias, a scale or a residual                              [T, N]

    send      the sum of P over the ranks, of all rows (all_reduce) or of T / W rows (reduce_scatter)
    limit     max(P alone, bytes that a rank sends / link rate) + a flag

Operands are bfloat16. P alone is torch's, compiled; it is a part of the limit as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from autofuse.bench.gpu.exchange.rows import Rates
from autofuse.bench.gpu.ratios import BYTES, limit_us

REDUCE, SCATTER = "matmul_all_reduce", "matmul_reduce_scatter"
EXPERTS = {
    "mixtral": (4096, 14336, 8, 2),
    "qwen3-moe": (2048, 768, 128, 8),
    "deepseek-v3": (7168, 2048, 256, 8),
}
"""Columns, depth, experts, and experts of a token."""
TOKENS = (16, 128, 1024, 4096)
TABLES, DIM, TABLE_ROWS = 26, 128, 100_000
"""Tables, columns of each, and rows of each that a rank has."""
BAGS = ((512, 1), (2048, 10), (8192, 1))
"""(bags, pooling on a rank)"""
PRODUCTS = ("bias", "scale", "residual")
PRODUCT = (4096, 14336)
"""Columns and depth, of Llama 8B."""
VOCABULARIES = {"llama-8b": (4096, 128256), "llama-70b": (8192, 128256)}
"""Columns, and rows on all ranks."""


@dataclass(frozen=True)
class Cell:
    """The op at one size. kind: `experts`, `tables`, `vocabulary` or `product`; depth: of all ranks; experts,
    top: of experts alone; tables, pooling: of rows of tables, of which a rank has `table_rows`."""

    op: str
    kind: str
    model: str
    rows: int
    columns: int
    world: int
    depth: int = 0
    experts: int = 0
    top: int = 0
    tables: int = 0
    pooling: int = 0
    table_rows: int = 0

    @property
    def name(self) -> str:
        return f"{self.op} {self.kind} {self.model} rows={self.rows}"

    @property
    def labels(self) -> dict[str, str]:
        return {"rows of": f"{self.kind} {self.model}", "tokens or bags": str(self.rows)}

    @property
    def roughly_us(self) -> float:
        """Of reading the weights, or the rows of tables."""
        weights = min(max(1, self.experts), self.rows * max(1, self.top)) * self.depth / self.world
        weights *= self.columns
        return (weights + self.rows * self.pooling * self.columns) * BYTES / 4e6 + 10

    def limit(self, compute_us: float | None, rates: Rates) -> float | None:
        if compute_us is None:
            return None
        exchanges = 2 if self.op == REDUCE else 1
        return limit_us(compute_us, self.rows * self.columns, self.world, rates.link, exchanges)


def cells(world: int, quick: bool) -> list[Cell]:
    """All cells, or a few. ValueError for a world that cannot share out rows or depths."""
    if any(tokens % world for tokens in TOKENS) or any(
        depth % (8 * world) for _, depth, *_ in EXPERTS.values()
    ):
        raise ValueError(f"{world} ranks cannot share out the tokens and depths; start 2, 4 or 8 ranks")
    found = []
    for op in (REDUCE, SCATTER):
        for model, (columns, depth, experts, top) in EXPERTS.items():
            for tokens in TOKENS:
                if not quick or (model, tokens) in (("mixtral", 128), ("mixtral", 1024)):
                    found.append(Cell(op, "experts", model, tokens, columns, world, depth, experts, top))
        for bags, pooling in BAGS[: 1 if quick else None]:
            found.append(
                Cell(
                    op, "tables", f"pooling={pooling}", bags, TABLES * DIM, world, tables=TABLES,
                    pooling=pooling, table_rows=TABLE_ROWS,
                )
            )  # fmt: skip
        for stage in PRODUCTS:
            for tokens in TOKENS:
                if not quick or (stage, tokens) == ("scale", 128):
                    found.append(Cell(op, "product", stage, tokens, PRODUCT[0], world, depth=PRODUCT[1]))
        for model, (columns, rows) in VOCABULARIES.items():
            for tokens in TOKENS:
                if not quick or (model, tokens) == ("llama-8b", 128):
                    found.append(
                        Cell(
                            op, "vocabulary", model, tokens, columns, world, tables=1, pooling=1,
                            table_rows=rows // world,
                        )
                    )  # fmt: skip
    return found
