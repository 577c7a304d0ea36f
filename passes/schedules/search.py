"""The search of the schedule `auto`: for every fused reduction with something behind it, the legal schedules
are priced, and the cheapest is taken.

All ranks decide alike: by the graph round the collective, by ranges of sizes and not by those that were seen,
by the tables that all ranks have, and by what users declare on all ranks.
"""

from __future__ import annotations

from torch import fx

from autofuse.lowering.torch_internals import group_world
from autofuse.passes.choice.choose import Symbols
from autofuse.passes.choice.cost_model import Task
from autofuse.passes.choice.device_table import table_for
from autofuse.passes.choice.scheduled import ERROR, Cluster, cheapest
from autofuse.passes.graph.anchors import fused_op, group_of
from autofuse.passes.graph.follow import expression, tensor
from autofuse.passes.graph.layout import Size, prod
from autofuse.passes.report import Considered
from autofuse.passes.settings import Settings
from autofuse.passes.tails import Candidate, Decision

from .schedule import EVERY, OWNER, SPLIT, UNCHANGED, Prover

_SPLITS = 'it changes a whole joint graph, of which no times are predicted: options={"schedule": "split"}'

_ON_GPUS = 'tails were not measured on GPUs: options={"schedule": "every"} takes them'


class Search:
    """Decides about the tails of a graph."""

    def __init__(self, prover: Prover, settings: Settings, symbols: Symbols) -> None:
        self._prover, self._settings, self._symbols = prover, settings, symbols

    def __call__(self, candidate: Candidate) -> Decision:
        if candidate.on_gpus:
            return Decision(False, "", (Considered(UNCHANGED, None, True, _ON_GPUS),))
        refused = {OWNER: self._prover.why_not(candidate), SPLIT: _SPLITS}
        legal = [UNCHANGED, EVERY, *([] if refused[OWNER] else [OWNER])]
        cluster = cluster_of(candidate)
        if cluster is None:
            why = f"no times are predicted of what reduces {candidate.given['product'].split(';')[0]!r}"
            stands = [Considered(UNCHANGED, None, True, why)]
            return Decision(False, "", (*stands, *(Considered(n, None) for n in legal[1:]), *_no(refused)))
        table = table_for(self._settings.tables, candidate.reduced.meta["val"].device)
        taken, times = cheapest(cluster, legal, table, self._symbols)
        why = f"no other is predicted to save more than {ERROR:.0%}" if taken == UNCHANGED else ""
        found = [Considered(n, us, n == taken, why if n == taken else "") for n, us in times.items()]
        proof = self._prover.prove(candidate) if taken == OWNER else ""
        return Decision(taken != UNCHANGED, proof, (*found, *_no(refused)))


def _no(refused: dict[str, str]) -> list[Considered]:
    return [Considered(name, None, False, why) for name, why in refused.items() if why]


def cluster_of(candidate: Candidate) -> Cluster | None:
    """What is priced; None for products other than matmuls of two dims."""
    given, op = candidate.given, fused_op(candidate.op)
    x, w = ([tensor(node) for node in given[name]] for name in ("x", "w"))
    assert op is not None
    group = group_of(candidate.group)
    world = None if group is None else group_world(group)
    is_matmul = given["product"].split(";")[0] == "mm"
    if world is None or not is_matmul or any(t is None or t.dim() != 2 for t in (*x, *w)):
        return None
    matmuls = tuple(
        (expression(a.shape[0]), expression(a.shape[1]), expression(b.shape[1]))
        for a, b in zip(x, w, strict=True)
        if a is not None and b is not None
    )
    reduced = nbytes(candidate.reduced)
    dtype = candidate.reduced.meta["val"].dtype
    sent = reduced if candidate.whole else reduced * world
    task = Task(op.name, world, str(dtype).removeprefix("torch."), given["order"], sent, matmuls)
    read = sum(nbytes(node) for node in dict.fromkeys(candidate.operands))
    return Cluster(task, reduced, read, sum(map(nbytes, candidate.results)))


def nbytes(node: fx.Node) -> Size:
    val = tensor(node)
    assert val is not None
    return prod(expression(size) for size in val.shape) * val.itemsize
