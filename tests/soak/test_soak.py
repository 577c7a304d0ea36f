"""The campaign itself: it counts calls, and a rank that is killed."""

import pytest

from tests.soak.run import run_episode


@pytest.mark.full
@pytest.mark.parametrize("number", [0, 1], ids=["all live", "one is killed"])
def test_an_episode(number: int) -> None:
    counts = run_episode(number, seed=3, seconds=2.0, worlds=[3])
    assert counts.calls > 100
    assert counts.killed == number
    assert not counts.failed, counts
