"""The calls of `bench host`: each fused op, and the ops that it replaces, as a user writes them.

    matmul_all_reduce, matmul_reduce_scatter      mm, collective, wait
    matmul_all_reduce with a tail                 mm, collective, wait, residual, RMSNorm; compiled only
    all_gather_matmul, matmul_all_gather          collective, wait, mm; mm, collective, wait
    embedding_bag_all_to_all                      a bag for each table, cat, all_to_all, wait
    expert_matmul_all_to_all and its mirror       batched matmul, all_to_all, wait; the reverse

The sizes are those of a layer of Llama-3 8B, of a small DLRM and of a small MoE: the host's time depends on
the way of a call and not on its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from autofuse import ops

Inputs: TypeAlias = Sequence[Tensor]
Call: TypeAlias = Callable[[Inputs], Tensor | tuple[Tensor, ...]]

DTYPE = torch.bfloat16
HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128256
TABLES, ROWS, DIM, POOLING = 64, 1000, 128, 4
EXPERTS, WIDTH = 2, 1024


@dataclass(frozen=True)
class Cell:
    """A call. make: makes the operands of one call; shared: makes those that all calls share. ours: calls the
    fused op, None if only a graph can have it; replaced: the ops that it replaces. Both take the operands of
    the call, then the shared ones."""

    op: str
    size: str
    make: Callable[[torch.device], Inputs]
    shared: Callable[[torch.device], Inputs]
    ours: Call | None
    replaced: Call

    @property
    def name(self) -> str:
        return f"{self.op} {self.size}"


def cells(world: int) -> list[Cell]:
    """All of them. ValueError for a world that cannot share out the sizes."""
    if HIDDEN % (16 * world) or VOCABULARY % (8 * world):
        raise ValueError(f"{world} ranks cannot share out the sizes of the calls; start 2, 4 or 8 ranks")
    found = [_all_reduce(tokens, world) for tokens in (16, 512)]
    found += [_normed(16, world)]
    found += [_reduce_scatter(tokens, world) for tokens in (64, 512)]
    found += [_gather(tokens, world) for tokens in (64, 512)]
    return [*found, _logits(16, world), _bags(2048, world), _combine(256, world), _dispatch(256, world)]


def _drawn(*shapes: tuple[int, ...]) -> Callable[[torch.device], Inputs]:
    return lambda device: [torch.randn(shape, device=device, dtype=DTYPE) for shape in shapes]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _all_reduce(tokens: int, world: int) -> Cell:
    def replaced(given: Inputs) -> Tensor:
        return funcol.wait_tensor(funcol.all_reduce(given[0] @ given[1], "sum", _world()))

    return Cell(
        "matmul_all_reduce", f"{tokens} tokens", _drawn((tokens, HIDDEN // world)),
        _drawn((HIDDEN // world, HIDDEN)), lambda given: ops.matmul_all_reduce(*given), replaced,
    )  # fmt: skip


def _normed(tokens: int, world: int) -> Cell:
    """Own operands: x and the residual; shared: the weights of the matmul and of the norm."""

    def replaced(given: Inputs) -> tuple[Tensor, Tensor]:
        x, residual, w, gain = given
        total = residual + funcol.wait_tensor(funcol.all_reduce(x @ w, "sum", _world()))
        return total, F.rms_norm(total, [HIDDEN], gain, 1e-6)

    return Cell(
        "matmul_all_reduce", f"{tokens} tokens, residual, norm",
        _drawn((tokens, HIDDEN // world), (tokens, HIDDEN)), _drawn((HIDDEN // world, HIDDEN), (HIDDEN,)),
        None, replaced,
    )  # fmt: skip


def _reduce_scatter(tokens: int, world: int) -> Cell:
    def replaced(given: Inputs) -> Tensor:
        return funcol.wait_tensor(funcol.reduce_scatter_tensor(given[0] @ given[1], "sum", 0, _world()))

    return Cell(
        "matmul_reduce_scatter", f"{tokens} tokens", _drawn((tokens, HIDDEN // world)),
        _drawn((HIDDEN // world, HIDDEN)), lambda given: ops.matmul_reduce_scatter(*given), replaced,
    )  # fmt: skip


def _gather(tokens: int, world: int) -> Cell:
    def replaced(given: Inputs) -> Tensor:
        return funcol.wait_tensor(funcol.all_gather_tensor(given[0], 0, _world())) @ given[1]

    def ours(given: Inputs) -> Tensor:
        y = ops.all_gather_matmul(*given)
        assert isinstance(y, Tensor)
        return y

    return Cell(
        "all_gather_matmul", f"{tokens} tokens", _drawn((tokens // world, HIDDEN)),
        _drawn((HIDDEN, INTERMEDIATE // world)), ours, replaced,
    )  # fmt: skip


def _logits(tokens: int, world: int) -> Cell:
    def replaced(given: Inputs) -> Tensor:
        gathered = funcol.wait_tensor(funcol.all_gather_tensor(given[0] @ given[1], 0, _world()))
        return torch.cat(gathered.chunk(world), 1)

    return Cell(
        "matmul_all_gather", f"{tokens} tokens", _drawn((tokens, HIDDEN)),
        _drawn((HIDDEN, VOCABULARY // world)), lambda given: ops.matmul_all_gather(*given), replaced,
    )  # fmt: skip


def _bags(batch: int, world: int) -> Cell:
    """Own operands: the indices of every table; shared: offsets, then the tables."""

    def indices(device: torch.device) -> Inputs:
        return [torch.randint(0, ROWS, (batch * POOLING,), device=device) for _ in range(TABLES)]

    def shared(device: torch.device) -> Inputs:
        tables = [torch.randn(ROWS, DIM, device=device, dtype=DTYPE) for _ in range(TABLES)]
        return [torch.arange(0, batch * POOLING, POOLING, device=device), *tables]

    def ours(given: Inputs) -> Tensor:
        return ops.embedding_bag_all_to_all(
            given[TABLES + 1 :], given[:TABLES], [given[TABLES]] * TABLES, layout="bsc"
        )

    def replaced(given: Inputs) -> Tensor:
        bags = zip(given[:TABLES], given[TABLES + 1 :], strict=True)
        pooled = torch.cat([F.embedding_bag(i, table, given[TABLES], mode="sum") for i, table in bags], 1)
        received = funcol.wait_tensor(funcol.all_to_all_single(pooled, None, None, _world()))
        return received.view(world, -1, TABLES * DIM).transpose(0, 1).reshape(-1, world * TABLES * DIM)

    return Cell("embedding_bag_all_to_all", f"{TABLES} tables", indices, shared, ours, replaced)


def _combine(rows: int, world: int) -> Cell:
    def replaced(given: Inputs) -> Tensor:
        y = torch.bmm(given[0], given[1]).view(EXPERTS, world, -1, WIDTH).transpose(0, 1).contiguous()
        return funcol.wait_tensor(funcol.all_to_all_single(y, None, None, _world()))

    return Cell(
        "expert_matmul_all_to_all", f"{rows} rows", _drawn((EXPERTS, world * rows, 2 * WIDTH)),
        _drawn((EXPERTS, 2 * WIDTH, WIDTH)), lambda given: ops.expert_matmul_all_to_all(*given), replaced,
    )  # fmt: skip


def _dispatch(rows: int, world: int) -> Cell:
    def replaced(given: Inputs) -> Tensor:
        x = funcol.wait_tensor(funcol.all_to_all_single(given[0], None, None, _world()))
        return torch.bmm(x.transpose(0, 1).reshape(EXPERTS, world * rows, WIDTH), given[1])

    def ours(given: Inputs) -> Tensor:
        y = ops.all_to_all_expert_matmul(*given)
        assert isinstance(y, Tensor)
        return y

    return Cell(
        "all_to_all_expert_matmul", f"{rows} rows", _drawn((world, EXPERTS, rows, WIDTH)),
        _drawn((EXPERTS, WIDTH, 2 * WIDTH)), ours, replaced,
    )  # fmt: skip
