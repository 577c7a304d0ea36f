"""The clusters that the search prices: a reduction, and what lies behind it up to the next collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import sympy
from torch import fx

from autofuse.lowering.reference.tail import parse
from autofuse.lowering.torch_internals import group_world
from autofuse.passes.choice.choose import task_of
from autofuse.passes.choice.cost_model import PLAIN, Task
from autofuse.passes.choice.scheduled import Cluster
from autofuse.passes.graph.anchors import Anchor, fused_op, group_of
from autofuse.passes.graph.follow import expression, tensor
from autofuse.passes.graph.layout import Size, prod
from autofuse.passes.matchers.match import Match, context_of
from autofuse.passes.matchers.matmul_reduce import match_all_reduce
from autofuse.passes.matchers.matmuls import linear_operands
from autofuse.passes.merge import summand_of, sums
from autofuse.passes.settings import Settings
from autofuse.passes.tails import Candidate

from .slices import is_free, keeps_rows
from .split import Stream


def cluster_of(candidate: Candidate) -> Cluster | None:
    """A reduction that is fused, and its tail; None for products other than matmuls of two dims."""
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
    sent = reduced if candidate.whole else reduced * world
    task = Task(op.name, world, _dtype(candidate.reduced), given["order"], sent, matmuls)
    read = sum(nbytes(node) for node in dict.fromkeys(candidate.operands))
    return Cluster(
        task, reduced, read, sum(map(nbytes, candidate.results)),
        added=reduced if _adds_first(candidate) else 0,
    )  # fmt: skip


def _adds_first(candidate: Candidate) -> bool:
    """Whether the tail begins with the sum of two values of one shape and dtype."""
    first = parse(candidate.text)[0]
    if first.name != "add" or first.operand is None:
        return False
    added = candidate.operands[first.operand]
    value, other = tensor(candidate.reduced), tensor(added)
    if value is None or other is None:
        return False
    return other.dtype == value.dtype and nbytes(added) == nbytes(candidate.reduced)


@dataclass
class _Behind:
    """What is computed behind a reduction and before the next one: cut values, sums over rows, and those of
    the cut values that are gathered."""

    cuts: list[fx.Node] = field(default_factory=list)
    sums: list[fx.Node] = field(default_factory=list)
    gathered: list[fx.Node] = field(default_factory=list)


def clusters_of(stream: Stream, settings: Settings) -> list[Cluster]:
    """The reductions of a stream, each with what is computed on slices behind it and before the next one.

    Inductor computes what lies between two collectives in one pass: it reads what others have computed, and
    writes what others read. Views and casts to a wider dtype are not stored. Reductions that are added are
    one, as `passes/merge.py` makes of them.
    """
    products = {r: _matched(anchor, stream.world, settings) for r, anchor in stream.reductions.items()}
    taken = {node for match in products.values() if match is not None for node in match.inputs}
    tasks = {r: _task(stream, r, match, settings) for r, match in products.items()}
    joined = _joined(tasks)
    order = {node: i for i, node in enumerate(stream.reductions)}
    home: dict[fx.Node, fx.Node] = {}
    stored: dict[fx.Node, fx.Node] = {}
    for node in stream.cuts:
        sources = [n for n in node.all_input_nodes if n in home]
        is_reduction = node in stream.reductions
        home[node] = joined[node] if is_reduction else max((home[n] for n in sources), key=order.__getitem__)
        stored[node] = stored[sources[0]] if is_free(node) and not is_reduction else node
    behind = {reduction: _Behind() for reduction in stream.reductions if joined[reduction] is reduction}
    for node in stream.cuts:
        behind[home[node]].cuts.append(node)
    for node in stream.sums:
        behind[home[node.all_input_nodes[0]]].sums.append(node)
    for node in stream.gathered:
        behind[home[node]].gathered.append(node)
    return [_cluster(stream, r, tasks, found, stored, taken, settings) for r, found in behind.items()]


def _task(stream: Stream, reduction: fx.Node, match: Match | None, settings: Settings) -> Task:
    world, order = stream.world, settings.order
    if match is not None:
        return task_of(stream.reductions[reduction], match, world, order)
    return Task("matmul_all_reduce", world, _dtype(reduction), order, nbytes(reduction))


def _joined(tasks: Mapping[fx.Node, Task]) -> dict[fx.Node, fx.Node]:
    """By reduction, the last one of those that it is added to; by default itself."""
    found = {reduction: reduction for reduction in tasks}
    plain = {r for r, task in tasks.items() if task.matmuls and task.product == PLAIN}
    for summands in sums(next(iter(tasks)).graph):
        groups: dict[object, list[fx.Node]] = {}
        for summand in (summand_of(node, plain.__contains__) for node in summands):
            if summand is not None:
                groups.setdefault(summand.key, []).append(summand.item)
        for group in groups.values():
            found |= dict.fromkeys(group, max(group))
    return found


def _cluster(
    stream: Stream,
    reduction: fx.Node,
    tasks: Mapping[fx.Node, Task],
    behind: _Behind,
    stored: Mapping[fx.Node, fx.Node],
    taken: set[fx.Node],
    settings: Settings,
) -> Cluster:
    """`stored`: of every cut value the one in whose memory it is."""
    own, added = set(behind.cuts), [node for node in behind.cuts if node in stream.reductions]
    computed = [node for node in behind.cuts if node not in stream.reductions]
    read = [source for node in computed for source in node.all_input_nodes if stored.get(source) not in own]
    read += [source for node in behind.sums for source in node.all_input_nodes]
    read = [stored.get(source, source) for source in read if tensor(source) is not None]
    written = [stored[node] for node in computed if not own.issuperset(node.users)]
    order, task = settings.order, tasks[reduction]
    rows = expression(_shape(reduction)[stream.cuts[reduction]])
    return Cluster(
        replace(task, matmuls=tuple(size for each in added for size in tasks[each].matmuls)),
        nbytes(reduction),
        sum(map(nbytes, dict.fromkeys(read))),
        sum(map(nbytes, dict.fromkeys(node for node in written if node not in added))),
        tuple(_gather(stream, node, taken, order) for node in behind.gathered),
        tuple(
            Task("matmul_all_reduce", stream.world, _dtype(node), order, nbytes(node)) for node in behind.sums
        ),
        decided=settings.policy == "always",
        rows=rows,
        padded=stream.world * stream.fit.part(rows) if stream.fit.pads(rows) else rows,
    )


def _gather(stream: Stream, node: fx.Node, taken: set[fx.Node], order: str) -> Task:
    """The all_gather of a cut value, with the matmuls that read its rows; `taken`: what matmuls read whose
    products are reduced."""
    matmuls, others = [], False
    work = [user for user in node.users if user not in stream.cuts and user not in stream.sums]
    rows = {node}
    while work:
        user = work.pop()
        operands = linear_operands(user)
        if operands is not None and operands[0] in rows and operands[1] not in rows and not rows & taken:
            (*m, k), n = (expression(s) for s in _shape(operands[0])), expression(_shape(operands[1])[-1])
            matmuls.append((prod(m), k, n))
        elif keeps_rows(user):
            rows.add(user)
            work += user.users
        else:
            others = True
    whole = nbytes(node)
    sent = whole / stream.world if isinstance(whole, sympy.Expr) else whole // stream.world
    kept = whole if others else 0
    return Task("all_gather_matmul", stream.world, _dtype(node), order, sent, tuple(matmuls), kept=kept)


def _matched(anchor: Anchor, world: int, settings: Settings) -> Match | None:
    found = match_all_reduce(anchor, context_of(anchor, world, settings))
    return found if isinstance(found, Match) else None


def _shape(node: fx.Node) -> tuple[object, ...]:
    val = tensor(node)
    assert val is not None
    return tuple(val.shape)


def _dtype(node: fx.Node) -> str:
    return str(node.meta["val"].dtype).removeprefix("torch.")


def nbytes(node: fx.Node) -> Size:
    val = tensor(node)
    assert val is not None
    return prod(expression(size) for size in val.shape) * val.itemsize
