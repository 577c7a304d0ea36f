"""What the commands share: errors that users cause, files that they ask for, and a progress bar."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from autofuse.progress import Progress, silent


@contextmanager
def user_errors() -> Iterator[None]:
    """A ValueError inside is a mistake in the command line: its text is printed, and the exit code is 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def pair(text: str, name: str) -> tuple[int, int]:
    """`(rows, columns)` of `ROWSxCOLS`. Raises ValueError for anything else."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise ValueError(f"{name}: expected ROWSxCOLS such as 128x4096, got {text!r}")
    return int(parts[0]), int(parts[1])


def one_of(value: str, allowed: Sequence[str], name: str) -> None:
    """Raises ValueError unless `value` is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} {value!r}: expected one of {', '.join(allowed)}")


def check_folders(*paths: Path | None) -> None:
    """Raises ValueError if the folder of a file does not exist. Called before long work, not after it."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {path.parent}")


def write(path: Path, text: str) -> None:
    """Writes a file that the user asked for. Raises ValueError if that fails."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def stdout() -> Console:
    """Standard output. A terminal gets colours; text is never read as markup."""
    return Console(markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A `progress` that draws a bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield silent
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)

        def progress(label: str, done: int, total: int | None) -> None:
            bars.update(task, description=label, completed=done, total=total)

        yield progress
