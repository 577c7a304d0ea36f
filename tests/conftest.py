"""Fixtures that all tests share."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.ranks import Pools

# Pools of compiling processes, one a test process and one a rank, would take longer to start than to compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A table that was tuned on this machine must not decide what tests see.
os.environ["AUTOFUSE_TABLE"] = str(Path(__file__).parents[1] / "passes/choice/tables/cpu.json")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(world)`: the pool of that size."""
    with closing(Pools()) as pools:
        yield pools
