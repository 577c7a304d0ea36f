"""Small subsets of test cases in which every pair of values, or every value, still occurs."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, combinations
from typing import TypeVar

import pytest

Case = TypeVar("Case")

EVERY = [pytest.param(False, id="some"), pytest.param(True, id="every", marks=pytest.mark.full)]
"""Values of a test's parameter `every`: a subset in the fast tier, all cases in the full one."""


MOST_VALUES = 2
"""A feature with more values is a size, such as the number of ranks or of stages."""


def each_value(cases: Iterable[Case], features: Callable[[Case], Mapping[str, object]]) -> list[Case]:
    """Cases that together have each value of each feature."""
    return pairwise(cases, features, 0)


def pairwise(
    cases: Iterable[Case], features: Callable[[Case], Mapping[str, object]], most_values: int = MOST_VALUES
) -> list[Case]:
    """Cases that together have each pair of features, `(name, value)` twice, that any of `cases` has.

    Most faults of a compiled variant depend on one or two of its constants: the subset shows them, too.
    A feature of more than `most_values` values is not paired; each of its values occurs. The choice is greedy
    and depends on nothing but `cases` and their order.
    """
    given = list(cases)
    named = [sorted(features(case).items(), key=lambda feature: feature[0]) for case in given]
    values: dict[str, set[object]] = {}
    for name, value in chain.from_iterable(named):
        values.setdefault(name, set()).add(value)
    few = {name for name, found in values.items() if len(found) <= most_values}
    pairs = [{*combinations([f for f in case if f[0] in few], 2), *case} for case in named]
    missing = set[object]().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(given)), key=lambda i: len(pairs[i] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [given[i] for i in sorted(chosen)]
