"""embedding_exchange on 2 and 4 ranks that interpret it, bitwise against pooling bag by bag.

The programs of a rank run one after another there, so that only the last of them may wait (`copying=1`).
"""

from collections.abc import Callable

import pytest

from tests.kernels.embedding_calls import Exchange, run_exchanges
from tests.ranks import RankPool

Interpreters = Callable[[int], RankPool]


def dims(world: int) -> tuple[tuple[int, ...], ...]:
    """Of two tables a rank, of one width."""
    return ((16, 16),) * world


@pytest.mark.parametrize("world", [2, 4])
def test_bitwise(interpreters: Interpreters, world: int) -> None:
    calls = [Exchange(dims(world)) for _ in range(2)]
    interpreters(world).run(run_exchanges, calls, timeout=120)
