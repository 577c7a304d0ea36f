"""What the fused ops of a script would gain on other machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autofuse.lowering import ops  # noqa: F401  (registers the ops that plans name)
from autofuse.lowering.plan import FAMILIES, Family, Order
from autofuse.lowering.simulate.machine import Machine
from autofuse.lowering.simulate.problems import Problem, apart, on_gpus
from autofuse.passes.choice.cost_model import Task
from autofuse.passes.report import Report, Site

from .tables import columns

SIMULATED = {
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "all_gather_matmul",
    "matmul_all_gather",
    "expert_matmul_all_to_all",
    "all_to_all_expert_matmul",
    "embedding_bag_all_to_all",
}
"""The ops that can be simulated: `problems` knows their tiles."""
MOST_OBLIVIOUS = 8
"""The most ranks in oblivious order. No two of them are alike there, so each one is simulated."""


def explained(script: str, arguments: Sequence[str], world: int) -> Report:
    """The report of `autofuse explain` for a script, which runs in a process of its own: the script sees as
    many ranks as it is asked for. ValueError, with the last line of its errors, if nothing was compiled."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "autofuse", "explain", "--world", str(world), "--policy", "always"]
        done = subprocess.run(
            [*command, "--json", str(path), script, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "COLUMNS": "200"},
        )
        report = Report.from_json(path.read_text()) if path.exists() else None
    if report is None or not report.graphs:
        lines = done.stderr.strip().splitlines() or ["nothing was compiled"]
        raise ValueError(f"{script} with {world} ranks: {lines[-1]}")
    return report


def problem_of(task: Task) -> Problem | None:
    """The problem of a site, None if its op is not simulated."""
    if task.op not in SIMULATED:
        return None
    itemsize = {"float32": 4, "float64": 8}.get(task.dtype, 2)
    family, world, sent = FAMILIES[task.op], task.world, int(task.sent)
    if not task.matmuls:
        bags = 64  # the task does not tell rows from columns, and the plan cares for neither
        cols = max(1, sent // (bags * world * itemsize))
        return Problem(
            task.op, world, bags, max(1, round(int(task.pooled) / max(1, sent))), cols, 1, itemsize
        )
    rows, inner, cols = (int(size) for size in task.matmuls[0])
    if len(task.matmuls) > 1:  # several products of one input, or a sum of products
        inner = sum(int(k) for _, k, _ in task.matmuls) if family is Family.REDUCE else inner
        cols = sum(int(n) for _, _, n in task.matmuls) if family is not Family.REDUCE else cols
    count = int(task.count) if family in (Family.PRODUCE, Family.CONSUME) else 1
    if family in (Family.PRODUCE, Family.CONSUME):
        rows = max(1, rows // (count * world))
    return Problem(task.op, world, rows, inner, cols, count, itemsize)


@dataclass(frozen=True)
class Gain:
    """Microseconds of a site on a machine; None: there is no plan, or it is not simulated."""

    site: Site
    apart: float | None
    orders: dict[str, float | None]

    @property
    def best(self) -> float | None:
        return min((us for us in (*self.orders.values(), self.apart) if us is not None), default=None)


def gains(report: Report, machine: Machine) -> list[Gain]:
    """The sites with known sizes, each on `machine` in every order."""
    found = []
    times: dict[Problem, tuple[float, dict[str, float | None]]] = {}
    for site in report.sites:
        if site.prediction is None or not site.prediction.task:
            continue
        problem = problem_of(Task.parse(site.prediction.task))
        if problem is None or problem.world < 2:
            found.append(Gain(site, None, {}))
            continue
        if problem not in times:
            times[problem] = apart(problem, machine), by_order(problem, machine)
        found.append(Gain(site, *times[problem]))
    return found


def by_order(problem: Problem, machine: Machine) -> dict[str, float | None]:
    """Microseconds in each order; None: there is no plan, or too many ranks would have to be simulated."""
    found: dict[str, float | None] = {}
    for order in Order:
        found[order.value] = None
        if order is Order.OBLIVIOUS and problem.world > MOST_OBLIVIOUS:
            continue
        try:
            found[order.value] = on_gpus(problem, machine, order.value)
        except ValueError:  # a ring of so many ranks needs more signal slots than there are
            continue
    return found


def table(found: Sequence[Gain]) -> str:
    """A row a site, and the sums."""
    orders = [order.value for order in Order]
    rows = [["site", "op", "apart us", *(f"{order} us" for order in orders), "gain"]]
    for gain in found:
        name = os.path.basename(gain.site.source or gain.site.graph)
        times = [_text(gain.orders.get(order)) for order in orders]
        rows.append([name, gain.site.pattern or "-", _text(gain.apart), *times, _gain(gain.apart, gain.best)])
    known = [gain for gain in found if gain.apart is not None and gain.best is not None]
    whole, best = sum(g.apart or 0 for g in known), sum(g.best or 0 for g in known)
    rows.append(["all", "", _text(whole), *[""] * len(orders), _gain(whole, best)])
    return columns(rows)


def _text(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


def _gain(before: float | None, after: float | None) -> str:
    return f"{before / after:.2f}x" if before and after else "-"


def to_json(found: Sequence[Gain]) -> str:
    rows = [
        {"site": g.site.source, "op": g.site.pattern, "apart_us": g.apart, "orders_us": g.orders}
        for g in found
    ]
    return json.dumps(rows, indent=1) + "\n"
