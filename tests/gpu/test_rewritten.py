"""Compiled programs in which a pass merges or moves collectives before they are fused."""

from collections.abc import Callable

import pytest

from tests.ranks import RankPool

from . import rewritten_on_gpus
from .conftest import WORLDS
from .expected import MOST_ERROR

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize("m", [16, 96, 1000])
@pytest.mark.parametrize("name", rewritten_on_gpus.PROGRAMS)
@pytest.mark.parametrize("world", WORLDS)
def test_one_op_is_left(gpu_ranks: Pools, world: int, name: str, m: int) -> None:
    for error, found in gpu_ranks(world).run(rewritten_on_gpus.compiled, name, m, timeout=200):
        assert not found
        assert error < 2 * MOST_ERROR  # eager mode rounds as often
