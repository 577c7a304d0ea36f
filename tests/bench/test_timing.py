"""How GPUs are timed, where there is none: one that a test makes up, with a clock of its own."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch

from autofuse.lowering.gpu.choice import timer
from autofuse.lowering.gpu.choice.timer import time_all
from autofuse.lowering.gpu.choice.timing import (
    FINALISTS,
    QUICK,
    Effort,
    Timing,
    captured,
    fastest,
    in_turn,
)

CALLS = 10


class Gpu:
    """Two ranks, of which the other takes `other` times as long. `slowdown(now, of this sample)`, in us."""

    def __init__(self, slowdown: Callable[[float, float], float] = lambda now, of_sample: 1.0) -> None:
        self.now, self.begun, self.other = 0.0, 0.0, 1.0
        self.slowdown = slowdown
        self.samples: list[str] = []
        self.last = ""

    def variant(self, name: str, us: float, fails_at: int = -1) -> Callable[[int], str]:
        def call(i: int) -> str:
            if i == 0 and self.samples.count(name) == fails_at:
                raise ValueError(f"{name} is broken")
            self.now += us * self.slowdown(self.now, self.now - self.begun)
            self.last = name
            return name

        return call

    def sample(self, run: Callable[[], object], times: int, group: object) -> float:
        self.begun = self.now
        for _ in range(times):
            run()
        self.samples.append(self.last)
        return self.now - self.begun

    def every(self, values: list[float], group: object = None) -> list[list[float]]:
        return [list(values), [value * self.other for value in values]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    repeat = timer._repeat

    def captured_at_once(call: Any, calls: int, eager: bool, group: Any) -> Any:
        return repeat(call, calls, True, group)[0], eager

    monkeypatch.setattr(timer, "_repeat", captured_at_once)
    monkeypatch.setattr(timer, "sample", made.sample)
    monkeypatch.setattr(timer, "every", made.every)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(torch.distributed, "all_gather_object", _to_oneself)
    return made


def _to_oneself(everyone: list[object], mine: object, group: object) -> None:
    everyone[0] = mine


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_every_key_is_measured_behind_every_other_equally_often(count: int) -> None:
    keys = list(range(count))
    rounds = [in_turn(keys, number) for number in range(2 * count)]
    assert all(sorted(order) == keys for order in rounds)
    pairs = Counter(pair for order in rounds for pair in pairwise(order))
    assert set(pairs) == set(permutations(keys, 2))
    assert set(pairs.values()) <= {2}
    assert Counter(order[0] for order in rounds) == dict.fromkeys(keys, 2)
    if count > 2:
        assert all(one[-1] != other[0] for one, other in pairwise(rounds))


def test_a_variant_of_much_power_makes_none_slower_than_another(gpu: Gpu) -> None:
    """It makes the GPU slower for about a sample."""
    ended = -1e9

    def slowdown(now: float, _: float) -> float:
        nonlocal ended
        if gpu.last == "hot":
            ended = now
        return 1.1 if now - ended < 9e3 else 1.0

    gpu.slowdown = slowdown
    times = captured(
        time_all({name: gpu.variant(name, 50.0) for name in ["hot", *"abcdef"]}, CALLS, Effort())
    )
    assert {times[name] for name in "abcdef"} == {50.0}


def test_a_gpu_that_throttles_makes_none_slower_than_another(gpu: Gpu) -> None:
    gpu.slowdown = lambda now, _: 1.0 + 0.18 * min(1.0, now / 400e3)
    times = captured(time_all({name: gpu.variant(name, 50.0) for name in "abcde"}, CALLS, Effort()))
    assert min(times.values()) > 50.0 * 1.1
    assert max(times.values()) < 1.02 * min(times.values())


def test_the_gpu_is_warm_when_it_is_measured(gpu: Gpu) -> None:
    gpu.slowdown = lambda now, _: 1.0 if now < 150e3 else 1.18
    assert time_all({"alone": gpu.variant("alone", 50.0)}, CALLS, QUICK)["alone"].us == pytest.approx(59.0)


def test_a_sample_that_something_disturbed_does_not_count(gpu: Gpu) -> None:
    gpu.slowdown = lambda now, _: 3.0 if 200e3 < now < 215e3 else 1.0
    times = time_all({name: gpu.variant(name, 50.0) for name in "ab"}, CALLS, Effort())
    assert [t.us for t in times.values()] == pytest.approx([50.0, 50.0])


def test_the_slowest_rank_counts(gpu: Gpu) -> None:
    gpu.other = 1.1
    timing = time_all({"a": gpu.variant("a", 50.0)}, CALLS, QUICK)["a"]
    assert (timing.us, timing.skew_us) == (pytest.approx(55.0), pytest.approx(5.0))


def test_a_variant_that_fails_is_left_out_from_then_on(gpu: Gpu) -> None:
    variants = {
        "good": gpu.variant("good", 50.0),
        "late": gpu.variant("late", 40.0, fails_at=4),
        "soon": gpu.variant("soon", 40.0, fails_at=0),
    }
    times = time_all(variants, CALLS, QUICK)
    assert times["good"].us == pytest.approx(50.0)
    assert times["late"] == Timing(failed="ValueError: late is broken")
    assert times["soon"] == Timing(failed="ValueError: soon is broken")
    assert (gpu.samples.count("late"), gpu.samples.count("soon")) == (4, 0)


def test_a_wrong_result_is_not_timed(gpu: Gpu) -> None:
    errors = {"good": 1e-3, "wrong": 0.3, "no number": float("nan")}
    times = time_all(
        {name: gpu.variant(name, 50.0) for name in errors}, CALLS, QUICK, lambda key, result: errors[result]
    )
    assert (times["good"].us, times["good"].error) == (pytest.approx(50.0), 1e-3)
    assert times["wrong"].failed == "the result is wrong: its error is 3.0e-01"
    assert times["no number"].failed
    assert set(gpu.samples) == {"good"}


def test_what_cannot_be_captured_is_no_choice(gpu: Gpu) -> None:
    times = time_all(
        {"slow": gpu.variant("slow", 50.0), "eager": gpu.variant("eager", 10.0)},
        CALLS,
        QUICK,
        eager={"eager"},
    )
    assert times["eager"] == Timing(10.0, eager=True)
    assert (captured(times), fastest(times)) == ({"slow": 50.0}, ["slow"])


def test_which_may_be_the_fastest() -> None:
    times = {name: Timing(100.0 + i) for i, name in enumerate("edcba")}
    assert fastest({"far": Timing(113.0), **times, "failed": Timing(failed="no")}) == list("edcb")
    assert len(fastest(times)) == FINALISTS
    assert fastest({"far": Timing(112.1), "near": Timing(111.9), "first": Timing(100.0)}) == ["first", "near"]
    assert fastest({"failed": Timing(failed="no")}) == []


def test_the_fastest_are_timed_again_and_longer(gpu: Gpu) -> None:
    """`hot` is the fastest of all where samples are short, and slower than two others where they are not."""

    def hot(i: int) -> None:
        gpu.now += 50.0 if gpu.now - gpu.begun < QUICK.sample_us * 1.1 else 75.0
        gpu.last = "hot"

    variants = {"far": gpu.variant("far", 80.0), "near": gpu.variant("near", 57.0), "hot": hot}
    variants["nearer"] = gpu.variant("nearer", 54.0)
    times = time_all(variants, CALLS, QUICK, finals=Effort())
    assert fastest(times)[0] == "nearer"
    assert (times["hot"].us or 0.0) > 60.0
    again = {name: gpu.samples.count(name) - gpu.samples.count("far") for name in variants}
    assert again == {"far": 0, "near": 0, "hot": Effort().rounds, "nearer": Effort().rounds}


def test_the_one_that_is_chosen_has_been_timed_again(gpu: Gpu) -> None:
    """Also if it was out of reach at first."""

    def hot(i: int) -> None:
        gpu.now += 50.0 if gpu.now - gpu.begun < QUICK.sample_us * 1.1 else 90.0
        gpu.last = "hot"

    times = time_all({"hot": hot, "steady": gpu.variant("steady", 60.0)}, CALLS, QUICK, finals=Effort())
    assert fastest(times) == ["steady"]
    assert gpu.samples.count("steady") == gpu.samples.count("hot")


def test_how_long_a_cell_takes(gpu: Gpu) -> None:
    """No longer than two rounds of five samples of 15 ms did; quick is quick where calls are long, too."""
    time_all({name: gpu.variant(name, 50.0) for name in "abcdef"}, CALLS, Effort())
    assert gpu.now < 6 * 150e3
    gpu.now = 0.0
    time_all({name: gpu.variant(name, 4000.0) for name in "abcdef"}, 2, QUICK)
    assert gpu.now < 6 * 8e3 * (3 + 5) + 200e3
    gpu.now = 0.0
    time_all({str(i): gpu.variant(str(i), 50.0 + 5 * i) for i in range(20)}, CALLS, QUICK, finals=Effort())
    assert gpu.now < 20 * 18e3 + 150e3 + FINALISTS * 70e3
