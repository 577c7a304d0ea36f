"""Runs the plans of all_gather_matmul on CPU ranks that share memory.

A part is multiplied in place: in the memory of the rank that published it, or, in ring order, in the memory
that the left neighbour forwarded it to. With few rows a part, or if the gathered dim is contracted, the parts
are first gathered into X and multiplied once: the weights are read once, and the roundings are those of the
unfused graph.

Memory of rank r, tiles as in `tiles.Buffer`: its own part (direct, oblivious), or a slot a part (ring).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from autofuse.lowering.cpu.matmul import multiply
from autofuse.lowering.cpu.tiles import Buffer, Cut, Run, with_tiles
from autofuse.lowering.cpu.workspace import Call
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Action, Compute, Plan, Send, Signal, Tile, Wait
from autofuse.native_kernels.cpu import DTYPES

if TYPE_CHECKING:
    from autofuse.lowering.ops.all_gather_matmul import AllGatherMatmul

FEW_ROWS = 256
"""Parts with shorter stretches of rows are gathered before they are multiplied: a matmul packs its weight."""

TILE_BYTES, TILE_EDGE = 1 << 20, 512
"""A part is cut into tiles, at most 4, of at least this size."""


@dataclass(slots=True)
class State:
    """The tensors of one call. `gathered` is empty unless it is needed."""

    call: Call
    x: Tensor
    w: Sequence[Tensor]
    bias: Sequence[Tensor | None]
    outputs: list[Tensor]
    gathered: Tensor


Step: TypeAlias = Callable[[State], object]


@dataclass(frozen=True, slots=True)
class Partition:
    """How X is cut up: at `cut`, into the tiles of `shape`. `late`: the product follows after the plan."""

    shape: PlanShape
    cut: Cut
    late: bool


def partition(part: Sequence[int], itemsize: int, dim: int, outer: int, world: int, order: str) -> Partition:
    """How X is cut whose parts have shape `part` and `itemsize` bytes an element.

    Raises ValueError if `outer` does not divide the gathered dim of a part.
    """
    if part[dim] % outer:
        raise ValueError(
            f"all_gather_matmul: dim {dim} of a part {tuple(part)} is not a multiple of outer={outer}"
        )
    rows, columns = part
    cut = Cut.even(part[dim] * world, world, outer)
    late = dim == 1 or cut.inner < FEW_ROWS or columns == 0  # of which the plan has no tiles
    tiles = max(1, min(4, rows * columns * itemsize // TILE_BYTES, part[dim] // TILE_EDGE))
    block = (cut.block(tiles), max(1, columns)) if dim == 0 else (max(1, rows), cut.block(tiles))
    chunks = ((rows, columns),) * world
    return Partition(PlanShape("all_gather_matmul", order, world, (chunks,), block), cut, late)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A call of given shapes. `late`: the product is computed in one piece after the plan."""

    shape: tuple[int, int]
    key: str
    nbytes: int
    late: bool
    steps: tuple[Step, ...]


def run_gather(args: "AllGatherMatmul") -> list[Tensor]:
    """The op, as `docs/ops.md` defines it; NotImplemented for a dtype without a kernel."""
    x, w, keep = args.x, args.w, args.keep_gathered
    if x.dtype not in DTYPES:
        return NotImplemented
    workspace = workspace_for(args.group_name)
    recipe = _recipe(
        x.shape, x.dtype, args.dim, args.outer, keep, workspace.world, workspace.rank, args.order
    )
    rows, _ = recipe.shape
    biases = [b if b.numel() else None for b in args.bias] or [None] * len(w)
    outputs = [x.new_empty((rows, wi.shape[1])) for wi in w]
    gathered = x.new_empty(recipe.shape if keep or recipe.late else (0, 0))
    with workspace.call("all_gather_matmul", args.site, recipe.key, recipe.nbytes) as call:
        state = State(call, x, w, biases, outputs, gathered)
        for step in recipe.steps:
            step(state)
    if recipe.late:
        for out, wi, b in zip(outputs, w, biases, strict=True):
            multiply(out, gathered, wi, b)
    return [*outputs, gathered] if keep else outputs


@lru_cache(maxsize=1024)
def _recipe(
    part: torch.Size,
    dtype: torch.dtype,
    dim: int,
    outer: int,
    keep_gathered: bool,
    world: int,
    rank: int,
    order: str,
) -> Recipe:
    found = partition(part, dtype.itemsize, dim, outer, world, order)
    m, k = (part[0] * world, part[1]) if dim == 0 else (part[0], part[1] * world)
    plan = found.shape.plan(rank)
    builder = _Builder(plan, found.cut, dim, dtype, found.late, keep_gathered or found.late)
    key = f"{dtype} [{m}, {k}] dim {dim} outer {outer}, {plan.agreement}"
    steps = tuple(builder.step(*pair) for pair in with_tiles(plan.actions))
    return Recipe((m, k), key, builder.buffer.end, found.late, steps)


class _Builder:
    """Turns the actions of one plan into steps."""

    def __init__(self, plan: Plan, cut: Cut, dim: int, dtype: torch.dtype, late: bool, gathers: bool) -> None:
        self.plan, self.cut, self.dim, self.late, self.gathers = plan, cut, dim, late, gathers
        tiles = [plan.tiles(c) for c in range(plan.world)]
        self.buffer = Buffer(0, 1 if plan.pulls else plan.world, tiles, dtype)

    def step(self, action: Action, awaited: int) -> Step:
        match action:
            case Send(tile=tile, dest=dest):
                return self._send(tile, dest)
            case Compute(tile=tile):
                return self._compute(tile)
            case Signal(dest=dest, slot=slot):
                return lambda s: s.call.signal(dest, slot)
            case Wait(source=source, slot=slot):
                return lambda s: s.call.wait(source, slot, awaited)
        raise AssertionError(f"a gather plan has no {action}")

    def _tile(self, tile: Tile, rank: int) -> Callable[[State], Tensor]:
        """How to find a tile of a part in the buffer of `rank`."""
        offset = self.buffer.offset(tile, 0 if self.plan.pulls else tile.chunk)
        shape, dtype = (len(tile.rows), len(tile.cols)), self.buffer.dtype
        return lambda s: s.call.tensor(rank, offset, shape, dtype)

    def _source(self, tile: Tile) -> Callable[[State], Tensor]:
        """Where this rank reads a tile: its own part is the input itself."""
        if tile.chunk != self.plan.rank:
            return self._tile(tile, tile.chunk if self.plan.pulls else self.plan.rank)
        dim, span = self.dim, tile.rows if self.dim == 0 else tile.cols
        own = Run(span.start, len(span))
        return lambda s: own.read(s.x, dim)

    def _send(self, tile: Tile, dest: int) -> Step:
        source, target = self._source(tile), self._tile(tile, dest)
        return lambda s: target(s).copy_(source(s))

    def _compute(self, tile: Tile) -> Step:
        dim, source, late, gathers = self.dim, self._source(tile), self.late, self.gathers
        run = self.cut.run(tile.chunk, tile.rows if dim == 0 else tile.cols)

        def compute(s: State) -> None:
            part = source(s)
            if gathers:
                run.write(s.gathered, dim, part)
            if late:
                return
            for out, w, whole_bias in zip(s.outputs, s.w, s.bias, strict=True):
                bias = None if whole_bias is None else run.read_operand(whole_bias, 0)
                if run.count == 1:
                    multiply(run.read(out, 0), part, w, bias)
                else:
                    run.write(out, 0, torch.mm(part, w) if bias is None else torch.addmm(bias, part, w))

        return compute
