"""`autofuse explain train.py --lr 1e-3`: reports the collectives of a script, which is not changed."""

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from autofuse.cli.terminal import check_folders, progress_bar, stdout, user_errors, write

if TYPE_CHECKING:
    from autofuse import Report, Site


def explain(
    script: Annotated[str, typer.Argument(help="A Python file, as torchrun would start it.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    world: Annotated[int, typer.Option(help="Ranks to pretend.")] = 2,
    rank: Annotated[int, typer.Option(help="The rank that this process plays.")] = 0,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Ranks on each host; all on one if absent.")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")] = False,
    policy: Annotated[
        str | None, typer.Option(help="auto, always or never, instead of the script's.")
    ] = None,
    patterns: Annotated[str | None, typer.Option(help="Fused ops to look for, separated by commas.")] = None,
    order: Annotated[str | None, typer.Option(help="direct, ring or oblivious.")] = None,
    all_backends: Annotated[
        bool, typer.Option("--all", help="Also what is compiled for another backend.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the whole report to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page to this file.")] = None,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the whole traceback if the script fails.")
    ] = False,
) -> None:
    """Runs SCRIPT as one rank of a pretended group and reports what becomes of its collectives.

    Process groups exchange nothing, compiled graphs return zeros. Options come before SCRIPT, its own
    arguments after it. Ctrl-C ends the script and prints the report. Exits with 0 if anything was compiled.
    """
    options = {"policy": policy, "patterns": patterns, "order": order}
    chosen = {name: value for name, value in options.items() if value is not None}
    with user_errors():
        if not module and not Path(script).is_file():
            raise ValueError(f"there is no file {script!r}; use -m for the name of a module")
        check_folders(json, html)
        # Importing torch takes seconds: first check the command line.
        from autofuse.cli.fake_ranks import fake_ranks
        from autofuse.inspection import explaining
        from autofuse.options import settings

        settings(**chosen)  # raises for a bad value
        with (
            fake_ranks(rank, world, ranks_per_host),
            progress_bar() as progress,
            explaining(chosen, all_backends, progress) as report,
        ):
            problem = _run(script, arguments or [], module, show_traceback)
        show(report, stdout())
        if json is not None:
            write(json, report.to_json() + "\n")
        if html is not None:
            report.save_html(html)
    if problem:
        typer.echo(f"\n{problem}", err=True)
    if not report.graphs:
        what = "torch.compile" if all_backends else "torch.compile(..., backend='autofuse')"
        hint = "" if all_backends else "; --all explains what is compiled for other backends, too"
        typer.echo(f"nothing was compiled by {what} before the script ended{hint}", err=True)
        raise typer.Exit(1)


def show(report: "Report", console: Console) -> None:
    """Prints a report: with colours and folded cells on a terminal, otherwise as `str(report)`."""
    title, *rest = str(report).split("\n\n")
    if not console.is_terminal or not report.sites:
        console.print(str(report))
        return
    console.print(title, style="bold")
    table = Table("graph", "collective", "becomes", "now", "bytes", "us", "apart us", "source", "why")
    for site in report.sites:
        table.add_row(*_cells(site), style=None if site.fused else "yellow")
    console.print(table, soft_wrap=False)
    for part in rest[1:]:  # the reasons and the graph breaks, below the table
        console.print(part + "\n")


def _cells(site: "Site") -> Sequence[str]:
    guess = site.prediction
    times = (None, None) if guess is None else (guess.fused_us, guess.unfused_us)
    becomes = f"{site.pattern}, {site.order}" if site.fused else "kept"
    now = site.state.value if site.fused else "-"
    source = os.path.basename(site.source or "-")
    why = ": ".join(filter(None, (site.reason.value if site.reason else "", site.detail)))
    numbers = ("-" if n is None else f"{n:,.0f}" for n in (site.nbytes, *times))
    return site.graph, site.collective, becomes, now, *numbers, source, why


def _run(script: str, arguments: Sequence[str], module: bool, show_traceback: bool) -> str:
    """Runs the script as Python would. Returns a line that says what ended it early, or nothing."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.abspath(script)))
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return "" if end.code in (None, 0) else f"the script exited with {end.code}"
    except KeyboardInterrupt:
        return "the script was interrupted"
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        return _brief(error)
    finally:
        sys.argv, sys.path[:] = argv, path
    return ""


def _brief(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<")]
    text = (str(error).strip().splitlines() or [""])[0]
    place = f"{own[-1].filename}:{own[-1].lineno}"
    return (
        f"the script ended with {type(error).__name__}: {text} ({place})\n"
        "(--traceback shows more; a script that checks its numbers stumbles: compiled graphs return zeros)"
    )
