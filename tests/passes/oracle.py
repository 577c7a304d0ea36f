"""What of a chain must be fused, decided from index arrays alone: the chain is run on an arange.

An element of the arange says where in the product `[M, N]` (in the gathered tensor) it comes from. The
scattered (gathered) parts can be expressed if for some `dim` and `outer` the part of every rank `r` is
`t.view(.., outer, world, inner, ..)[.., :, r, :, ..]` of the rows or columns of the matrix, with its elements
in an order that is the same for all ranks.

Where the passes may ask for more, it is a rule:

D  Every tensor that a permute, a split, a scale or a cast reads is a list of digits: its index is a sum of
   one term a dim, each term made of mixed-radix digits of single dims of the source. Views are free: only
   what is done to the tensor afterwards counts. (The passes describe a movement of data as a list of digits,
   with symbolic sizes, step by step; what lies between two scales or casts is described by itself.)
S  What a split or narrow takes apart is one digit, not several that views have put side by side.
W  The whole product (gathered tensor) is reduced (multiplied), not a narrow of it.
X  A gathered tensor is multiplied as it is, not scaled, and in one dtype: all that read it cast it, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .chains import MOVES, Chain, Step, divisors, matrix, move

STAGES = ("scale", "cast", "columns")


@dataclass(frozen=True)
class Verdict:
    """The reason if the site must be kept, and else every `(dim, outer)` that the fused op may name."""

    reason: str | None
    places: tuple[tuple[int, int], ...] = ()


def verdict(chain: Chain) -> Verdict:
    return _gathered(chain) if chain.collective == "all_gather" else _reduced(chain)


def index_of(shape: Sequence[int]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(*shape)


# --- lists of digits ----------------------------------------------------------------------------------


def digits(offsets: Tensor) -> list[tuple[int, int]] | None:
    """`(size, stride)` of the mixed-radix digits that make up a vector of offsets, the innermost first.

    Each is the longest arithmetic run; None if the rest does not repeat it.
    """
    found: list[tuple[int, int]] = []
    while len(offsets) > 1:
        stride = int(offsets[1])
        off = (offsets != torch.arange(len(offsets)) * stride).nonzero()
        size = int(off[0]) if len(off) else len(offsets)
        if len(offsets) % size:
            return None
        rows = offsets.view(-1, size)
        if not torch.equal(rows, rows[:, :1] + rows[:1]):
            return None
        found.append((size, stride))
        offsets = rows[:, 0]
    return found


def is_digit(size: int, stride: int, source: Sequence[int]) -> bool:
    """Is a run of indices into `source` made of digits of its single dims?"""
    low = 1
    for length in reversed(source):
        high = low * length
        if size > 1 and stride < high:
            if stride % low or high % stride:
                return False
            here = min(size, high // stride)
            if size % here or high % (stride * here):
                return False
            size, stride = size // here, high
        low = high
    return size == 1


def dim_digits(index: Tensor, dim: int) -> list[tuple[int, int]] | None:
    return digits(index[tuple(slice(None) if i == dim else 0 for i in range(index.dim()))])


def is_digits(index: Tensor, source: Sequence[int]) -> bool:
    """Is a tensor a list of digits of a tensor of shape `source`?"""
    total = torch.zeros([1] * index.dim(), dtype=torch.long)
    for dim in range(index.dim()):
        found = dim_digits(index, dim)
        if found is None or not all(is_digit(*d, source) for d in found):
            return False
        along = index[tuple(slice(None) if i == dim else slice(0, 1) for i in range(index.dim()))]
        total = total + along
    return torch.equal(total, index)


def leads_with_a_digit(index: Tensor, dim: int, count: int, source: Sequence[int]) -> bool:
    """Is `dim`, cut in `count` equal pieces, cut along one digit of one dim of `source`?"""
    pieces = index.unflatten(dim, (count, -1))
    found = dim_digits(pieces, dim)
    if found is None or len(found) > 1 or not is_digits(pieces, source):
        return False
    edges = [1]
    for length in reversed(source):
        edges.append(edges[-1] * length)
    return all(any(low <= t < high and t * n <= high for low, high in pairwise(edges)) for n, t in found)


# --- the parts of the ranks ---------------------------------------------------------------------------


def places(parts: Tensor, shape: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Every `(dim, outer)` by which the parts `[world, elements]` of a matrix of `shape` can be expressed."""
    world = len(parts)
    found = []
    for dim, length in enumerate(shape):
        for outer in divisors(length // world) if length % world == 0 else []:
            expected = index_of(shape).unflatten(dim, (outer, world, -1)).movedim(dim + 1, 0)
            ordered, order = parts.sort(1)
            alike = torch.equal(order, order[:1].expand_as(order))
            if alike and torch.equal(ordered, expected.reshape(world, -1)):
                found.append((dim, outer))
    return tuple(found)


# --- chains -------------------------------------------------------------------------------------------


@dataclass
class Follower:
    """An index array that goes through a chain; `described` while the rules D and S hold."""

    index: Tensor
    source: tuple[int, ...]
    described: bool = True

    @staticmethod
    def of(shape: Sequence[int]) -> Follower:
        return Follower(index_of(shape), tuple(shape))

    def step(self, step: Step) -> None:
        name, *args = step
        if name in ("permute", "split and cat", "narrow"):
            self.need_digits()
        if name in ("split and cat", "narrow"):
            dim, length = args[:2]
            count = self.index.shape[dim] // length
            self.described &= count == 1 or leads_with_a_digit(self.index, dim, count, self.source)
        if name in MOVES:
            self.index = move(self.index, step)

    def need_digits(self) -> None:
        self.described &= is_digits(self.index, self.source)


def _reduced(chain: Chain) -> Verdict:
    scatter = chain.collective == "reduce_scatter"
    steps = [*chain.before, *_to_front(chain)]
    product, stage = Follower.of(chain.shape), Follower.of(chain.shape)
    described, cast = True, False
    for step in steps:
        product.index = move(product.index, step) if step[0] in MOVES else product.index
        stage.step(step)
        if step[0] in STAGES and not (cast and step[0] == "cast"):  # the second cast changes nothing
            stage.need_digits()
            product.need_digits()
            described &= stage.described
            stage = Follower.of(product.index.shape)
            cast |= step[0] == "cast"
    whole = product.index.numel() == index_of(chain.shape).numel()  # rule W
    world = chain.world if scatter else 1
    for follower in (product, stage):
        follower.index = follower.index.reshape(world, -1)
        follower.need_digits()
    found = places(product.index, chain.shape) if scatter and whole else ()
    if not (whole and described and product.described and stage.described) or (scatter and not found):
        return Verdict("layout")
    return Verdict(None, found)


def _to_front(chain: Chain) -> list[Step]:
    """A scatter along another dim than the first: its parts are put one behind the other."""
    if chain.collective == "all_reduce" or chain.dim == 0:
        return []
    x = index_of(chain.shape)
    for step in chain.before:
        x = move(x, step) if step[0] in MOVES else x
    return [("split and cat", chain.dim, x.shape[chain.dim] // chain.world, 0)]


def _gathered(chain: Chain) -> Verdict:
    part = index_of(chain.shape)
    for step in chain.before:
        part = move(part, step)
    elements = part.numel()
    follower = Follower.of((chain.world * part.shape[0], *part.shape[1:]))
    if chain.dim != 0:
        follower.step(("split and cat", 0, part.shape[0], chain.dim))
    verdicts: list[Verdict] = []
    cast = read = False
    for step in (*chain.after, ("matmul",)):
        name = step[0]
        if name == "scale" or (name == "cast" and read and not cast):  # rule X: the rest reads something else
            break
        cast |= name == "cast"
        if name == "matmul":
            verdicts.append(_multiplied(follower, chain.world, elements))
        read |= name in ("read", "matmul")
        follower.step(step)
    fused = [v for v in verdicts if v.reason is None]
    if fused:
        return Verdict(None, tuple(p for v in fused for p in v.places))
    return Verdict("layout" if verdicts else "no_compute")


def _multiplied(follower: Follower, world: int, elements: int) -> Verdict:
    index = matrix(follower.index)
    if not follower.described or index.numel() != world * elements or not is_digits(index, follower.source):
        return Verdict("layout")
    where = index.flatten().argsort().view(world, elements)  # of every gathered element, in the matrix
    found = places(where, (index.shape[0], index.shape[1]))
    return Verdict(None, found) if found else Verdict("layout")
