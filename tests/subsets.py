"""Small subsets of test cases in which every value still occurs."""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import product
from typing import TypeVar

import pytest

Case = TypeVar("Case")

EVERY = [pytest.param(False, id="some"), pytest.param(True, id="every", marks=pytest.mark.full)]
"""Values of a test's parameter `every`: a subset in the fast tier, all cases in the full one."""


def each_value(cases: Iterable[Case], features: Callable[[Case], Mapping[str, object]]) -> list[Case]:
    """Cases that together have each value of each feature that any of `cases` has.

    Most faults of a compiled variant depend on one of its constants: the subset shows them, too. The choice
    is greedy and depends on nothing but `cases` and their order.
    """
    given = list(cases)
    values = [set(features(case).items()) for case in given]
    missing = set[object]().union(*values)
    chosen = []
    while missing:
        best = max(range(len(given)), key=lambda i: len(values[i] & missing))
        chosen.append(best)
        missing -= values[best]
    return [given[i] for i in sorted(chosen)]


def in_tiers(
    full: Mapping[str, Collection[object]] | None = None, **values: Iterable[object]
) -> pytest.MarkDecorator:
    """Parametrizes a test with all combinations of the values of several parameters. The fast tier has a
    subset in which each value of each parameter occurs.

    full: values, by parameter, that are for the full tier alone.
    """

    def is_slow(case: Mapping[str, object]) -> bool:
        return any(case[name] in slow for name, slow in (full or {}).items())

    def name_of(case: Mapping[str, object]) -> str:
        return "-".join(getattr(value, "__name__", str(value)) for value in case.values())

    cases = [dict(zip(values, case, strict=True)) for case in product(*values.values())]
    fast = each_value([case for case in cases if not is_slow(case)], lambda case: case)
    return pytest.mark.parametrize(
        list(values),
        [
            pytest.param(*case.values(), marks=[] if case in fast else pytest.mark.full, id=name_of(case))
            for case in cases
        ],
    )
