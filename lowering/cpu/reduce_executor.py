"""Runs the plans of matmul_all_reduce and matmul_reduce_scatter on CPU ranks that share memory.

The memory of rank r, with tiles as in `tiles.Buffer`:

    direct, oblivious   partial tiles of chunk r, a slot per source; for all_reduce then its reduced tiles
    one-shot            this rank's partial tiles of everything
    ring                arriving fp32 sums, a slot per chunk; for all_reduce then the finished tiles alike
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from autofuse.lowering.cpu.recipes import Recipe, Spec, State, Step, infer_product, run, spec
from autofuse.lowering.cpu.tiles import Buffer, Cut, Run, with_tiles
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Action, Compute, Copy, Plan, Reduce, Send, Signal, Store, Tile, Wait
from autofuse.lowering.reference.product import evaluate
from autofuse.lowering.reference.tail import check_tail, tail_reference
from autofuse.lowering.torch_internals import group_size
from autofuse.native_kernels.cpu import accumulate_rows, reduce_rows

if TYPE_CHECKING:
    from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce
    from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter

    Reduction: TypeAlias = MatmulAllReduce | MatmulReduceScatter

ONE_SHOT_BYTES = 1 << 20
"""In one shot, every rank beyond the second makes each rank read the product once more. An all_reduce runs in
one shot if these reads are of at most this many bytes."""

FEW_ROWS = 256
"""With fewer rows a chunk the product is computed in one piece and then cut: every matmul packs its weight
anew. Measured: two matmuls of 128 rows take 1.09 times as long as one of 256, four of 64 rows 1.35 times; the
copies take a few percent."""

MOST_TILES, TILE_BYTES, TILE_EDGES = 4, 1 << 20, (512, 256)
"""A chunk is cut into tiles so that a tile can be reduced before the next one arrives. The tiles are few and
large (bytes; rows or columns): the matmul of every tile packs an operand anew, the weight for tiles of rows,
x for tiles of columns."""


@dataclass(frozen=True, slots=True)
class Partition:
    """How a product is cut up: along `dim`, at `cut`, into the tiles of `shape`.

    `whole`: it is computed in one piece before the plan starts.
    """

    shape: PlanShape
    dim: int
    cut: Cut
    whole: bool


def partition(
    op: str, m: int, n: int, itemsize: int, dim: int, outer: int, world: int, order: str
) -> Partition:
    """How `P: [m, n]` of `itemsize` bytes an element is cut. Raises ValueError if it cannot be cut evenly.

    `dim` and `outer` say where a reduce_scatter cuts; an all_reduce chooses for itself.
    """
    everywhere = op == "matmul_all_reduce"
    if everywhere:
        dim, outer = (0 if m >= max(4 * n, world) else 1), 1
    elif (m, n)[dim] % (outer * world):
        raise ValueError(
            f"{op}: dim {dim} of [{m}, {n}] cannot be cut into {world} equal parts (outer={outer}); "
            f"pad it to a multiple of {outer * world}"
        )
    cut = Cut.even((m, n)[dim], world, outer)
    one_shot = everywhere and order == "direct" and m * n * itemsize * (world - 2) <= ONE_SHOT_BYTES
    # Columns in stretches would need a copy of the weights: cut up the product instead.
    whole = not one_shot and (cut.inner < FEW_ROWS if dim == 0 else outer > 1)
    if one_shot:  # one chunk of everything, for all ranks
        cut = Cut(1, world, (0, *[(m, n)[dim]] * world))
    extents = tuple((cut.length(c), n) if dim == 0 else (m, cut.length(c)) for c in range(world))
    longest = max(map(cut.length, range(world)))
    chunk_bytes = longest * (m, n)[1 - dim] * itemsize
    tiles = max(1, min(MOST_TILES, chunk_bytes // TILE_BYTES, -(-longest // TILE_EDGES[dim])))
    block = (cut.block(tiles), max(1, n)) if dim == 0 else (max(1, m), cut.block(tiles))
    return Partition(PlanShape(op, order, world, (extents,), block, one_shot), dim, cut, whole)


class Kind(NamedTuple):
    """All of a call that decides how it is computed: its arguments, of tensors shapes and dtypes."""

    op: str
    x: Spec
    w: Spec
    operands: Spec
    product: str
    reduce_op: str
    dim: int
    outer: int
    keep_product: bool
    order: str

    @classmethod
    def of(cls, op: str, args: "Reduction") -> "Kind":
        return cls(
            op, spec(args.x), spec(args.w), spec(args.operands), args.product, args.reduce_op, args.dim,
            args.outer, args.keep_product, args.order,
        )  # fmt: skip

    def partition(self, p: Tensor, world: int) -> Partition:
        m, n = p.shape
        return partition(self.op, m, n, p.dtype.itemsize, self.dim, self.outer, world, self.order)

    def recipe(self, p: Tensor, world: int, rank: int) -> Recipe:
        if self.reduce_op not in ("sum", "avg"):
            raise ValueError(f"{self.op}: reduce_op {self.reduce_op!r} is not supported; use 'sum' or 'avg'")
        m, n = p.shape
        found = self.partition(p, world)
        plan = found.shape.plan(rank)
        out_shape = (m, n) if self.op == "matmul_all_reduce" else plan.chunks[rank]
        builder = _Builder(self, found, plan, p.dtype)
        # Not the product: what is summed may differ, as with a bias that one rank alone adds.
        where = f"dim {found.dim} outer {found.cut.outer}"
        key = f"{self.reduce_op} {p.dtype} [{m}, {n}] {where}, {plan.agreement}"
        steps = tuple(builder.step(*pair) for pair in with_tiles(plan.actions))
        return Recipe((m, n), out_shape, p.dtype, key, builder.nbytes, steps, found.whole)


def reduce_plan_shape(op: str, args: "Reduction") -> PlanShape:
    """What the plans of a call are made from; of the tensors only shapes and dtypes count."""
    kind = Kind.of(op, args)
    return kind.partition(infer_product(kind), group_size(args.group_name)).shape


def run_reduce(op: str, args: "Reduction") -> Any:
    """Both ops, as `docs/ops.md` defines them; NotImplemented for a dtype without a kernel."""
    results = run(op, args, Kind.of(op, args))
    if results is NotImplemented or not args.tail:
        return results
    reduced, *product = results
    check_tail(reduced.shape, args.tail_operands, args.tail, op, args.dim == 0)
    return [*tail_reference(reduced, args.tail_operands, args.tail), *product]


class _Builder:
    """Turns the actions of one plan into steps."""

    def __init__(self, kind: Kind, found: Partition, plan: Plan, dtype: torch.dtype) -> None:
        self.plan, self.cut, self.dim, self.whole = plan, found.cut, found.dim, found.whole
        self.product, self.keep, self.dtype = kind.product, kind.keep_product, dtype
        self.scale = 1 / plan.world if kind.reduce_op == "avg" else 1.0
        self.ring = plan.order.value == "ring"
        self.everywhere = plan.op == "matmul_all_reduce"
        tiles = [plan.tiles(c) for c in range(plan.world)]
        self.partial = Buffer(0, plan.world, tiles, torch.float32 if self.ring else dtype)
        finished = 0 if not self.everywhere or plan.one_shot else plan.world if self.ring else 1
        self.finished = Buffer(self.partial.end, finished, tiles, dtype)
        self.nbytes = self.finished.end

    def step(self, action: Action, awaited: int) -> Step:
        match action:
            case Compute(tile=tile, dest=dest, store=Store.UPDATE, step=stage):
                return self._update(tile, dest, stage)
            case Compute(tile=tile, dest=dest):
                return self._compute(tile, dest)
            case Signal(dest=dest, slot=slot):
                return lambda s: s.call.signal(dest, slot)
            case Wait(source=source, slot=slot):
                return lambda s: s.call.wait(source, slot, awaited)
            case Reduce(tile=tile):
                return self._reduce(tile)
            case Send(tile=tile, dest=dest):
                return self._send(tile, dest)
            case Copy(tile=tile, source=source):
                return self._copy(tile, source)
        raise AssertionError(f"a reduce plan has no {action}")

    def _tile(self, buffer: Buffer, tile: Tile, rank: int, source: int) -> Callable[[State], Tensor]:
        """How to find a tile in the buffer of `rank`."""
        offset, shape, dtype = buffer.offset(tile, source), (len(tile.rows), len(tile.cols)), buffer.dtype
        return lambda s: s.call.tensor(rank, offset, shape, dtype)

    def _run(self, tile: Tile) -> Run:
        """Where the tile lies along the dim of the product that is cut; it spans the other one."""
        return self.cut.run(tile.chunk, tile.rows if self.dim == 0 else tile.cols)

    def _in_output(self, tile: Tile) -> Callable[[State], Tensor]:
        """How to find a tile in the output: the whole matrix for all_reduce, else this rank's chunk."""
        dim = self.dim
        span = tile.rows if dim == 0 else tile.cols
        run = self._run(tile) if self.everywhere else Run(span.start, len(span))
        return lambda s: run.read(s.out, dim)

    def _evaluate(self, tile: Tile) -> Callable[[State, Tensor], object]:
        """How to compute a tile of the product into a given tensor."""
        dim, run, product, keep = self.dim, self._run(tile), self.product, self.keep
        if self.whole:
            return lambda s, target: target.copy_(run.read(s.product, dim))

        def compute(s: State, target: Tensor) -> None:
            x = [run.read(t, 0) for t in s.x] if dim == 0 else s.x
            w = [run.read(t, 1) for t in s.w] if dim == 1 else s.w
            operands = [run.read_operand(t, dim) for t in s.operands]
            evaluate(target, x, w, operands, product)
            if keep:
                run.write(s.product, dim, target)

        return compute

    def _compute(self, tile: Tile, dest: int) -> Step:
        source = tile.chunk if self.plan.one_shot else self.plan.rank
        target, compute = self._tile(self.partial, tile, dest, source), self._evaluate(tile)
        return lambda s: compute(s, target(s))

    def _reduce(self, tile: Tile) -> Step:
        plan, scale, output = self.plan, self.scale, self._in_output(tile)
        if plan.one_shot:
            parts = [self._tile(self.partial, tile, peer, tile.chunk) for peer in range(plan.world)]
        else:
            parts = [self._tile(self.partial, tile, plan.rank, peer) for peer in range(plan.world)]
        if not self.everywhere or plan.one_shot:
            return lambda s: reduce_rows(output(s), [part(s) for part in parts], scale)
        finished = self._tile(self.finished, tile, plan.rank, 0)

        def reduce(s: State) -> None:
            shared = finished(s)
            reduce_rows(shared, [part(s) for part in parts], scale)
            output(s).copy_(shared)

        return reduce

    def _update(self, tile: Tile, dest: int, stage: int) -> Step:
        rank, shape, dtype = self.plan.rank, (len(tile.rows), len(tile.cols)), self.dtype
        compute, scale, output = self._evaluate(tile), self.scale, self._in_output(tile)
        received = self._tile(self.partial, tile, rank, tile.chunk)
        target = self._tile(self.partial, tile, dest, tile.chunk)

        def update(s: State) -> None:
            part = torch.empty(shape, dtype=dtype)
            compute(s, part)
            sums = [received(s), part] if stage else [part]
            if dest == rank:
                reduce_rows(output(s), sums, scale)
            elif stage:
                accumulate_rows(target(s), sums[0], part)
            else:
                target(s).copy_(part)

        return update

    def _send(self, tile: Tile, dest: int) -> Step:
        output = self._in_output(tile)
        target = self._tile(self.finished, tile, dest, tile.chunk)
        if tile.chunk == self.plan.rank:
            return lambda s: target(s).copy_(output(s))
        source = self._tile(self.finished, tile, self.plan.rank, tile.chunk)
        return lambda s: target(s).copy_(source(s))

    def _copy(self, tile: Tile, source: int) -> Step:
        output = self._in_output(tile)
        finished = self._tile(self.finished, tile, source, tile.chunk if self.ring else 0)
        return lambda s: output(s).copy_(finished(s))
