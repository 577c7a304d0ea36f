"""A small subset of test cases in which every pair of values still occurs."""

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import TypeVar

import pytest

Case = TypeVar("Case")

EVERY = [pytest.param(False, id="pairwise"), pytest.param(True, id="every", marks=pytest.mark.full)]
"""Values of a test's parameter `every`: a pairwise subset in the fast tier, all cases in the full one."""


def pairwise(cases: Iterable[Case], features: Callable[[Case], Mapping[str, object]]) -> list[Case]:
    """Cases that together have each pair of features, `(name, value)` twice, that any of `cases` has.

    Most faults of a compiled variant depend on one or two of its constants: the subset shows them, too.
    The choice is greedy and depends on nothing but `cases` and their order.
    """
    given = list(cases)
    pairs = [set(combinations(sorted(features(case).items(), key=lambda f: f[0]), 2)) for case in given]
    missing = set[object]().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(given)), key=lambda i: len(pairs[i] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [given[i] for i in sorted(chosen)]
