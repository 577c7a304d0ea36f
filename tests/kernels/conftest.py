"""Ranks whose kernels are interpreted: CPU processes that map each other's memory."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.ranks import INTERPRETING, Pools


@pytest.fixture(scope="session")
def interpreters() -> Iterator[Pools]:
    """As `ranks`, with TRITON_INTERPRET=1."""
    with closing(Pools(INTERPRETING)) as pools:
        yield pools
