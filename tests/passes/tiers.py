"""Which programs the fast tier leaves to the full one: `full_tier.txt`, a name a line.

    python -m tests.passes.tiers

measures which steps from line to line of `passes/` each program takes on two ranks, and writes the file
anew: the fast tier keeps a cheap subset of the programs that takes each step TIMES times, if so many
programs take it. A program that the file does not name is in the fast tier.
"""

import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from autofuse.lowering import torch_internals

TIMES = 4
FILE = Path(__file__).with_name("full_tier.txt")
PASSES = f"{Path(__file__).parents[2] / 'passes'}/"

Step = tuple[str, int, int]
"""A file, the line before and the line; before the first line of a function that of its definition."""


def full_tier() -> frozenset[str]:
    """Programs for the full tier alone."""
    return frozenset(FILE.read_text().splitlines())


def measure(rank: int, world: int, module: str, name: str) -> tuple[list[Step], float]:
    """The steps that a program takes, and seconds of its rank."""
    from .harness import compare

    steps: set[Step] = set()
    before: dict[FrameType, int] = {}
    rewrite = torch_internals.run_post_grad_passes

    def note(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if event == "call":
            path = str(Path(code.co_filename).resolve()) if "passes" in code.co_filename else ""
            return note if path.startswith(PASSES) else None
        if event == "line":
            steps.add((code.co_filename, before.get(frame, -code.co_firstlineno), frame.f_lineno))
            before[frame] = frame.f_lineno
        elif event == "return":
            before.pop(frame, None)
        return note

    def noted(*args: Any) -> None:
        sys.settrace(note)
        try:
            rewrite(*args)
        finally:
            sys.settrace(None)

    began = time.process_time()
    with patch.object(torch_internals, "run_post_grad_passes", noted):
        compare(rank, world, module, name)
    return sorted(steps), time.process_time() - began


def choose(found: dict[str, tuple[list[Step], float]]) -> list[str]:
    """Programs for the fast tier: by turns the one with the most missing steps a second."""
    taken = Counter(step for steps, _ in found.values() for step in steps)
    missing = {step: min(TIMES, count) for step, count in taken.items()}
    chosen: list[str] = []
    while any(missing.values()):
        worth = {
            name: sum(missing[step] > 0 for step in steps) / seconds
            for name, (steps, seconds) in found.items()
            if name not in chosen
        }
        chosen.append(max(worth, key=worth.__getitem__))
        for step in found[chosen[-1]][0]:
            missing[step] = max(0, missing[step] - 1)
    return chosen


def main() -> None:
    """The command."""
    from tests.ranks import Pools

    from .test_programs import CASES, case_name

    with closing(Pools()) as ranks:
        found = {
            case_name(case): ranks(2).run(measure, case[0].__name__, case[1], timeout=200)[0]
            for case in CASES
            if 2 in case[0].PROGRAMS[case[1]].worlds
        }
    chosen = choose(found)
    FILE.write_text("".join(f"{name}\n" for name in sorted(set(found) - set(chosen))))
    print(f"{len(chosen)} of {len(found)} programs in the fast tier")


if __name__ == "__main__":
    main()
