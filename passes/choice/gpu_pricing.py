"""Times of schedules on GPUs, by the model that chooses the way of a call at run time.

    unchanged   the way of the sum, then a kernel of Inductor for the stages, then the matmuls that would read
                a gather, by cuBLAS
    every       a kernel of ours for the stages, behind the way of the sum or in its kernel
    owner       the way that takes least together with the tail
    split       the way of the sum that scatters, a kernel of Inductor for the stages of this rank's rows, the
                ways of the gathers with their matmuls, NCCL's all_reduce of every sum over rows; all for
                padded rows, with a copy of what the scattered product is made of

Ways are the fastest of ours and torch's. A collective without a matmul is NCCL's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .cost_model import Task
from .scheduled import Cluster, Margins
from .ways import problem_of, taken_us

if TYPE_CHECKING:
    from autofuse.lowering.gpu.choice.correction import Predictor
    from autofuse.lowering.gpu.choice.work import Work

IN_MODELS_US = 1.1
"""Microseconds that a tail takes longer in a model than alone, where its code is in the caches. Steps on 2
H100 gained 0.4 % from tails of 1 and 16 tokens. They lost 0.7 % and 0.9 % from those of 256 and 512, which
save 1.0 and 0.8 us alone (docs/benchmarks/models.md)."""

OWNER_MARGIN = 0.02
"""What owners must save of the time of a tail on every rank. The sum is mostly the same, and its error does
not count."""

SPLIT_ERROR = 0.06
"""`split` has other ops than the other schedules. Where their sizes were not measured, 19 of 20 predicted
ratios to `unchanged` are no more than this below the measured ones (tests/passes/test_gpu_pricing.py)."""


@dataclass(frozen=True)
class GpuPricing:
    """By the model of ways."""

    predictor: Predictor

    def margins(self, schedule: str, stands: bool) -> Margins:
        if schedule == "split":
            return Margins(SPLIT_ERROR, SPLIT_ERROR)
        return Margins(0.0 if stands else OWNER_MARGIN, 0.0)

    def us(self, schedule: str, cluster: Cluster, arithmetic: object) -> float | None:
        if schedule == "split":
            return self._split(cluster)
        return _total([self._sum(schedule, cluster), *map(self._products, cluster.gathers)])

    def _sum(self, schedule: str, cluster: Cluster) -> float | None:
        """The reduction and its tail."""
        from autofuse.lowering.gpu.choice.choose import choose
        from autofuse.lowering.gpu.choice.kernel import ways_of
        from autofuse.lowering.gpu.dense.reductions import applies_tails
        from autofuse.lowering.gpu.dense.ways import DenseProblem
        from autofuse.lowering.gpu.dense.work import INDUCTOR_TAIL, TAIL, tail_work

        behind = cluster.read + cluster.written
        if not cluster.task.matmuls:  # a collective alone has no tail
            return self._alone("all_reduce", cluster.task) + self._kernel(cluster.reduced + behind)
        problem = problem_of(cluster.task, self.predictor.model.gpu.multiprocessors)
        if not isinstance(problem, DenseProblem) or not min(problem.k, problem.n) or cluster.task.count != 1:
            return None
        tails = schedule != "unchanged" and cluster.written > 0
        if schedule == "owner" and tails:
            owners = replace(problem, written=cluster.written // problem.m)
            found = choose(owners, self.predictor)
            # With another way every rank applies the tail, in a kernel behind it.
            if applies_tails(ways_of(owners)[found.way], owners):
                # A way knows of one operand of the size of the sum.
                more = max(0, cluster.read - cluster.reduced) / problem.world
                return found.us + self._us(tail_work(more)) - self._us(tail_work(0)) + IN_MODELS_US
        found = choose(problem, self.predictor)
        if not tails:
            return found.us + self._us(tail_work(cluster.reduced + behind, INDUCTOR_TAIL))
        way = ways_of(problem)[found.way]
        if applies_tails(way, problem):
            tail = tail_work(behind - cluster.reduced)  # nobody stores the sum, and nobody reads it
        else:
            if way.kernel is not None and way.kernel.adds:
                # It reads what is added. If the tail keeps that sum, nobody stores it twice.
                behind -= cluster.added + min(cluster.added, cluster.written - cluster.reduced)
            tail = tail_work(cluster.reduced + behind, TAIL)
        return found.us + self._us(tail) + IN_MODELS_US

    def _split(self, cluster: Cluster) -> float | None:
        slices = cluster.slices()
        found = [self._site("reduce_scatter", slices.scatter)]
        found += [self._site("all_gather", gather) for gather in slices.gathers]
        found += [self._alone("all_reduce", total) for total in cluster.sums]
        found.append(self._kernel(slices.moved))
        if slices.copied:
            found.append(self._kernel(slices.copied))
        return _total(found)

    def _site(self, kind: str, task: Task) -> float | None:
        """A reduction that scatters, or a gather, with its matmuls."""
        if not task.matmuls:
            return self._alone(kind, task)
        us = taken_us(_in_parts(task), self.predictor)
        if us is None or task.count != 1:
            return None
        return us + (self._kernel(2 * task.kept) if task.kept else 0.0)

    def _products(self, gather: Task) -> float | None:
        """The matmuls that read what is not gathered."""
        from autofuse.lowering.gpu.choice.work import Product

        known = problem_of(_in_parts(gather), self.predictor.model.gpu.multiprocessors)
        if gather.matmuls and known is None:
            return None
        return sum(self._us(Product(*sizes)) for sizes in gather.matmuls)

    def _alone(self, kind: str, task: Task) -> float:
        from autofuse.lowering.gpu.dense.work import collective_work

        nbytes = task.sent * task.world if kind == "all_gather" else task.sent
        return self._us(collective_work(kind, nbytes, task.world))

    def _kernel(self, nbytes: float) -> float:
        """One of Inductor, by the bytes that it reads and writes."""
        from autofuse.lowering.gpu.dense.work import INDUCTOR_TAIL, tail_work

        return self._us(tail_work(nbytes, INDUCTOR_TAIL))

    def _us(self, work: Work) -> float:
        return work.us(self.predictor.model.of, self.predictor.model.gpu)


def _in_parts(task: Task) -> Task:
    """With a multiple of the ranks as rows: a symbol that stands for one is tried where it is none, too."""
    matmuls = tuple((-(-m // task.world) * task.world, k, n) for m, k, n in task.matmuls)
    return replace(task, matmuls=matmuls)


def _total(found: Sequence[float | None]) -> float | None:
    """None if one is not known."""
    known = [us for us in found if us is not None]
    return sum(known) if len(known) == len(found) else None
