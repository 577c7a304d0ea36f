"""First calls of a kind on GPUs: all ranks meet and compare them; the ranks have a store and no GPU."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist

from autofuse import config
from autofuse.lowering.cpu.rendezvous import VISITS, visit
from autofuse.lowering.gpu.choice import calls, choose
from autofuse.lowering.gpu.choice.calls import GpuCall
from autofuse.lowering.gpu.choice.kernel import fused_ways, ways_of
from autofuse.lowering.gpu.choice.launcher import UNEVEN
from autofuse.lowering.gpu.dense import call as dense
from autofuse.lowering.gpu.dense import tails
from autofuse.lowering.gpu.dense.ways import GATHER, PUBLISH, REDUCE, SCATTER, DenseProblem
from autofuse.lowering.gpu.memory import comparing
from autofuse.lowering.gpu.memory.allocation import Refusals
from autofuse.lowering.gpu.memory.comparing import Kinds, Parts
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, agreements
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.proofs import UNPROVEN
from autofuse.lowering.torch_internals import group_store, resolve_group
from autofuse.native_kernels.gpu.memory import Need
from tests.ranks import RankPool, fresh_group

Ranks = Callable[[int], RankPool]

CAPTURING = "is_current_stream_capturing"


@dataclass(frozen=True)
class Problem:
    m: int
    k: int
    n: int = 8

    own: ClassVar[tuple[str, ...]] = ("k",)


@dataclass(frozen=True)
class FreeProblem(Problem):
    free: ClassVar[tuple[str, ...]] = ("k",)


def _workspace(rank: int, world: int, limit_s: float = 10.0) -> Any:
    workspace = object.__new__(GpuWorkspace)
    group = partial(resolve_group, fresh_group())
    store = group_store(group())
    fields = {
        "_store": store, "_prefix": f"{VISITS[1]}/{visit(store, VISITS[1], rank)}", "_meetings": 0,
        "_limit_s": lambda: limit_s, "_peers": [None] * world, "_introduced": False,
        "rank": rank, "world": world, "group_name": "g",
        "failures": Mock(), "_kernels": set(), "_entered": set(), "_compared": Kinds("g"),
        "_parts": Parts("g"),
        "calls": {}, "device": None, "_held": Mock(all=[Mock()], capacity=Need()), "_refusals": Refusals(),
        "needs": {}, "again": Mock(), "programs": 132, "serial": False, "_group": group,
    }  # fmt: skip
    for name, value in fields.items():
        setattr(workspace, name, value)
    workspace.enter_again = Mock()
    return workspace


def _enter(
    workspace: Any, m: int = 8, site: str = "/a/b.py:1", variant: Hashable = 0, capturing: bool = False,
    k: int = 64, way: str = "tiles", of: type[Problem] = Problem,
) -> bool | None:  # fmt: skip
    """Whether the kernel is new; None if it cannot be captured, or ranks have parts of different sizes."""
    problem = of(m, k)
    with patch.object(torch.cuda, CAPTURING, return_value=capturing):
        found = workspace.enter("matmul", site, Need, way, (problem, variant), problem)
    return None if found is None else found[2]


def _meets_once_a_kind(rank: int, world: int) -> list[int]:
    """How many meetings there were after each call."""
    workspace, meetings = _workspace(rank, world), []
    site = f"/rank{rank}/b.py:1"  # folders may differ
    assert _enter(workspace, capturing=True) is None
    steps = (
        partial(_enter, workspace, site=site),
        partial(_enter, workspace, site=site),
        partial(_enter, workspace, site=site, variant=rank),  # what each rank has for itself, new on one
        partial(_enter, workspace, site="/c.py:2", capturing=True),  # captured: not now
        partial(_enter, workspace, site="/c.py:2"),
        partial(_enter, workspace, m=16, site="/c.py:2"),
    )
    for step in steps:
        step()
        meetings.append(workspace._meetings)
    return meetings


def test_ranks_meet_once_for_each_kind_of_call(ranks: Ranks) -> None:
    assert ranks(2).run(_meets_once_a_kind) == [[1, 1, 1, 1, 2, 3]] * 2


def _disagrees(rank: int, world: int) -> list[str]:
    workspace, told = _workspace(rank, world), []
    for m in (8 + rank // 2, 8):
        try:
            _enter(workspace, m)
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_ranks_that_disagree_all_raise_with_both_texts(ranks: Ranks) -> None:
    for told, later in ranks(3).run(_disagrees):
        assert "rank 0 runs matmul at b.py:1 (tiles; m=8, k=64, n=8), rank 2 runs matmul at b.py:1 (t" in told
        assert "m=9" in told
        assert later == ""


def _has_its_own_k(rank: int, world: int) -> list[bool | str | None]:
    """Calls of parts that differ, then of equal ones, then in ways that differ."""
    workspace = _workspace(rank, world)
    found: list[bool | str | None] = [_enter(workspace, k=64 - rank, way=f"way {rank}") for _ in range(2)]
    found.append(_enter(workspace))
    try:
        _enter(workspace, m=16, way=f"way {rank}")
    except RuntimeError as error:
        found.append(str(error))
    return [*found, str(workspace._meetings)]


def test_parts_of_different_sizes_are_no_error(ranks: Ranks) -> None:
    """All ranks run them unfused."""
    for *parts, told, meetings in ranks(2).run(_has_its_own_k):
        assert parts == [None, None, True]
        for r, text in enumerate(("rank 0 runs", "rank 1 runs")):
            assert f"{text} matmul at b.py:1 (way {r}; m=16, k=64, n=8)" in told
        assert meetings == "3"


def _has_a_free_k(rank: int, world: int) -> list[bool | int | None]:
    """Parts that differ; then others on one rank alone, which meets nobody; then ways that differ."""
    workspace = _workspace(rank, world)
    enter = partial(_enter, workspace, of=FreeProblem)
    found: list[bool | int | None] = [enter(k=64 - rank), enter(k=64 - 8 * rank), workspace._meetings]
    found += [enter(m=16, k=64 - rank, way=f"way {rank}")]
    return found


def test_sizes_that_kernels_do_not_see_may_differ(ranks: Ranks) -> None:
    for found in ranks(2).run(_has_a_free_k):
        assert found == [True, False, 1, None]


def _differ(rank: int, world: int) -> list[object]:
    workspace, found = _workspace(rank, world), list[object]()

    def ask(problem: Problem, capturing: bool = False, op: str = "matmul", site: str = "here") -> None:
        found.append((workspace.has_equal_parts(op, site, problem, capturing), workspace._meetings))

    ask(Problem(8, 64), capturing=True)  # a capture does not meet
    ask(Problem(8, 64))
    ask(Problem(16, 64))  # another number of rows
    ask(Problem(8, 63 - rank))
    ask(Problem(16, 63 - rank))
    ask(Problem(8, 63), site=f"there {rank}")  # equal again; ranks may call from other lines
    ask(Problem(8, 63 - rank), capturing=True)
    ask(FreeProblem(8, 64 - rank), op="sum")  # kernels do not see it
    ask(FreeProblem(8, 32 - rank), op="sum")
    try:
        ask(Problem(8, 64, 16 + rank))
    except RuntimeError as error:
        found.append(str(error))
    ask(Problem(8, 64, 16))
    return found


def test_ranks_compare_parts_before_they_choose_ways(ranks: Ranks) -> None:
    for found in ranks(2).run(_differ):
        *found, told, last = found
        assert found == [
            (True, 0), (True, 1), (True, 1), (False, 2), (False, 2), (True, 3), (False, 3), (True, 4),
            (True, 4),
        ]  # fmt: skip
        assert "rank 0 runs matmul (n=16) of parts with k=64, rank 1 runs matmul (n=17) of parts w" in told
        assert last == (True, 6)


def _forgets(rank: int, world: int) -> list[int]:
    """How many meetings there were after each question. A meeting adds an entry to every table."""
    workspace, meetings = _workspace(rank, world), []
    with patch.object(comparing, "MOST_KINDS", 2):
        for n, k in ((8, 64), (16, 64 - rank), (8, 64), (24, 64), (24, 64), (8, 64)):
            workspace.has_equal_parts("matmul", "here", Problem(8, k, n), False)
            meetings.append(workspace._meetings)
    return meetings


def test_ranks_forget_together_which_parts_are_equal(ranks: Ranks) -> None:
    assert ranks(2).run(_forgets) == [[1, 2, 2, 3, 3, 4]] * 2


def _decides(rank: int, world: int, op: str, size: str, values: list[int]) -> list[object]:
    """Of a size that only one rank has a kernel for, then of one that all have: whether there are kernels,
    and the way; then what was measured, and the meetings."""
    workspace, found = _workspace(rank, world), list[object]()
    taken = Mock(return_value=("a kernel", True))
    with patch.multiple(calls, way_of=taken, measure_once=Mock()), config.patch(measure=True):
        for m, value in ((512, values[rank]), (1024, values[0])):
            sizes: dict[str, Any] = {"k": 512, "n": 512, size: value}
            problem = DenseProblem(op, m, **sizes, world=2, dtype=torch.bfloat16)
            way: Any
            way, settled = GpuCall(op, Mock(site=f"line {m}"), workspace, problem, Mock()).decide(False)
            kernels = [n for n in fused_ways(problem) if not ways_of(problem)[n].kernel.takes_product]  # type: ignore[union-attr]
            found += [bool(kernels), way if way == "a kernel" else way.replaced and settled]
        return [*found, calls.measure_once.call_count, workspace._meetings]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("op", "size"), [(REDUCE, "k"), (SCATTER, "k"), (GATHER, "n"), (PUBLISH, "k")])
def test_a_rank_without_kernels_lets_no_rank_wait(ranks: Ranks, op: str, size: str) -> None:
    first, second = ranks(2).run(_decides, op, size, [2512, 2513])
    assert first == [True, True, True, "a kernel", 1, 2]
    assert second == [False, *first[1:]]


def _is_left(rank: int, world: int, op: str, inner: list[int], columns: list[int]) -> tuple[list[str], int]:
    """Runs an op whose part has these sizes on each rank; a size may be 0. Returns why this rank fell back,
    or `reference` if it left the call to that, and how many meetings there were."""
    workspace = _workspace(rank, world)
    x, w = torch.ones(4, inner[rank]), torch.ones(inner[rank], columns[rank])
    group = workspace.group.group_name
    given: dict[str, tuple[Any, ...]] = {
        REDUCE: ([x], [w], [], "mm", "sum", False, [], "add 1", "same", group, "direct", "here"),
        SCATTER: ([x], [w], [], "mm", "sum", 0, 1, False, [], "", "", group, "direct", "here"),
        GATHER: (x, [w], [], 0, 1, False, group, "direct", "here"),
        PUBLISH: ([x], [w], [], "mm", 0, 1, False, False, group, "direct", "here"),
    }
    args = FUSED_OPS[op].parse(given[op])
    cuda: dict[str, Any] = {CAPTURING: lambda: False, "current_device": lambda: None}
    note, met = Mock(), Mock(side_effect=lambda workspace: workspace.meet("points"))
    run: Any = {GATHER: dense.run_gather, PUBLISH: dense.run_publish}.get(op, partial(dense.run_reduce, op))
    with (
        patch.multiple(torch.cuda, **cuda),
        patch.object(dense, "workspace_for", lambda name, device: workspace),
        patch.object(tails, "rows_fit", lambda columns: False),  # by torch
        patch.object(calls, "predictor_for", met),
        patch.object(GpuCall, "note", lambda call, way, capturing: (met(workspace), note)[1]),
    ):
        found = run(args)
    told = [str(call.args[0]) for call in note.fell_back.mock_calls]
    if found is NotImplemented:
        told, found = ["reference"], FUSED_OPS[op].reference(args)
    expected = {
        REDUCE: float(sum(inner) + 1), SCATTER: float(sum(inner)), GATHER: float(inner[0]),
        PUBLISH: 0.0,
    }  # fmt: skip
    if op != PUBLISH:
        assert bool((found[0] == expected[op]).all())
    else:
        assert found[0][:: x.shape[0], 0].tolist() == [float(k) for k in inner]
    return told, workspace._meetings


@pytest.mark.parametrize(
    ("op", "inner", "columns"),
    [
        (REDUCE, [8, 0], [8, 8]),
        (SCATTER, [8, 0], [8, 8]),
        (GATHER, [8, 8], [8, 0]),
        (PUBLISH, [8, 0], [8, 8]),
    ],
)
def test_a_rank_without_elements_meets_the_others(
    ranks: Ranks, op: str, inner: list[int], columns: list[int]
) -> None:
    (first, meetings), (second, too) = ranks(2).run(_is_left, op, inner, columns)
    assert (first, second) == ([UNEVEN], ["reference"])
    assert meetings == too == 2 + (op == REDUCE)  # of a tail they compare the proof first


@pytest.mark.parametrize(("op", "rows", "columns"), [(REDUCE, 0, 8), (PUBLISH, 8, 0), (SCATTER, 8, 0)])
def test_what_is_empty_on_all_ranks_needs_no_meeting(op: str, rows: int, columns: int) -> None:
    args = Mock(x=[torch.ones(rows, 8)], w=[torch.ones(8, columns)], product="mm")
    with patch.object(dense, "workspace_for", side_effect=AssertionError):
        run = dense.run_publish if op == PUBLISH else partial(dense.run_reduce, op)
        assert run(args) is NotImplemented


def _compares_proofs(rank: int, world: int) -> list[object]:
    """The calls that one rank has prepared are gone, as after a setting has changed there alone."""
    workspace, found = _workspace(rank, world), list[object]()

    def ask(proof: str, capturing: bool = False) -> None:
        args: Any = Mock(tail="relu", proof=proof, site="here")
        with patch.object(torch.cuda, CAPTURING, return_value=capturing):
            found.append((tails._agreed(workspace, args), workspace._meetings))

    ask("same", capturing=True)
    for proof in ("same", f"of {rank}", UNPROVEN):
        ask(proof)
        if rank:
            workspace.calls.clear()
        ask(proof)
    ask("same", capturing=True)
    return found


def test_ranks_compare_a_proof_once_whatever_one_of_them_has_prepared(ranks: Ranks) -> None:
    of_each = [(False, 0), *[(True, 1)] * 2, *[(False, 2)] * 2, *[(False, 3)] * 2, (True, 3)]
    assert ranks(2).run(_compares_proofs) == [of_each] * 2


def _is_reset(rank: int, world: int) -> list[bool]:
    """Ranks that have come to different calls meet in the same ones after a reset."""
    workspace = _workspace(rank, world, 1)
    _enter(workspace)
    workspace.has_equal_parts("matmul", "here", Problem(8, 64 - rank), False)
    told = []
    if rank == 0:
        try:
            _enter(workspace, m=16)
        except RuntimeError as error:
            told.append("waited 1 s for ranks [1]" in str(error))
        workspace._peers = [Mock(is_dead=lambda: False)] * world
    dist.barrier()
    for kept in agreements:
        kept[workspace] = Mock()
    order = Mock()
    order.attach_mock(workspace.failures, "failures")
    order.attach_mock(workspace._held.all[0], "memory")

    def meet(value: str) -> list[str]:
        order.meet()
        return [value] * world

    with patch.object(torch.cuda, "synchronize", order.synchronize):
        workspace.reset(1, meet)
    names = [call[0] for call in order.mock_calls]
    told.append(
        names
        == [
            "failures.pause", "synchronize", "meet", "memory.clear", "synchronize", "failures.forget", "meet",
            "failures.resume",
        ]
    )  # fmt: skip
    told.append(choose._agreed not in [kept for kept in agreements if workspace in kept])
    for m in (8, 16):
        _enter(workspace, m)
    told.append(workspace._meetings == 2)
    told.append(workspace.has_equal_parts("matmul", "here", Problem(8, 64), False))
    return told


def test_a_reset_clears_memory_between_meetings_and_forgets_what_ranks_agreed_on(ranks: Ranks) -> None:
    assert ranks(2).run(_is_reset) == [[True] * 5, [True] * 4]
