"""Runs the plans of matmul_all_gather on CPU ranks that share memory.

A rank computes its product tile by tile in memory that its peers map, and signals every slice. All ranks
copy finished tiles from there to their place in the result, before they compute the next ones.
Memory of rank r, tiles as in `tiles.Buffer`: its own product (direct, oblivious), or one slot for the product
of every rank (ring).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from autofuse.lowering.cpu.recipes import Recipe, Spec, State, Step, infer_product, run, spec
from autofuse.lowering.cpu.reduce_executor import MOST_TILES, TILE_BYTES, TILE_EDGES
from autofuse.lowering.cpu.tiles import Buffer, Cut, Run, with_tiles
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Action, Compute, Copy, Plan, Send, Signal, Span, Tile, Wait
from autofuse.lowering.reference.product import evaluate
from autofuse.lowering.torch_internals import group_size

if TYPE_CHECKING:
    from autofuse.lowering.ops.matmul_all_gather import MatmulAllGather

OP = "matmul_all_gather"


def partition(m: int, n: int, itemsize: int, dim: int, outer: int, world: int, order: str) -> PlanShape:
    """How products `P: [m, n]` of `itemsize` bytes an element are cut into tiles.

    By columns, unless there are many more rows: a tile of columns reads its part of the weight and no other.
    Raises ValueError if `outer` does not divide the gathered dim of a product.
    """
    if (m, n)[dim] % outer:
        raise ValueError(f"{OP}: dim {dim} of a product [{m}, {n}] is not a multiple of outer={outer}")
    along = 0 if m >= 4 * n else 1
    length = (m, n)[along]
    tiles = max(1, min(MOST_TILES, m * n * itemsize // TILE_BYTES, -(-length // TILE_EDGES[along])))
    if along == dim:
        size = Cut.even(length * world, world, outer).block(tiles)
    else:
        size = max(1, -(-length // tiles))
    block = (size, max(1, n)) if along == 0 else (max(1, m), size)
    return PlanShape(OP, order, world, (((m, n),) * world,), block)


class Kind(NamedTuple):
    """All of a call that decides how it is computed: its arguments, of tensors shapes and dtypes."""

    x: Spec
    w: Spec
    operands: Spec
    product: str
    dim: int
    outer: int
    keep_product: bool
    order: str

    @classmethod
    def of(cls, args: "MatmulAllGather") -> "Kind":
        return cls(
            spec(args.x), spec(args.w), spec(args.operands), args.product, args.dim, args.outer,
            args.keep_product, args.order,
        )  # fmt: skip

    def plan_shape(self, p: Tensor, world: int) -> PlanShape:
        m, n = p.shape
        return partition(m, n, p.dtype.itemsize, self.dim, self.outer, world, self.order)

    def recipe(self, p: Tensor, world: int, rank: int) -> Recipe:
        (m, n), dim, outer = p.shape, self.dim, self.outer
        plan = self.plan_shape(p, world).plan(rank)
        cut = Cut.even((m, n)[dim] * world, world, outer)
        builder = _Builder(plan, cut, dim, p.dtype, self.product, self.keep_product)
        key = f"{p.dtype} [{m}, {n}] dim {dim} outer {outer}, {plan.agreement}"
        steps = tuple(builder.step(*pair) for pair in with_tiles(plan.actions))
        out_shape = (m * world, n) if dim == 0 else (m, n * world)
        return Recipe((m, n), out_shape, p.dtype, key, builder.buffer.end, steps)


def publish_plan_shape(args: "MatmulAllGather") -> PlanShape:
    """What the plans of a call are made from; of the tensors only shapes and dtypes count."""
    kind = Kind.of(args)
    return kind.plan_shape(infer_product(kind), group_size(args.group_name))


def run_publish(args: "MatmulAllGather") -> Any:
    """The op, as `docs/ops.md` defines it; NotImplemented for a dtype without a kernel."""
    return run(OP, args, Kind.of(args))


class _Builder:
    """Turns the actions of one plan into steps."""

    def __init__(
        self, plan: Plan, cut: Cut, dim: int, dtype: torch.dtype, product: str, keep_product: bool
    ) -> None:
        self.plan, self.cut, self.dim, self.product, self.keep = plan, cut, dim, product, keep_product
        self.ring = plan.order.value == "ring"
        tiles = [plan.tiles(c) for c in range(plan.world)]
        self.buffer = Buffer(0, plan.world if self.ring else 1, tiles, dtype)

    def step(self, action: Action, awaited: int) -> Step:
        match action:
            case Compute(tile=tile):
                return self._compute(tile)
            case Copy(tile=tile, source=source):
                return self._copy(tile, source)
            case Send(tile=tile, dest=dest):
                held, target = self._tile(tile, self.plan.rank), self._tile(tile, dest)
                return lambda s: target(s).copy_(held(s))
            case Signal(dest=dest, slot=slot):
                return lambda s: s.call.signal(dest, slot)
            case Wait(source=source, slot=slot):
                return lambda s: s.call.wait(source, slot, awaited)
        raise AssertionError(f"a publish plan has no {action}")

    def _tile(self, tile: Tile, rank: int) -> Callable[[State], Tensor]:
        """How to find a tile of a product in the buffer of `rank`."""
        offset = self.buffer.offset(tile, tile.chunk if self.ring else 0)
        shape, dtype = (len(tile.rows), len(tile.cols)), self.buffer.dtype
        return lambda s: s.call.tensor(rank, offset, shape, dtype)

    def _compute(self, tile: Tile) -> Step:
        target, product, keep = self._tile(tile, self.plan.rank), self.product, self.keep
        rows, cols, output = _run(tile.rows), _run(tile.cols), self._output(tile)

        def compute(s: State) -> None:
            value = target(s)
            x = [rows.read(t, 0) for t in s.x]
            w = [cols.read(t, 1) for t in s.w]
            operands = [cols.read_operand(rows.read_operand(t, 0), 1) for t in s.operands]
            evaluate(value, x, w, operands, product)
            output(s, value)
            if keep:
                cols.read(rows.read(s.product, 0), 1).copy_(value)

        return compute

    def _copy(self, tile: Tile, source: int) -> Step:
        output, finished = self._output(tile), self._tile(tile, self.plan.rank if self.ring else source)
        return lambda s: output(s, finished(s))

    def _output(self, tile: Tile) -> Callable[[State, Tensor], object]:
        """How to store a tile of a product at its place in the result."""
        dim = self.dim
        along, other = (tile.rows, tile.cols) if dim == 0 else (tile.cols, tile.rows)
        place, across = self.cut.run(tile.chunk, along), _run(other)
        return lambda s, value: place.write(across.read(s.out, 1 - dim), dim, value)


def _run(span: Span) -> Run:
    return Run(span.start, len(span))
