"""The command itself: its subcommands, mistakes on the command line, and what it needs to be installed."""

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from typer.testing import Result

Command = Callable[..., Result]

SUBCOMMANDS = ("doctor", "explain", "plan", "bench", "tune", "trace")
MISTAKES = {
    "unknown command": (["explian"], "explian"),
    "unknown option": (["plan", "matmul_all_reduce", "--wrld", "4"], "--wrld"),
    "no number": (["plan", "matmul_all_reduce", "--world", "four"], "--world"),
    "missing file": (["explain", "no_such_file.py"], "there is no file 'no_such_file.py'"),
    "bad world": (["explain", "--world", "0", __file__], "expected at least one rank, got a world of 0"),
    "bad rank": (["explain", "--world", "2", "--rank", "2", __file__], "expected 0 to 1"),
    "bad policy": (["explain", "--policy", "often", __file__], "expected one of 'auto', 'always', 'never'"),
    "unknown op": (["plan", "matmul"], "expected one of all_gather_matmul, all_reduce_update"),
    "unknown order": (["plan", "matmul_all_reduce", "--order", "random"], "expected one of ring, direct"),
    "bad shape": (["plan", "matmul_all_reduce", "--shape", "512"], "expected ROWSxCOLS"),
    "bad world of a plan": (["plan", "matmul_all_reduce", "--world", "0"], "expected 1 to 256 ranks"),
    "bad rank of a plan": (["plan", "matmul_all_reduce", "--rank", "4"], "outside of a world of 4"),
    "no one-shot": (["plan", "all_gather_matmul", "--one-shot"], "only matmul_all_reduce"),
    "no such folder": (["plan", "matmul_all_reduce", "--svg", "/no/such/folder/a.svg"], "cannot write"),
    "no folder for the report": (["explain", "--json", "/no/such/a.json", __file__], "no folder /no/such"),
    "bad dtype": (["bench", "--dtype", "int8"], "expected one of float32, bfloat16, float16"),
    "one rank": (["bench", "--ranks", "1"], "expected 2 ranks or more"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_a_line(name: str, command: Command) -> None:
    arguments, text = MISTAKES[name]
    result = command(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) <= 4


def test_help(command: Command) -> None:
    assert all(name in command("--help").stdout for name in SUBCOMMANDS)
    for name in SUBCOMMANDS:
        assert command(name, "--help").exit_code == 0


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    done = run(f"import sys; sys.modules[{missing!r}] = None\nfrom autofuse.cli import main; main()")
    assert done.returncode == 2
    assert done.stderr == f'autofuse: the command needs {missing}: pip install "autofuse[cli]"\n'


def test_the_package_imports_neither_the_extra_nor_the_command() -> None:
    code = (
        "import autofuse.backend, autofuse.inspection, sys; print({'typer', 'autofuse.cli'} & {*sys.modules})"
    )
    assert run(code).stdout == "set()\n"


@pytest.mark.parametrize(
    "start",
    [
        ["-c", "from autofuse.cli import main; main()"],
        pytest.param(["-m", "autofuse"], marks=pytest.mark.full),  # as other tests start it
    ],
)
def test_a_plan_in_a_process_of_its_own(start: Sequence[str]) -> None:
    code = [*start, "plan", "matmul_all_reduce", "--world", "2"]
    done = subprocess.run([sys.executable, *code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.startswith("matmul_all_reduce: direct, 2 ranks")
