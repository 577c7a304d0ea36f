"""Runs the plans of matmul_all_reduce and matmul_reduce_scatter on CPU ranks that share memory."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor

from autofuse.lowering.cpu.recipes import Recipe, Spec, infer_product, run, spec
from autofuse.lowering.cpu.reduce_steps import ReduceSteps
from autofuse.lowering.cpu.tail_steps import TailSteps
from autofuse.lowering.cpu.tiles import Cut, with_tiles
from autofuse.lowering.notes import place
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.proofs import UNPROVEN, agreed
from autofuse.lowering.reference.bags import of_any_number
from autofuse.lowering.reference.product import is_grouped, parse
from autofuse.lowering.torch_internals import group_size

if TYPE_CHECKING:
    from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce
    from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter

    Reduction: TypeAlias = MatmulAllReduce | MatmulReduceScatter

ONE_SHOT_BYTES = 1 << 20
"""In one shot, every rank beyond the second makes each rank read the product once more. An all_reduce runs in
one shot if these reads are of at most this many bytes."""

FEW_ROWS = 256
"""If a chunk has fewer rows, the product is computed in one piece and then cut, since every matmul packs its
weight anew. Measured: two matmuls of 128 rows take 1.09 times as long as one of 256, four of 64 rows 1.35
times; the copies take a few percent."""

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
    op: str,
    m: int,
    n: int,
    itemsize: int,
    dim: int,
    outer: int,
    world: int,
    order: str,
    owner: bool = False,
    experts: bool = False,
    bags: bool = False,
) -> Partition:
    """How `P: [m, n]` of `itemsize` bytes an element is cut. Raises ValueError if it cannot be cut evenly.

    `dim` and `outer` say where a reduce_scatter cuts; an all_reduce chooses for itself. `owner`: owners of
    rows apply the tail of an all_reduce, which is therefore cut along rows. `experts`: the product is one of
    experts. The rows of a token lie apart, so an all_reduce cuts columns; a reduce_scatter computes the
    product in one piece and then cuts tokens, which was measured to take 0.8 times as long as to look their
    rows up. `bags`: the product is one of embedding bags, which are pooled over all columns."""
    everywhere = op == "matmul_all_reduce"
    if everywhere:
        dim, outer = (0 if owner or bags or (m >= max(4 * n, world) and not experts) else 1), 1
    elif (m, n)[dim] % (outer * world):
        raise ValueError(
            f"{op}: dim {dim} of [{m}, {n}] cannot be cut into {world} equal parts (outer={outer}); "
            f"pad it to a multiple of {outer * world}"
        )
    cut = Cut.even((m, n)[dim], world, outer)
    one_shot = (
        everywhere and not owner and order == "direct" and m * n * itemsize * (world - 2) <= ONE_SHOT_BYTES
    )
    # Columns that lie apart would need a copy of the weights: cut up the product instead.
    stretches = outer > 1 or dim == 1
    few = experts or cut.inner < FEW_ROWS if dim == 0 else outer > 1
    whole = not one_shot and (stretches if bags else few)
    if one_shot:  # one chunk of everything, for all ranks
        cut = Cut(1, world, (0, *[(m, n)[dim]] * world))
    extents = tuple((cut.length(c), n) if dim == 0 else (m, cut.length(c)) for c in range(world))
    longest = max(map(cut.length, range(world)))
    chunk_bytes = longest * (m, n)[1 - dim] * itemsize
    tiles = max(1, min(MOST_TILES, chunk_bytes // TILE_BYTES, -(-longest // TILE_EDGES[dim])))
    block = (cut.block(tiles), max(1, n)) if dim == 0 else (max(1, m), cut.block(tiles))
    return Partition(PlanShape(op, order, world, (extents,), block, one_shot), dim, cut, whole)


class Kind(NamedTuple):
    """The key of a recipe: the arguments of a call, with shapes and dtypes in place of tensors."""

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
    tail: str = ""
    tail_operands: Spec = ()
    owner: bool = False

    @classmethod
    def of(cls, op: str, args: "Reduction") -> "Kind":
        """The kind of a call, if its proof holds on all ranks."""
        owner = (
            bool(args.tail)
            and args.proof not in ("", UNPROVEN)
            and op == "matmul_all_reduce"
            and args.order != "ring"
        )
        x, operands, pooling = args.x, args.operands, parse(args.product).pooling
        if pooling is not None:
            x, operands = of_any_number(x, operands, pooling)
        return cls(
            op, spec(x), spec(args.w), spec(operands), args.product, args.reduce_op, args.dim,
            args.outer, args.keep_product, args.order, args.tail, spec(args.tail_operands), owner,
        )  # fmt: skip

    def partition(self, p: Tensor, world: int) -> Partition:
        m, n = p.shape
        return partition(
            self.op, m, n, p.dtype.itemsize, self.dim, self.outer, world, self.order, self.owner,
            is_grouped(self.product), parse(self.product).pooling is not None,
        )  # fmt: skip

    def recipe(self, p: Tensor, world: int, rank: int) -> Recipe:
        if self.reduce_op not in ("sum", "avg"):
            raise ValueError(f"{self.op}: reduce_op {self.reduce_op!r} is not supported; use 'sum' or 'avg'")
        m, n = p.shape
        found = self.partition(p, world)
        plan = found.shape.plan(rank)
        out_shape = (m, n) if self.op == "matmul_all_reduce" else plan.chunks[rank]
        given = (
            plan, found.cut, found.dim, found.whole, self.product, self.reduce_op, self.keep_product, p.dtype,
            out_shape,
        )  # fmt: skip
        made = (
            TailSteps(self.tail, self.tail_operands, self.owner, *given) if self.tail else ReduceSteps(*given)
        )
        # The key leaves the product out, which may differ between ranks: one rank alone may add a bias.
        where = f"dim {found.dim} outer {found.cut.outer}"
        key = f"{self.reduce_op} {p.dtype} [{m}, {n}] {where}, {plan.agreement}"
        # Nor is a tail in it that every rank applies for itself: ranks then read only sums of their peers.
        if self.owner:
            key += f", tail {self.tail!r} by owners"
        steps = made.steps(with_tiles(plan.actions))
        return Recipe((m, n), made.sums, p.dtype, key, made.nbytes, steps, found.whole, made.results)


def reduce_plan_shape(op: str, args: "Reduction") -> PlanShape:
    """The arguments of the plans of a call. Only shapes and dtypes of its tensors count."""
    kind = Kind.of(op, args)
    return kind.partition(infer_product(kind), group_size(args.group_name)).shape


def run_reduce(op: str, args: "Reduction") -> Any:
    """Both ops, as `docs/ops.md` defines them; NotImplemented for a dtype without a kernel."""
    kind = Kind.of(op, args)
    if args.tail and args.proof and op == "matmul_all_reduce":
        proven = agreed(args.group_name, _told(args.site, kind), args.proof)
        kind = kind._replace(owner=kind.owner and proven)
    return run(op, args, kind, args.tail_operands)


@lru_cache(maxsize=2048)
def _told(site: str, kind: Kind) -> str:
    """Ranks compare the proofs of a call under this name. It contains neither the contracted dim nor the
    summands behind the product, since ranks may have different ones."""
    p = infer_product(kind)
    m, n = p.shape
    return f"{kind.op} at {place(site)}, {kind.reduce_op} {p.dtype} [{m}, {n}], tail {kind.tail!r}"
