"""Times of schedules on GPUs, by the model that chooses the way of a call at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from .scheduled import Cluster
from .ways import problem_of

if TYPE_CHECKING:
    from autofuse.lowering.gpu.choice.correction import Predictor


@dataclass(frozen=True)
class GpuPricing:
    """Times of a reduction and its tail.

    All schedules but `owner` have the time of the same sum. Its error does not count, so that the margin is
    small. With many tokens the sum takes so long that a tail saves less than the margin.
    """

    predictor: Predictor

    margin: ClassVar[float] = 0.01
    between: ClassVar[float] = 0.01
    everywhere: ClassVar[float] = 0.0

    def us(self, schedule: str, cluster: Cluster, arithmetic: object) -> float | None:
        """unchanged: the tail is a kernel of Inductor. every: it is one of ours behind the way of the sum, or
        in its kernel. owner: ways are chosen by what they take together with the tail."""
        problem = problem_of(cluster.task, self.predictor.model.gpu.multiprocessors)
        if problem is None:
            return None
        from autofuse.lowering.gpu.choice.choose import choose
        from autofuse.lowering.gpu.choice.kernel import ways_of
        from autofuse.lowering.gpu.dense.reductions import applies_tails
        from autofuse.lowering.gpu.dense.ways import DenseProblem
        from autofuse.lowering.gpu.dense.work import INDUCTOR_TAIL, TAIL, tail_work

        if not isinstance(problem, DenseProblem) or not min(problem.k, problem.n):
            return None
        if schedule == "owner":
            return choose(replace(problem, written=cluster.written // problem.m), self.predictor).us
        found = choose(problem, self.predictor)
        behind = cluster.read + cluster.written
        if schedule == "every" and applies_tails(ways_of(problem)[found.way], problem):
            tail = tail_work(behind - cluster.reduced)  # nobody stores the sum, and nobody reads it
        else:
            tail = tail_work(cluster.reduced + behind, INDUCTOR_TAIL if schedule == "unchanged" else TAIL)
        model = self.predictor.model
        return found.us + tail.us(model.of, model.gpu)
