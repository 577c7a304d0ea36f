"""`autofuse doctor`: whether anything can be fused on this machine, and what to do where it cannot."""

import json as json_module
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from autofuse.cli.terminal import stdout

_MARKS = {"ok": ("ok", "green"), "limited": ("limited", "yellow"), "broken": ("BROKEN", "bold red")}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Looks at torch, devices, kernels, shared memory, compilers and launcher, and compiles a tiny model.

    Exits with 0 if autofuse is usable here, with 1 if not.
    """
    from autofuse.cli.checks import all_checks

    checks = all_checks()
    usable = all(check.state != "broken" for check in checks)
    if json:
        typer.echo(json_module.dumps({"usable": usable, "checks": list(map(asdict, checks))}, indent=1))
    else:
        console = stdout()
        for check in checks:
            word, style = _MARKS[check.state]
            console.print(Text.assemble((f"{word:8}", style), (f"{check.name:17}", "bold"), check.found))
            if check.advice:
                console.print(" " * 25 + check.advice)
        console.print("\nusable" if usable else "\nnot usable: mend what is broken above")
    if not usable:
        raise typer.Exit(1)
