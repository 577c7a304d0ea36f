"""The work of the ways of the expert ops: sizes of kernels, and of the ops that they replace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofuse.lowering.gpu.choice.work import LEAST, Collective, Product, Tiles, Work
from autofuse.native_kernels.cuda.host.gemm import BM
from autofuse.native_kernels.cuda.kernels.dropless_combine import height_of
from autofuse.native_kernels.gpu.memory import cdiv

if TYPE_CHECKING:
    from .ways import DroplessProblem, ExpertProblem


def _height(rows: int) -> int:
    """Rows of a tile."""
    return next((height for height in (16, 32, 64) if rows <= height), BM)


def _exchanged(p: ExpertProblem | DroplessProblem, rows: int) -> float:
    """Bytes that a rank exchanges of rows: products of a combine, operands of a dispatch."""
    width = p.columns if p.op.startswith("expert_matmul") else p.k
    return 2.0 * rows * width * (p.world - 1) / p.world


def _tiles(p: ExpertProblem | DroplessProblem, rows: int, high: int, down: float, config: Any) -> Tiles:
    """rows: of all experts; high: rows of a tile; down: how many tiles lie one below the other."""
    turns = 1 if p.gated else p.weights
    columns = cdiv(p.columns * p.weights // turns, config.bn) * turns
    sent = _exchanged(p, rows)
    memory = 2.0 * (p.k * p.n + rows * (p.k + p.columns * p.outputs))
    copied = getattr(config, "copied", False)
    return Tiles(
        f"{p.op} clusters copied" if copied else f"{p.op} clusters",
        round(down * columns),
        2 * max(high, LEAST) * config.bn * p.k,
        (high / config.along + config.bn / config.across) * p.k * 2,
        memory,
        sent,
        2 * sent if p.op.startswith("expert_matmul") else 0.0,
        1,
        config.slices * (p.world - 1) if copied else 0,
    )


def fixed_work(config: Any, p: ExpertProblem) -> Work:
    high = _height(p.rows)
    return _tiles(p, p.experts * p.rows, high, p.experts * cdiv(p.rows, high), config)


def dropless_work(config: Any, p: DroplessProblem) -> Work:
    """An expert ends anywhere among the rows of a cluster: on average half of them lie behind its end."""
    high = height_of(p.m, p.experts)
    return _tiles(p, p.m, high, p.m / high + p.experts * config.across / 2, config)


def _nccl(p: ExpertProblem | DroplessProblem, rows: int, name: str) -> tuple[Work, ...]:
    """rows: of an expert."""
    sent = _exchanged(p, p.experts * rows)
    moved = 4 * sent * p.world / max(1, p.world - 1)  # rows are brought into order on both sides
    product = Product(rows, p.k, p.columns * p.weights, p.experts, f"experts {name}")
    return product, Collective(f"nccl all_to_all {name}", sent, p.world, moved)


def fixed_nccl_work(p: ExpertProblem) -> tuple[Work, ...]:
    """A batched matmul and NCCL."""
    return _nccl(p, p.rows, p.op)


def dropless_nccl_work(p: DroplessProblem) -> tuple[Work, ...]:
    """A matmul for every expert, or a grouped one, and NCCL."""
    return _nccl(p, cdiv(p.m, p.experts), p.op)
