"""Fixtures that all tests share."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.ranks import COMPILING, INTERPRETING, Pools

# Pools of compiling processes, one a test process and one a rank, would take longer to start than to compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A table that was tuned on this machine must not decide what tests see.
os.environ["AUTOFUSE_TABLE"] = str(Path(__file__).parents[1] / "passes/choice/tables/cpu.json")

# An example may take long beside other load.
settings.register_profile("any time", deadline=None)
settings.load_profile("any time")

SERVERS = {"compiling": COMPILING, "interpreting": INTERPRETING}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the process that hands out tests for pytest-xdist: all test processes have its servers of ranks."""
    node.workerinput.update({name: server.share() for name, server in SERVERS.items()})


def pytest_configure(config: Any) -> None:
    for name, shared in getattr(config, "workerinput", {}).items():
        if name in SERVERS:
            SERVERS[name].join(shared)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(world)`: the pool of that size."""
    with closing(Pools()) as pools:
        yield pools
