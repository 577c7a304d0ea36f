"""Chains of views, permutes, splits, casts, scales and readers round a dense collective, as data.

A chain is drawn by hypothesis, is run by `program`, and is judged by `oracle.verdict`. Steps are tuples:
moves of elements (`("reshape", shape)`, `("permute", order)`, `("split and cat", dim, length, to)`,
`("narrow", dim, length)`, `("clone",)`), `("scale", number)`, `("columns",)` (times a vector), `("cast",)`
(to bfloat16), `("read",)` (returned as well) and `("matmul",)` (of what was gathered).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from .dense import group

Step = tuple
MOVES = ("reshape", "permute", "split and cat", "narrow", "clone")
COLUMNS = 5
"""Of the matmul that reads what was gathered."""
INNER = 7
"""Inner dim of the matmul that is reduced."""


@dataclass(frozen=True)
class Chain:
    """What lies round one collective.

    all_reduce, reduce_scatter: `before` starts at the product, of `shape` `[M, N]`; `after` at the result.
    all_gather: `before` starts at an input of `shape`; `after` at the gathered tensor; what it ends with is
    multiplied, its last dim being the inner one.
    """

    collective: str
    world: int
    shape: tuple[int, int]
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    dim: int = 0
    reduce_op: str = "sum"


def move(x: Tensor, step: Step) -> Tensor:
    name, *args = step
    if name == "reshape":
        return x.reshape(args[0])
    if name == "permute":
        return x.permute(args[0])
    if name == "split and cat":
        dim, length, to = args
        return torch.cat(x.split(length, dim), to)
    if name == "narrow":
        dim, length = args
        return x.narrow(dim, 0, length)
    assert name == "clone"
    return x.clone()


def apply(x: Tensor, moves: tuple[Step, ...] | list[Step]) -> Tensor:
    for step in moves:
        x = move(x, step)
    return x


def walk(x: Tensor, steps: tuple[Step, ...], other: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Apply the steps; `other(x, name)` does what moves no elements and returns the next x."""
    for step in steps:
        name = step[0]
        if name in MOVES:
            x = move(x, step)
        elif name == "scale":
            x = x * step[1]
        elif name == "cast":
            x = x.bfloat16()
        else:
            x = other(x, name)
    return x


class Collectives:
    """The collectives of inference."""

    @staticmethod
    def all_reduce(x: Tensor, op: str) -> Tensor:
        return funcol.all_reduce(x, op, group())

    @staticmethod
    def reduce_scatter(x: Tensor, op: str, dim: int) -> Tensor:
        return funcol.reduce_scatter_tensor(x, op, dim, group())

    @staticmethod
    def all_gather(x: Tensor, dim: int) -> Tensor:
        return _moved(funcol.all_gather_tensor(x, 0, group()), dim)


def _moved(gathered: Tensor, dim: int) -> Tensor:
    """What all_gather_tensor does on a dim other than 0, where torch before 2.13 breaks the graph."""
    return torch.cat(gathered.chunk(group().size()), dim) if dim else gathered


class Trained(Collectives):
    """Those that eager autograd knows."""

    @staticmethod
    def all_reduce(x: Tensor, op: str) -> Tensor:
        return ReduceForward.apply(x, op)

    @staticmethod
    def reduce_scatter(x: Tensor, op: str, dim: int) -> Tensor:
        return funcol.reduce_scatter_tensor_autograd(x, op, dim, group())

    @staticmethod
    def all_gather(x: Tensor, dim: int) -> Tensor:
        return _moved(funcol.all_gather_tensor_autograd(x, 0, group()), dim)


class Replicated(Collectives):
    """Nothing is gathered: the gradient of a replicated tensor is reduced."""

    @staticmethod
    def all_gather(x: Tensor, dim: int) -> Tensor:
        return ReduceBackward.apply(torch.cat([x] * group().size(), dim))


class ReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str) -> Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x, op, group()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return funcol.wait_tensor(funcol.all_reduce(grad.contiguous(), "sum", group()))


Fn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def program(chain: Chain, use: type[Collectives] = Collectives) -> Fn:
    """`fn(x, w, c)` of the arguments that `arguments` makes."""
    return (gather_program if chain.collective == "all_gather" else reduce_program)(chain, use)


def reduce_program(chain: Chain, use: type[Collectives]) -> Fn:
    def fn(x: Tensor, w: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        read: list[Tensor] = []

        def other(y: Tensor, name: str) -> Tensor:
            if name == "columns":
                return y * c.to(y.dtype)
            read.append(y)
            return y

        y = walk(F.linear(x, w), chain.before, other).contiguous()
        if chain.collective == "all_reduce":
            y = use.all_reduce(y, chain.reduce_op)
        else:
            y = use.reduce_scatter(y, chain.reduce_op, chain.dim)
        return walk(y, chain.after, other).relu(), *read

    return fn


def gather_program(chain: Chain, use: type[Collectives]) -> Fn:
    def fn(x: Tensor, w: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        outputs: list[Tensor] = []

        def other(y: Tensor, name: str) -> Tensor:
            outputs.append(multiply(y, w) if name == "matmul" else y)
            return y

        part = walk(x, chain.before, other).contiguous()
        gathered = use.all_gather(part, chain.dim)
        return multiply(walk(gathered, chain.after, other), w), *outputs

    return fn


def matrix(x: Tensor) -> Tensor:
    """What is multiplied: `x: [.., K, 1, ..]` as `[M, K]`. Inductor makes no matmul of inner dims of one."""
    return x.reshape(-1, next((s for s in reversed(x.shape) if s > 1), 1))


def multiply(x: Tensor, w: Tensor) -> Tensor:
    x = matrix(x)
    return torch.mm(x, w[: x.shape[1]].to(x.dtype))


def arguments(chain: Chain, rank: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random arguments of `program`, other ones on every rank."""
    generator = torch.Generator().manual_seed(rank)
    rows, columns = chain.shape
    if chain.collective == "all_gather":
        shapes: tuple = ((rows, columns), (chain.world * rows * columns, COLUMNS), (1,))
    else:
        shapes = ((rows, INNER), (columns, INNER), (columns,))
    x, w, c = (torch.randn(s, generator=generator) for s in shapes)
    return x, w, c


def trained(chain: Chain) -> tuple[Chain, Chain]:
    """The chain without what is no move, and the chain that its backward has."""
    before, after = _plain(chain.before), _plain(chain.after)
    if chain.collective == "all_gather":
        chain = replace(chain, before=before, after=after)
        part = apply(torch.empty(chain.shape), before).shape
        whole = (*part[: chain.dim], chain.world * part[chain.dim], *part[chain.dim + 1 :])
        last = apply(torch.empty(whole), after)
        rows, inner = matrix(last).shape
        undone = (("reshape", tuple(last.shape)), *undo(whole, after))
        return chain, Chain("reduce_scatter", chain.world, (rows, inner), undone, (), chain.dim)
    chain = replace(chain, before=before, after=())
    part = list(apply(torch.empty(chain.shape), before).shape)
    part[chain.dim] //= chain.world
    flat = (torch.Size(part).numel(), 1)
    undone = undo(chain.shape, before)
    return chain, Chain("all_gather", chain.world, flat, (("reshape", tuple(part)),), undone, chain.dim)


def _plain(found: tuple[Step, ...]) -> tuple[Step, ...]:
    return tuple(s for s in found if s[0] in MOVES and s[0] != "narrow")


def undo(shape: tuple[int, ...], found: tuple[Step, ...]) -> tuple[Step, ...]:
    """The moves that take back the moves `found` of a tensor of `shape`."""
    undone: list[Step] = []
    x = torch.empty(shape)
    for step in found:
        name, *args = step
        if name == "permute":
            undone.append(("permute", tuple(args[0].index(i) for i in range(x.dim()))))
        elif name == "split and cat":
            dim, length, to = args
            undone.append(("split and cat", to, length if to == dim else x.shape[to], dim))
        else:
            undone.append(("reshape", tuple(x.shape)))
        x = move(x, step)
    return tuple(reversed(undone))


# --- drawing ------------------------------------------------------------------------------------------


def divisors(n: int) -> list[int]:
    return [f for f in range(1, n + 1) if n % f == 0]


KINDS = ("split dim", "merge dims", "recut", "unsqueeze", "permute", "permute", "split and cat", "clone")


@st.composite
def moves(draw: st.DrawFn, shape: tuple[int, ...], most: int = 4) -> list[Step]:
    """Moves that keep all elements: views that split or merge dims or cut them anew, permutes, splits."""
    steps: list[Step] = []
    current = list(shape)
    for _ in range(draw(st.integers(0, most))):
        kind, rank = draw(st.sampled_from(KINDS)), len(current)
        step: Step = ("clone",)
        if kind == "split dim" and rank < 6:
            dim = draw(st.integers(0, rank - 1))
            minor = draw(st.sampled_from(divisors(current[dim])))
            current[dim : dim + 1] = [current[dim] // minor, minor]
            step = ("reshape", tuple(current))
        elif kind == "merge dims" and rank > 1:
            dim = draw(st.integers(0, rank - 2))
            current[dim : dim + 2] = [current[dim] * current[dim + 1]]
            step = ("reshape", tuple(current))
        elif kind == "recut" and rank > 1:  # need not respect the digits
            dim = draw(st.integers(0, rank - 2))
            both = current[dim] * current[dim + 1]
            minor = draw(st.sampled_from(divisors(both)))
            current[dim : dim + 2] = [both // minor, minor]
            step = ("reshape", tuple(current))
        elif kind == "permute":
            order = draw(st.permutations(range(rank)))
            current = [current[i] for i in order]
            step = ("permute", tuple(order))
        elif kind == "split and cat":
            dim, to = draw(st.integers(0, rank - 1)), draw(st.integers(0, rank - 1))
            count = draw(st.sampled_from([f for f in divisors(current[dim]) if f <= 6]))
            length = current[dim] // count
            current[dim] = length
            current[to] *= count
            step = ("split and cat", dim, length, to)
        elif kind == "unsqueeze" and rank < 6:
            current.insert(draw(st.integers(0, rank)), 1)
            step = ("reshape", tuple(current))
        steps.append(step)
    return steps


@st.composite
def steps(
    draw: st.DrawFn, shape: tuple[int, ...], extras: tuple[Step, ...], most: int = 4, narrow: bool = False
) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """Moves with up to two of `extras` among them, rarely a narrow behind them; and the last shape."""
    found = draw(moves(shape, most))
    if narrow and draw(st.integers(0, 29)) == 17:
        before = apply(torch.empty(shape), found).shape
        dim = draw(st.integers(0, len(before) - 1))
        if before[dim] % 4 == 0:
            found.append(("narrow", dim, before[dim] // 2))
    for extra in draw(st.lists(st.sampled_from(extras), max_size=2)) if extras else []:
        found.insert(draw(st.integers(0, len(found))), extra)
    return tuple(found), _shape_behind(shape, tuple(found))


def _shape_behind(shape: tuple[int, ...], found: tuple[Step, ...]) -> tuple[int, ...]:
    return tuple(apply(torch.empty(shape), [s for s in found if s[0] in MOVES]).shape)


SCALE, CAST, READ, MATMUL = ("scale", 0.5), ("cast",), ("read",), ("matmul",)


@st.composite
def all_reduces(draw: st.DrawFn, world: int) -> Chain:
    shape = (draw(st.sampled_from([4, 6, 12])), draw(st.sampled_from([4, 6, 8])))
    before, middle = draw(steps(shape, (SCALE, CAST, READ), narrow=True))
    after, _ = draw(steps(middle, (SCALE, READ), most=2))
    op = draw(st.sampled_from(["sum", "avg"]))
    return Chain("all_reduce", world, shape, _columns(draw) + before, after, 0, op)


@st.composite
def reduce_scatters(draw: st.DrawFn, world: int) -> Chain:
    shape = (world * draw(st.sampled_from([1, 2, 6])), draw(st.sampled_from([world, 4, 6, 8])))
    before, middle = draw(steps(shape, (SCALE, CAST, READ), narrow=True))
    even = [i for i, s in enumerate(middle) if s % world == 0]
    if not even:
        before, middle, even = (*before, ("reshape", (torch.Size(middle).numel(),))), (-1,), [0]
        if _shape_behind(shape, before)[0] % world:
            before, middle = (), shape
    dim = draw(st.sampled_from(even))
    behind = list(_shape_behind(shape, before))
    behind[dim] //= world
    after, _ = draw(steps(tuple(behind), (SCALE, READ), most=2))
    op = draw(st.sampled_from(["sum", "avg"]))
    return Chain("reduce_scatter", world, shape, _columns(draw) + before, after, dim, op)


@st.composite
def all_gathers(draw: st.DrawFn, world: int) -> Chain:
    shape = (draw(st.sampled_from([2, 4, 6])), draw(st.sampled_from([1, 4, 6])))
    before, part = draw(steps(shape, (), most=2))
    dim = draw(st.integers(0, len(part) - 1))
    whole = (*part[:dim], world * part[dim], *part[dim + 1 :])
    extras = (SCALE, CAST, READ, READ, READ, MATMUL, MATMUL, MATMUL)
    after, _ = draw(steps(whole, extras, narrow=True))
    return Chain("all_gather", world, shape, before, after, dim)


def _columns(draw: st.DrawFn) -> tuple[Step, ...]:
    return (("columns",),) if draw(st.integers(0, 4)) == 0 else ()


CHAINS: dict[str, Callable[[int], st.SearchStrategy[Any]]] = {
    "all_reduce": all_reduces,
    "reduce_scatter": reduce_scatters,
    "all_gather": all_gathers,
}
