"""Steps of an optimizer go on the short way once one has been made; the driver only notes what it gets."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from autofuse.lowering.agreement import Disagreement
from autofuse.lowering.buckets import buckets_of
from autofuse.lowering.direct import Direct
from autofuse.lowering.gpu.choice.calls import GpuCall
from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.choice.points import Point
from autofuse.lowering.gpu.memory.descriptors import Descriptors
from autofuse.lowering.gpu.optimizer import again, call
from autofuse.lowering.gpu.optimizer.tables import rates_of, tensor_words
from autofuse.lowering.gpu.optimizer.ways import UpdateProblem
from autofuse.lowering.ops import reduce_update_gather as op
from autofuse.lowering.ops.library import FUSED_OPS, on_cuda
from autofuse.lowering.ops.reduce_update_gather import OP, ReduceUpdateGather
from autofuse.lowering.runs import Timed
from autofuse.lowering.update_rules import RULES, adam_terms, numbers_at, sgd_terms
from autofuse.native_kernels.gpu import prepared
from tests.kernels.faked_driver import Driver, Words, faked
from tests.kernels.launched import peer_memory

pytestmark = pytest.mark.skipif(prepared.library() is None, reason="launch.cpp is not built")

WORLD, NUMELS = 2, (4096, 20, 2000)


class Group:
    """In place of a process group."""


class Ranks:
    """One rank of two, whose peer tells what it tells, unless `other` says what else."""

    def __init__(self, driver: Driver) -> None:
        words, self.put, self.group = Words(), list[bytes](), Group()
        self.other: list[int] | None = None
        self.told = 0
        self.is_first, self.ran_as_chosen = False, 0
        self.workspace: Any = Mock(
            serial=False, device=torch.device("cpu", 0), rank=0, world=WORLD, programs=132, calls={}
        )
        self.workspace.group = self.group
        self.workspace.again = SimpleNamespace(
            guard=words.guard, unchanged=lambda: True, is_last=lambda stream: words.last.value == stream
        )
        self.words = words
        self.workspace.enter = self._enter
        self.workspace.enter_again = lambda: self.memory
        self.workspace.descriptors = Descriptors(
            lambda to, given: self.put.append(given), lambda size: torch.zeros(size, dtype=torch.int64)
        )

    def _enter(self, op: str, site: str, need: Any, *more: Any) -> Any:
        self.memory = peer_memory(WORLD, need())
        return self.memory, 5, False

    def tell(self, workspace: Any, op: str, site: str, what: str, values: Any) -> list[list[int]]:
        self.told += 1
        return [[*values], self.other or [*values]]


@contextmanager
def ranks() -> Iterator[tuple[Ranks, Driver]]:
    def run(made: GpuCall) -> Any:
        found.ran_as_chosen += 1
        return made.run(next(way for way in ways_of(made.problem).values() if way.fused))

    with faked() as driver:
        found = Ranks(driver)
        cuda = {"is_current_stream_capturing": lambda: False, "current_device": lambda: 0}
        parts = {
            "workspace_of": lambda *_: found.workspace, "current": lambda _: nullcontext(),
            "is_measured": lambda _: True, "run_call": run, "values_of_all": found.tell,
            "apart": lambda _, work: work(), "is_first": lambda *_: found.is_first,
        }  # fmt: skip
        with (
            patch.multiple(torch.cuda, **cuda),
            patch.multiple(call, **parts),
            patch.object(again, "values_of_all", found.tell),
            patch("autofuse.lowering.direct.resolve_group", lambda _: found.group),
            patch("autofuse.lowering.gpu.memory.workspace.made_of", lambda _: found.workspace),
            patch.multiple(op, group_size=lambda _: WORLD, resolve_group=lambda _: Mock(rank=lambda: 0)),
        ):
            yield found, driver


def _given(
    rule: str = "adam", master: bool = False, numels: tuple[int, ...] = NUMELS, max_norm: float = 0.0
) -> list[Any]:
    owned = buckets_of(numels, WORLD).owned(0)
    states = [torch.zeros(owned) for _ in range(len(RULES[rule].states) + master)]
    params = [torch.ones(n) for n in numels]
    return [
        params, _gradients(numels), states, _numbers(1, len(numels)), rule, "avg", max_norm, False,
        list("abcd"[: len(numels)]), "g", "direct", "s",
    ]  # fmt: skip


def _gradients(numels: tuple[int, ...] = NUMELS) -> list[Tensor | None]:
    return [torch.randn(n) for n in numels]


def _numbers(t: int, tensors: int = len(NUMELS)) -> Tensor:
    row = numbers_at(adam_terms((0.9, 0.99), 1e-3, 0.1, True), t, 0.1)
    return torch.tensor([row], dtype=torch.float64).expand(tensors, -1)


def _op() -> Direct:
    return Direct(OP, on_cuda(FUSED_OPS[OP]), again.QUICK[OP])


@pytest.mark.parametrize(
    ("rule", "master"),
    [("adam", False), ("adam", True), ("sgd", True), ("amsgrad", False), ("lamb", False), ("lamb", True)],
)
def test_a_step_goes_on_the_short_way(rule: str, master: bool) -> None:
    """With the addresses of its own gradients, and its own rates. The hosts tell each other once a step."""
    with ranks() as (found, driver):
        update, given = _op(), _given(rule, master)
        for _ in range(2):  # the second call of a kind is recorded
            update(*given)
        assert not driver.launches
        for t in range(2, 5):
            given[1], given[3] = _gradients(), _numbers(t)
            versions = [p._version for p in given[0]]
            assert update(*given).shape == (0,)
            assert len(driver.launches) == (t - 1) * (2 if rule == "lamb" else 1)
            assert found.told == 1 + t
            rates, rows = rates_of(given[3])
            assert found.put[-1] == rates + tensor_words(
                buckets_of(NUMELS, WORLD), 0, given[1], given[0], rows
            )
            assert [p._version for p in given[0]] == [v + 1 for v in versions]


def test_steps_that_keep_as_much_in_other_places_start_apart() -> None:
    """Both are one problem; rank 0 owns 11,264 elements of the first, and 11,623 of the second."""
    numels = (19500, 300, 2100, 7)
    with ranks() as (_, driver):
        update, given = _op(), _given("lamb", numels=numels)
        for _ in range(3):
            update(*given)
        launched = len(driver.launches)
        assert launched
        other = _given("lamb", numels=numels[::-1])
        for _ in range(2):  # none of them is what was recorded
            update(*other)
        assert len(driver.launches) == launched


def _missing(given: list[Any]) -> None:
    given[1] = [None, *given[1][1:]]


def _not_contiguous(given: list[Any]) -> None:
    given[1] = [torch.randn(n, 2)[:, 0] for n in NUMELS]


def _not_aligned(given: list[Any]) -> None:
    given[1] = [torch.randn(n + 1)[1:] for n in NUMELS]


def _of_another_dtype(given: list[Any]) -> None:
    given[1] = [g.bfloat16() for g in given[1]]


def _moved_parameter(given: list[Any]) -> None:
    given[0][1].data = torch.ones(NUMELS[1])


def _other_states(given: list[Any]) -> None:
    given[2] = [s.clone() for s in given[2]]


def _rates_by_tensor(given: list[Any]) -> None:
    given[3] = torch.stack([_numbers(t)[0] for t in (3, 4, 3)])


def _another_rule(given: list[Any]) -> None:
    given[2], given[4] = [], "sgd"
    row = numbers_at(sgd_terms(0.0, 0.0, 0.0, False), 3, 0.1)
    given[3] = torch.tensor([row], dtype=torch.float64).expand(3, -1)


@pytest.mark.parametrize(
    "change",
    [
        _missing, _not_contiguous, _not_aligned, _of_another_dtype, _moved_parameter, _other_states,
        _rates_by_tensor, _another_rule,
    ],
)  # fmt: skip
def test_another_step_goes_the_whole_way(change: Any) -> None:
    with ranks() as (found, driver):
        update, given = _op(), _given()
        for _ in range(2):
            update(*given)
        change(given)
        update(*given)
        assert not driver.launches
        assert found.told == 3, "the hosts tell each other once a step"


def test_ranks_that_disagree() -> None:
    with ranks() as (found, driver):
        update, given = _op(), _given()
        for _ in range(2):
            update(*given)
        found.other = [1, 2, 3]
        with pytest.raises(Disagreement, match="other"):
            update(*given)
        assert not driver.launches


def test_a_launch_that_is_refused() -> None:
    """The step is made the whole way, without telling the others once more."""
    with ranks() as (found, driver):
        update, given = _op(), _given()
        for _ in range(2):
            update(*given)
        driver.error = 1
        put = len(found.put)
        assert update(*given).shape == (0,)
        assert (found.told, len(found.put)) == (3, put)
        found.words.last.value = 1  # another stream was last: that is known before
        update(*given)
        assert found.told == 4


def test_kernels_without_points_are_not_taken() -> None:
    point = Point("reduce_update_gather lamb", 1 << 20, 1, 12, 2, (("lamb per_sm=3", 9.0),))
    with patch.object(call, "shipped", lambda _: [point]):
        taken = {kind: call.is_measured.__wrapped__(kind) for kind in ("buckets", "clipped", "lamb")}
    assert taken == {"buckets": False, "clipped": False, "lamb": True}


def test_numbers_on_the_device_are_for_a_kernel() -> None:
    """A step that may be captured later runs in the kernel, though torch's way be faster."""
    problem = UpdateProblem(6000, 3, "adam", (torch.float32, torch.float32), 2, WORLD)
    made = GpuCall(OP, None, Mock(), problem, lambda way: None)
    with patch.object(call, "times_of", lambda *_: [Timed("torch+nccl"), Timed("buckets")]):
        assert call._fastest_kernel(made).name == "buckets"


def test_the_first_step_runs_in_a_kernel() -> None:
    """So that the next one can be captured, though torch's way be faster."""
    kernel = Mock(
        return_value=ways_of(UpdateProblem(6000, 3, "adam", (torch.float32,) * 2, 2, WORLD))["buckets"]
    )
    with ranks() as (found, _), patch.object(call, "_fastest_kernel", kernel):
        for found.is_first, count in ((True, 0), (False, 1), (False, 2)):
            call.run_update(ReduceUpdateGather(*_given()))
            assert (kernel.call_count, found.ran_as_chosen) == (1, count)
