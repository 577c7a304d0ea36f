"""Layouts: how views, permutations, splits and concatenations map the index of a tensor.

A source tensor has dims of sizes `L_0, L_1, ...`. A *digit* `(dim, div, size)` is the mixed-radix digit
`(i_dim // div) % size` of its index. A *layout* gives, for every dim of a derived tensor, the digits that
make up its index, most significant first. Hence `view -> transpose -> clone -> view` regroups a list of
digits, and a collective that cuts a tensor into `world` parts cuts out one digit, wherever views have moved
it.

A layout may also have digits that are `fixed`: the tensor is one piece of a split. Concatenating all pieces
returns the digit to a dim, so that `split -> view -> cat` is a layout too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeAlias

import sympy

Size: TypeAlias = "int | sympy.Expr"


def exact_quotient(a: Size, b: Size) -> Size | None:
    """`a / b` if it is an integer for every value of the symbols; else None. 0 / 0 is 1: of no rows, all are
    one part."""
    if isinstance(a, int) and isinstance(b, int):
        if b == 0:
            return 1 if a == 0 else None
        return a // b if a % b == 0 else None
    if b == 1:
        return a
    quotient = sympy.cancel(sympy.sympify(a) / b)
    if quotient.as_numer_denom()[1] != 1:
        return None
    return int(quotient) if quotient.is_Integer else quotient


def expanded(size: Size) -> Size:
    """The size as a sum of products: `2 * (s - (s + 1) // 2)` becomes `2 * s - 2 * ((s + 1) // 2)`. Equal
    sizes become equal expressions, by which digits are compared."""
    return size if isinstance(size, int) else _expanded(size)


@cache
def _expanded(size: sympy.Expr) -> Size:
    found = sympy.expand_mul(size)
    return int(found) if found.is_Integer else found


def same_size(a: Size, b: Size) -> bool:
    return bool(a == b) or (not (isinstance(a, int) and isinstance(b, int)) and exact_quotient(a, b) == 1)


def same_shape(a: Sequence[Size] | None, b: Sequence[Size] | None) -> bool:
    return a is not None and b is not None and len(a) == len(b) and all(map(same_size, a, b))


def prod(sizes: Iterable[Size]) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return expanded(total)


@dataclass(frozen=True)
class Digit:
    """`(i_dim // div) % size` of the source's index `i`."""

    dim: int
    div: Size
    size: Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "div", expanded(self.div))
        object.__setattr__(self, "size", expanded(self.size))

    def split(self, minor: Size) -> tuple[Digit, Digit] | None:
        """(major, minor) digits; None if `minor` does not divide the size."""
        major = exact_quotient(self.size, minor)
        if major is None:
            return None
        return Digit(self.dim, self.div * minor, major), Digit(self.dim, self.div, minor)

    def joins(self, minor: Digit) -> bool:
        return self.dim == minor.dim and same_size(self.div, minor.div * minor.size)


Digits: TypeAlias = "tuple[Digit, ...]"


def merge(digits: Iterable[Digit]) -> Digits:
    """Join neighbours that are one digit of the source, and drop digits of size 1."""
    merged: list[Digit] = []
    for digit in digits:
        if digit.size == 1:
            continue
        if merged and merged[-1].joins(digit):
            merged[-1] = Digit(digit.dim, digit.div, merged[-1].size * digit.size)
        else:
            merged.append(digit)
    return tuple(merged)


def regroup(digits: Digits, sizes: Sequence[Size]) -> tuple[Digits, ...] | None:
    """Cut a list of digits into groups with the given products, splitting digits where needed."""
    rest = [d for d in reversed(digits) if d.size != 1]
    groups: list[Digits] = []
    for size in sizes:
        group: list[Digit] = []
        missing = size
        while missing != 1:
            if not rest:
                return None
            digit = rest.pop()
            left = exact_quotient(missing, digit.size)
            if left is not None:
                group.append(digit)
                missing = left
                continue
            minor = exact_quotient(digit.size, missing)
            halves = digit.split(minor) if minor is not None else None
            if halves is None:
                return None
            group.append(halves[0])
            rest.append(halves[1])
            missing = 1
        groups.append(merge(group))
    return None if rest else tuple(groups)


def leading_digit(digits: Digits, size: int) -> tuple[Digit, Digits] | None:
    """Cut a dim of these digits into `size` equal parts: the digit that numbers the parts, and the others.

    None if the dim has no such parts, or if no single digit of the source numbers them.
    """
    length = exact_quotient(prod(d.size for d in digits), size)
    groups = None if length is None else regroup(digits, (size, length))
    if groups is None or len(groups[0]) != 1:
        return None
    return groups[0][0], groups[1]


@dataclass(frozen=True)
class Layout:
    """The digits of a source's index that make up each dim of a derived tensor."""

    dims: tuple[Digits, ...]
    fixed: tuple[tuple[Digit, int], ...] = ()

    @staticmethod
    def of(shape: Sequence[Size]) -> Layout:
        return Layout(tuple(merge([Digit(i, 1, size)]) for i, size in enumerate(shape)))

    @property
    def digits(self) -> Digits:
        return tuple(d for dim in self.dims for d in dim)

    @property
    def shape(self) -> tuple[Size, ...]:
        return tuple(prod(d.size for d in dim) for dim in self.dims)

    def reshape(self, shape: Sequence[Size]) -> Layout | None:
        groups = regroup(self.digits, shape) or regroup(merge(self.digits), shape)
        return None if groups is None else Layout(groups, self.fixed)

    def permute(self, order: Sequence[int]) -> Layout:
        return Layout(tuple(self.dims[i] for i in order), self.fixed)

    def unsqueeze(self, dim: int) -> Layout:
        return Layout((*self.dims[:dim], (), *self.dims[dim:]), self.fixed)

    def squeeze(self, dims: Iterable[int]) -> Layout:
        gone = {i for i in dims if not self.dims[i]}
        return Layout(tuple(d for i, d in enumerate(self.dims) if i not in gone), self.fixed)

    def piece(self, dim: int, index: int, count: int) -> Layout | None:
        """Piece `index` of `count` equal pieces along `dim`."""
        if count == 1:
            return self
        leading = leading_digit(self.dims[dim], count)
        if leading is None:
            return None
        digit, rest = leading
        dims = (*self.dims[:dim], rest, *self.dims[dim + 1 :])
        return Layout(dims, (*self.fixed, (digit, index)))

    @staticmethod
    def join(pieces: Sequence[Layout], dim: int) -> Layout | None:
        """The concatenation along `dim` of all pieces of one split, in order."""
        first = pieces[0]
        if len(pieces) == 1:
            return first
        for position, (digit, _) in enumerate(first.fixed):
            rest = first.fixed[:position] + first.fixed[position + 1 :]
            expected = [
                Layout(first.dims, (*first.fixed[:position], (digit, i), *first.fixed[position + 1 :]))
                for i in range(len(pieces))
            ]
            if digit.size == len(pieces) and list(pieces) == expected:
                joined = merge((digit, *first.dims[dim]))
                return Layout((*first.dims[:dim], joined, *first.dims[dim + 1 :]), rest)
        return None


def is_natural(layout: Layout, shape: Sequence[Size]) -> bool:
    """Whether a tensor with this layout has the elements of a tensor of `shape` in their order."""
    return merge(layout.digits) == merge(Layout.of(shape).digits)


def common_digits(*lists: Digits) -> list[Digits] | None:
    """Split digits until all lists hold the same digits, each in its own order; None if impossible."""
    work = [list(digits) for digits in lists]
    cuts: dict[int, set[Size]] = {}
    for digits in work:
        for d in digits:
            cuts.setdefault(d.dim, set()).update((d.div, d.div * d.size))
    refined: list[Digits] = []
    for digits in work:
        out: list[Digit] = []
        for d in digits:
            inner = [c for c in cuts[d.dim] if c != d.div and _divides(d.div, c) and _inside(c, d)]
            inner.sort(key=lambda c: sympy.sympify(c).subs(dict.fromkeys(sympy.sympify(c).free_symbols, 64)))
            edges = [d.div, *inner, d.div * d.size]
            steps: list[Digit] = []
            for low, high in pairwise(edges):
                size = exact_quotient(high, low)
                if size is None:
                    return None
                steps.append(Digit(d.dim, low, size))
            out.extend(reversed(steps))
        refined.append(tuple(x for x in out if x.size != 1))
    if any(set(r) != set(refined[0]) for r in refined):
        return None
    return refined


def _divides(a: Size, b: Size) -> bool:
    return exact_quotient(b, a) is not None


def _inside(cut: Size, digit: Digit) -> bool:
    end = digit.div * digit.size
    return not same_size(cut, end) and _divides(cut, end)


@dataclass(frozen=True)
class Cut:
    """A digit taken out of a layout: dim `dim` was `(outer, digit, inner)`; `rest` is what remains."""

    dim: int
    outer: Size
    digit: Digit
    rest: Layout


def cut_out(layout: Layout, digit: Digit) -> Cut | None:
    """Find `digit`, possibly as part of a larger one, and take it out of the layout."""
    for i, dim in enumerate(layout.dims):
        for j, d in enumerate(dim):
            if d.dim != digit.dim:
                continue
            above = exact_quotient(d.div * d.size, digit.div * digit.size)
            below = exact_quotient(digit.div, d.div)
            if above is None or below is None:
                continue
            before = merge((*dim[:j], Digit(d.dim, digit.div * digit.size, above)))
            after = merge((Digit(d.dim, d.div, below), *dim[j + 1 :]))
            rest = Layout((*layout.dims[:i], before + after, *layout.dims[i + 1 :]), layout.fixed)
            return Cut(i, prod(x.size for x in before), digit, rest)
    return None


def compose(outer: Layout, inner: Layout) -> Layout | None:
    """The layout, relative to the source of `inner`, of a tensor that `outer` describes relative to the
    tensor with layout `inner`."""

    def translate(d: Digit) -> Digits | None:
        if d.dim < 0:
            return (d,)
        length = prod(x.size for x in inner.dims[d.dim])
        above = exact_quotient(length, d.div * d.size)
        groups = None if above is None else regroup(inner.dims[d.dim], (above, d.size, d.div))
        return None if groups is None else groups[1]

    dims: list[Digits] = []
    for dim in outer.dims:
        parts = [translate(d) for d in dim]
        if any(p is None for p in parts):
            return None
        dims.append(merge(x for p in parts if p is not None for x in p))
    fixed = list(inner.fixed)
    for d, index in outer.fixed:
        inner_digits = translate(d)
        if inner_digits is None or len(inner_digits) != 1:
            return None
        fixed.append((inner_digits[0], index))
    return Layout(tuple(dims), tuple(fixed))
