"""matmul_all_reduce and matmul_reduce_scatter on GPUs where their product is `bags`.

Each rank has some rows of every table, and pools these rows. The op sums the pooled rows over the ranks. This
file has the problem, its ways, and the functions that `FusedOp.cuda` calls. Choices depend only on arguments
that are equal on all ranks. The numbers of rows and of indices are not.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.calls import GpuCall, once
from autofuse.lowering.gpu.choice.kernel import Kernel, Launch, Way
from autofuse.lowering.gpu.choice.launcher import Launcher
from autofuse.lowering.gpu.dense.pooled import PooledProblem, kernel_work
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, workspace_of
from autofuse.lowering.ops.matmul_all_reduce import OP as REDUCE
from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce
from autofuse.lowering.ops.matmul_reduce_scatter import MatmulReduceScatter
from autofuse.lowering.reference.product import parse
from autofuse.native_kernels.gpu.memory import Need
from autofuse.native_kernels.triton.embedding_tables import Places, Tables
from autofuse.native_kernels.triton.exchange_bags import BagSumsConfig, bag_sums_needs, launch_exchange_bags

from .call import tables_of
from .run import variant_of
from .ways import TORCH_NCCL
from .work import LIKELY_POOLING

Arguments: TypeAlias = MatmulAllReduce | MatmulReduceScatter


@dataclass(frozen=True)
class ReducedProblem(PooledProblem):
    """`rows` bags; columns of all tables."""

    replaced: ClassVar[str] = TORCH_NCCL
    kind: ClassVar[str] = "bags"

    @property
    def exchanges(self) -> Sequence[Kernel[ReducedProblem, BagSumsConfig]]:
        return (BAG_SUMS,)

    @property
    def summands(self) -> int:
        return LIKELY_POOLING


# --- Ways -------------------------------------------------------------------------------------------------


def _configs(problem: ReducedProblem) -> Iterator[BagSumsConfig]:
    """Configurations with different numbers of rows that a multiprocessor loads at a time. In one exchange a
    rank receives W / 2 times the bytes of two exchanges."""
    config = BagSumsConfig(once=problem.everywhere and problem.world == 2)
    yield config
    yield replace(config, tile=256, unroll=8, warps=1, per_sm=32)
    yield replace(config, tile=2048, unroll=2, per_sm=6)
    if problem.everywhere and problem.world > 2:
        yield replace(config, once=True)


def _needs(config: BagSumsConfig, p: ReducedProblem) -> Need:
    return bag_sums_needs(p.rows, p.columns, p.dtype.itemsize, p.world, p.everywhere, config)


def _launch(
    at: Launch, config: BagSumsConfig, descriptors: Tensor, tables: Tables, places: Places, out: Tensor,
    mean: bool, everywhere: bool,
) -> None:  # fmt: skip
    launch_exchange_bags(
        at.memory, descriptors, tables, places, out, mean, everywhere, config, at.site, at.compile_only
    )


BAG_SUMS: Kernel[ReducedProblem, BagSumsConfig] = Kernel(
    "bags",
    _configs,
    needs=_needs,
    launch=_launch,
    work=lambda config, p: kernel_work(config.once, p),
    source="triton/exchange_bags.py",
)


# --- Calls ------------------------------------------------------------------------------------------------


class Reduced:
    """Calls of one kind: `reduced(tables)`."""

    def __init__(
        self, workspace: GpuWorkspace, way: Way, problem: ReducedProblem, variant: Hashable,
        dims: Sequence[int], mean: bool, site: str,
    ) -> None:  # fmt: skip
        self._workspace, self._problem, self._mean = workspace, problem, mean
        self._launcher = Launcher(workspace, way, problem.op, site, problem, (variant, mean))
        self._places = Places(problem.rows, tuple(accumulate(dims, initial=0))[:-1], problem.columns, ())
        rows = problem.rows if problem.everywhere else problem.rows // problem.world
        self._shape = rows, problem.columns

    def __call__(self, tables: Tables) -> list[Tensor] | None:
        """The results; None if a graph is captured and torch has to run the call."""
        launcher, problem = self._launcher, self._problem
        if launcher.enter() is None:
            return None
        out = tables.weights[0].new_empty(self._shape, dtype=problem.dtype)
        words = array("q", tables.words(self._places)).tobytes()
        descriptors = self._workspace.descriptors.place(words, torch.cuda.is_current_stream_capturing())
        launcher.launch(descriptors, tables, self._places, out, self._mean, problem.everywhere)
        launcher.leave()
        return [out]


def reduce_bags(
    workspace: GpuWorkspace, way: Way, problem: ReducedProblem, tables: Tables, mean: bool, site: str
) -> list[Tensor] | None:
    """A call of `Reduced`."""
    variant = variant_of(problem, tables)

    def make() -> Reduced:
        return Reduced(workspace, way, problem, variant, tables.dims, mean, site)

    return once(workspace, ("reduced", way.name, variant, tables.padding, mean, site), make)(tables)


def reduced_call(op: str, args: Arguments) -> GpuCall | None:
    """The call with all its ways; None where the reference has to run it."""
    product, weights = parse(args.product), args.w
    pooling, mean = product.pooling, args.reduce_op == "avg"
    assert pooling is not None
    bags, columns = pooling.bags(args.x, args.operands), sum(w.shape[1] for w in weights)
    if not bags.count or not columns:
        return None
    dtype = reduce(torch.promote_types, (w.dtype for w in weights))
    dtype = next((stage.dtype for stage in product.stages if stage.dtype is not None), dtype)
    workspace = workspace_of(args.group_name, weights[0])
    if op != REDUCE and bags.count % workspace.world:
        return None
    by_rows = op == REDUCE or (args.dim == 0 and args.outer == 1)
    problem = ReducedProblem(op, bags.count, columns, workspace.world, dtype, workspace.programs, by_rows)

    def run(way: Way) -> list[Tensor] | None:
        tables = tables_of(
            weights, bags.indices, bags.offsets, bags.per_sample_weights, bags.mode,
            pooling.last, pooling.padding, op,
        )  # fmt: skip
        return reduce_bags(workspace, way, problem, tables, mean, args.site)

    return GpuCall(op, args, workspace, problem, run, mean)
