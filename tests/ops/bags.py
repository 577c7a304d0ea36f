"""Tables and bags for the tests of the embedding ops, the same on every rank, and their fp64 references."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from autofuse.lowering.cpu.workspaces import workspace_for


@dataclass(frozen=True)
class Case:
    """Tables of every rank and the options of the op. `pooling`: most indices of a bag; `bare`: how many
    tables of a rank, the first ones, have no rows, and bags nothing of them."""

    dims: tuple[tuple[int, ...], ...]
    layout: str = "bsc"
    b: int = 6
    pooling: int = 5
    rows: int = 37
    table: torch.dtype = torch.float32
    wire: torch.dtype = torch.float32
    index: torch.dtype = torch.int64
    mode: str = "sum"
    weighted: bool = False
    last_offset: bool = False
    padding: int = -1
    order: str = "direct"
    bare: int = 0

    @property
    def columns(self) -> list[int]:
        return [sum(d) for d in self.dims]

    @property
    def options(self) -> tuple[int, bool, int]:
        return ("sum", "mean", "max").index(self.mode), self.last_offset, self.padding


Inputs = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def inputs_of(case: Case, rank: int) -> Inputs:
    """weights, indices, offsets and per_sample_weights of `rank`; some bags are empty."""
    generator = torch.Generator().manual_seed(100 + rank)
    weights, indices, offsets, samples = [], [], [], []
    bags = case.b * len(case.dims)
    for t, dim in enumerate(case.dims[rank]):
        rows = case.rows if t >= case.bare else 0
        sizes = torch.randint(0, (case.pooling if rows else 0) + 1, (bags,), generator=generator)
        ends = sizes.cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends])
        n = int(ends[-1])
        weights.append(torch.randn(rows, dim, generator=generator).to(case.table))
        indices.append(torch.randint(0, max(1, rows), (n,), generator=generator).to(case.index))
        offsets.append((starts if case.last_offset else starts[:-1]).to(case.index))
        if case.weighted:
            samples.append(torch.rand(n, generator=generator).to(case.table))
    return weights, indices, offsets, samples


def pooled(case: Case, inputs: Inputs, sparse: bool = False) -> list[Tensor]:
    """The bags of every table, in the dtype of its weights; differentiable."""
    weights, indices, offsets, samples = inputs
    return [
        F.embedding_bag(
            i.long(),
            w,
            o.long(),
            mode=case.mode,
            sparse=sparse,
            per_sample_weights=samples[t] if samples else None,
            include_last_offset=case.last_offset,
            padding_idx=case.padding if case.padding >= 0 else None,
        )
        for t, (w, i, o) in enumerate(zip(weights, indices, offsets, strict=True))
    ]


def doubled(inputs: Inputs) -> Inputs:
    """The same inputs with weights and samples in fp64."""
    weights, indices, offsets, samples = inputs
    return [w.double() for w in weights], indices, offsets, [s.double() for s in samples]


def arrange(case: Case, whole: list[list[Tensor]], rank: int) -> Tensor:
    """What `rank` gets in the layout of the case, from the bags `whole[source][table]: [B, D]`."""
    mine = slice(rank * case.b, (rank + 1) * case.b)
    parts = [[t[mine] for t in tables] for tables in whole]
    if case.layout == "bsc":
        return torch.cat([t for tables in parts for t in tables], 1)
    if case.layout == "sbc":
        return torch.cat([torch.cat(tables, 1).flatten() for tables in parts])
    stacked = torch.stack([torch.stack(tables) for tables in parts])  # [W, T, b, D]
    return stacked.permute(*("stbd".index(c) for c in case.layout))


def spoil(group: str) -> None:
    """Fills this rank's shared memory with NaN; nobody else may be in a call."""
    workspace = workspace_for(group)
    for _ in range(2):  # the buffers alternate
        with workspace.call("spoil", "test", "", 1 << 20) as call:
            call.tensor(workspace.rank, 0, (1 << 18,), torch.float32).fill_(torch.nan)
            call.exchange([])


def bound(case: Case, reference: Tensor) -> Tensor:
    """`|error| <= eps(wire) |y| + eps(table) |y| + 4 n eps(fp32)`, n terms of size at most 4 in a sum."""
    small = 8 * max(1, case.pooling) * 4 * torch.finfo(torch.float32).eps
    return (torch.finfo(case.wire).eps + torch.finfo(case.table).eps) * reference.abs() + small
