"""`autofuse tune`: measures this machine for the cost model."""

from pathlib import Path
from typing import Annotated

import typer

from autofuse.cli.terminal import progress_bar, user_errors


def tune(
    ranks: Annotated[list[int], typer.Option(help="Size of a group; repeat for several.")] = [2, 4],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="A dtype; repeat for several.")] = ["float32"],  # noqa: B006
    output: Annotated[Path | None, typer.Option(help="The table; the user's own if absent.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rows, few times: in about a minute.")] = False,
) -> None:
    """Measures compute and collectives of this machine and writes the table that `auto` decides by."""
    with user_errors():
        from autofuse.tune import comparison, default_output
        from autofuse.tune import tune as measure_and_fit

        path = output or default_output()
        with progress_bar() as progress:
            table = measure_and_fit(ranks, dtype, path, quick, progress)
        typer.echo(f"{comparison(table)}\nwritten to {path}")
