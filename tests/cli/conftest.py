"""The command as typer's runner calls it, in this process."""

from collections.abc import Callable, Iterator

import pytest
import torch
from typer.testing import CliRunner, Result

from autofuse.cli.app import app


@pytest.fixture
def command() -> Callable[..., Result]:
    """`command("plan", ...)`: its output and exit code. Anything but an exit is raised."""

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(app, list(map(str, arguments)), prog_name="autofuse")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
