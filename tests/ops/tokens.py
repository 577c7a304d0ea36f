"""Tokens, experts and splits for the tests of the expert ops, the same on every rank; fp64 references."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """`count` experts a rank. Fixed: `outer * c` rows an expert from each rank. Dropless: `sends[a][b]` rows
    from rank a to rank b, in random positions if `shuffled`."""

    world: int
    count: int = 2
    c: int = 5
    outer: int = 1
    listed: bool = False
    terms: int = 1
    bias: bool = False
    sends: tuple[tuple[int, ...], ...] | None = None
    shuffled: bool = False
    dtype: torch.dtype = torch.float32
    order: str = "direct"
    k: int = 24
    n: int = 17

    def generator(self, rank: int) -> torch.Generator:
        return torch.Generator().manual_seed(7 + rank)

    def randn(self, rank: int, salt: int, *shape: int) -> Tensor:
        """Numbers that the dtype of the case holds exactly."""
        generator = torch.Generator().manual_seed(1000 * salt + rank)
        return torch.randn(shape, generator=generator).to(self.dtype)

    @property
    def experts(self) -> int:
        return self.count if self.listed else 0

    def weights(self, rank: int) -> list[Tensor]:
        """[count, K, N] per term."""
        return [self.randn(rank, 10 + i, self.count, self.k, self.n) for i in range(self.terms)]

    def biases(self, rank: int) -> list[Tensor]:
        """[count, N] per term."""
        return [self.randn(rank, 20 + i, self.count, self.n) for i in range(self.terms * self.bias)]

    def received(self, rank: int) -> list[int]:
        """Dropless: rows that the rank of the experts has from every rank."""
        assert self.sends is not None
        return [row[rank] for row in self.sends]

    def sizes(self, rank: int) -> list[list[int]]:
        """Dropless: rows by source and expert of `rank`."""
        generator = self.generator(50 + rank)
        sizes = []
        for rows in self.received(rank):
            choice = torch.randint(0, self.count, (rows,), generator=generator)
            sizes.append(choice.bincount(minlength=self.count).tolist())
        return sizes

    def offsets(self, rank: int) -> Tensor:
        return torch.tensor(self.sizes(rank)).sum(0).cumsum(0).to(torch.int32)

    def positions(self, rank: int) -> Tensor:
        """Row i of the experts (by expert, then source) is row positions[i] of what was received."""
        total = sum(self.received(rank))
        if self.shuffled:
            return torch.randperm(total, generator=self.generator(90 + rank))
        sizes = torch.tensor(self.sizes(rank))
        starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view(sizes.shape)
        spans = [
            torch.arange(int(starts[s, e]), int(starts[s, e] + sizes[s, e]))
            for e in range(self.count)
            for s in range(self.world)
        ]
        return torch.cat(spans)

    def splits(self, rank: int) -> tuple[list[int], list[int]]:
        """Rows that `rank` sends and receives in a dispatch; none for fixed capacity."""
        return (list(self.sends[rank]), self.received(rank)) if self.sends is not None else ([], [])


def listed(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    """Batched tensors in the form of the case."""
    return [t for batch in tensors for t in batch.unbind(0)] if case.listed else tensors


def grouped(case: Case, rank: int, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ w + bias` per expert of `rank`: x is [E, R, K] or dropless [rows, K]."""
    if case.sends is None:
        return x @ w + (0 if bias is None else bias.unsqueeze(1))
    ends = case.offsets(rank).tolist()
    rows = [x[a:b] @ w[e] for e, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]
    if bias is not None:
        rows = [r + bias[e] for e, r in enumerate(rows)]
    return torch.cat(rows)


def gather(case: Case, rank: int, x: list[Tensor]) -> Tensor:
    """The dispatch of the inputs `x` of all ranks: X of `rank`."""
    if case.sends is None:
        parts = torch.stack([t[rank] for t in x])  # [source, E, outer * c, K]
        w, e, _, k = parts.shape
        return parts.view(w, e, case.outer, case.c, k).permute(1, 2, 0, 3, 4).reshape(e, -1, k)
    received = torch.cat([t.split(list(case.sends[s]))[rank] for s, t in enumerate(x)])
    return received[case.positions(rank)]


def spread(case: Case, rank: int, p: list[Tensor]) -> Tensor:
    """The combine of the products `p` of all ranks: y of `rank`."""
    if case.sends is None:
        parts = []
        for t in p:
            e, _, n = t.shape
            view = t.view(e, case.outer, case.world, case.c, n)[:, :, rank]
            parts.append(view.reshape(e, case.outer * case.c, n))
        return torch.stack(parts)
    parts = []
    for source, t in enumerate(p):
        sent = t.new_zeros(t.shape).index_add(0, case.positions(source), t)
        parts.append(sent.split(case.received(source))[rank])
    return torch.cat(parts)


def close(got: Tensor, want: Tensor, terms: int, dtype: torch.dtype) -> None:
    """`|error| <= eps(dtype) (3 |want| + 3 sqrt(terms)) + 8 terms eps(fp32)` for sums of `terms` products of
    normals, of which every term of a sum is rounded to the dtype."""
    assert got.shape == want.shape, (got.shape, want.shape)
    eps, small = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    bound = eps * (3 * want.abs() + 3 * terms**0.5) + 8 * terms * small
    error = (got.double() - want).abs()
    assert bool((error <= bound).all()), f"error {float((error - bound).max())} above its bound"
