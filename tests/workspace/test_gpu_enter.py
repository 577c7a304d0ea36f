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

from autofuse.lowering.cpu.rendezvous import VISITS, visit
from autofuse.lowering.gpu.choice import choose
from autofuse.lowering.gpu.memory.allocation import Refusals
from autofuse.lowering.gpu.memory.workspace import GpuWorkspace, agreements
from autofuse.lowering.torch_internals import group_store, resolve_group
from autofuse.native_kernels.gpu.memory import Need
from tests.ranks import RankPool, fresh_group

Ranks = Callable[[int], RankPool]

CAPTURING = "is_current_stream_capturing"


@dataclass(frozen=True)
class Problem:
    m: int
    k: int

    own: ClassVar[tuple[str, ...]] = ("k",)


@dataclass(frozen=True)
class FreeProblem(Problem):
    free: ClassVar[tuple[str, ...]] = ("k",)


def _workspace(rank: int, world: int, limit_s: float = 10.0) -> Any:
    workspace = object.__new__(GpuWorkspace)
    store = group_store(resolve_group(fresh_group()))
    fields = {
        "_store": store, "_prefix": f"{VISITS[1]}/{visit(store, VISITS[1], rank)}", "_meetings": 0,
        "_limit_s": lambda: limit_s, "_peers": [None] * world, "_introduced": False,
        "rank": rank, "world": world, "group_name": "g",
        "failures": Mock(), "_kernels": set(), "_entered": set(), "_compared": {},
        "calls": {}, "device": None, "_held": Mock(all=[Mock()], capacity=Need()), "_refusals": Refusals(),
        "needs": {}, "again": Mock(),
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
        assert "rank 0 runs matmul at b.py:1 (tiles; m=8, k=64), rank 2 runs matmul at b.py:1 (t" in told
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
        assert "rank 0 runs matmul at b.py:1 (way 0; m=16, k=64), rank 1 runs matmul at b.py:1 (way 1" in told
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


def _is_reset(rank: int, world: int) -> list[bool]:
    """Ranks that have come to different calls meet in the same ones after a reset."""
    workspace = _workspace(rank, world, 1)
    _enter(workspace)
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
    return told


def test_a_reset_clears_memory_between_meetings_and_forgets_what_ranks_agreed_on(ranks: Ranks) -> None:
    assert ranks(2).run(_is_reset) == [[True] * 4, [True] * 3]
