"""Which cases of parametrized tests the fast tier leaves to the full one: `full_tier.txt`, a test a line.

    python -m tests.passes.tiers

measures which steps from line to line of `passes/` each test takes while graphs are rewritten, in its own
process and on rank 0, and writes the file anew. The fast tier has every test without parameters, and of the
others a cheap subset that takes each step TIMES times, if so many tests take it, with one case of each
function at least. A test that the file does not name is in the fast tier.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

TIMES = 3
FILE = Path(__file__).with_name("full_tier.txt")
PASSES = f"{Path(__file__).parents[2] / 'passes'}/"
MEASURED = "AUTOFUSE_TEST_STEPS"
"""The folder for what is measured; while it is in the environment, no test is left out."""

TRACING_SLOWS = 5
"""Ranks have so many times as long when they note their steps."""

Step = tuple[str, int, int]
"""A file, the line before and the line; before the first line of a function that of its definition."""

_noted: set[Step] = set()


def full_tier() -> frozenset[str]:
    """Tests for the full tier alone."""
    return frozenset() if MEASURED in os.environ else frozenset(FILE.read_text().splitlines())


def leave_to_full_tier(items: list[pytest.Item]) -> None:
    """Marks what `full_tier.txt` names."""
    full = full_tier()
    for item in items:
        if name_of(item.nodeid) in full:
            item.add_marker(pytest.mark.full)


def name_of(node: str) -> str:
    """Of a test of this folder."""
    return node.removeprefix("tests/passes/")


@cache
def _is_measured(path: str) -> bool:
    return os.path.realpath(path).startswith(PASSES)


def _note(frame: FrameType, event: str, _: Any) -> Any:
    """A trace function that notes the steps of functions of `passes/`."""
    path = frame.f_code.co_filename
    if event != "call" or not _is_measured(path):
        return None
    before = -frame.f_code.co_firstlineno

    def step(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal before
        if event == "line":
            _noted.add((path, before, frame.f_lineno))
            before = frame.f_lineno
        return step

    return step


@contextmanager
def noting() -> Iterator[None]:
    """Notes the steps of both passes of this process."""
    from autofuse.backend import FusionPass, JointPass

    def noted(rewrite: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sys.settrace(_note)
            try:
                return rewrite(*args, **kwargs)
            finally:
                sys.settrace(None)

        return call

    _noted.clear()
    with ExitStack() as stack:
        for kind in (FusionPass, JointPass):
            stack.enter_context(patch.object(kind, "__call__", noted(kind.__call__)))
        yield


def _on_rank(rank: int, world: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, set[Step]]:
    with noting():
        return fn(rank, world, *args), set(_noted) if rank == 0 else set()


class Measuring:
    """A plugin of pytest: appends what each test takes to a file of this process."""

    def __init__(self, folder: str) -> None:
        self.file = Path(folder, f"{os.getpid()}")
        self.steps: set[Step] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        from tests.ranks import RankPool

        run = RankPool.run

        def measured(pool: RankPool, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
            found = run(pool, _on_rank, fn, args, timeout=timeout * TRACING_SLOWS)
            self.steps |= found[0][1]
            return [result for result, _ in found]

        with patch.object(RankPool, "run", measured), noting():
            yield
            self.steps |= _noted

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            with self.file.open("a") as file:
                print(json.dumps([name_of(report.nodeid), sorted(self.steps), report.duration]), file=file)
            self.steps = set()


def pytest_configure(config: pytest.Config) -> None:
    if (folder := os.environ.get(MEASURED)) and os.environ.get("PYTEST_XDIST_WORKER"):
        config.pluginmanager.register(Measuring(folder))


def choose(found: dict[str, tuple[list[Step], float]]) -> set[str]:
    """Tests for the fast tier: by turns the one with the most missing steps a second; at last the cheapest
    case of each function that has none."""
    taken = Counter(step for steps, _ in found.values() for step in steps)
    missing = {step: min(TIMES, count) for step, count in taken.items()}
    chosen: set[str] = set()

    def take(name: str) -> None:
        chosen.add(name)
        for step in found[name][0]:
            missing[step] = max(0, missing[step] - 1)

    for name, (steps, _) in found.items():
        if not steps or "[" not in name:
            take(name)
    while any(missing.values()):
        worth = {
            name: sum(missing[step] > 0 for step in steps) / seconds
            for name, (steps, seconds) in found.items()
            if name not in chosen
        }
        take(max(worth, key=worth.__getitem__))
    functions = {name.split("[")[0] for name in chosen}
    for name in sorted(found, key=lambda name: found[name][1]):
        if (function := name.split("[")[0]) not in functions:
            functions.add(function)
            take(name)
    return chosen


def main() -> None:
    """The command."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {MEASURED: folder}):
        fast = "not full and not wheel and not gpu"
        code = pytest.main(
            ["-n", "3", "--timeout", "1200", "-p", "tests.passes.tiers", "-m", fast, str(FILE.parent)]
        )
        if code:
            sys.exit("what a failing test takes says nothing: mend it first")
        lines = [line for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    measured = [json.loads(line) for line in lines]
    found = {name: ([(p, a, b) for p, a, b in steps], seconds) for name, steps, seconds in measured}
    chosen = choose(found)
    FILE.write_text("".join(f"{name}\n" for name in sorted(set(found) - chosen)))
    fast_s, all_s = sum(found[name][1] for name in chosen), sum(seconds for _, seconds in found.values())
    print(f"{len(chosen)} of {len(found)} tests in the fast tier, {fast_s:.0f} of {all_s:.0f} s")


if __name__ == "__main__":
    main()
