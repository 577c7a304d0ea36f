"""The `autofuse` command: one file a subcommand, `app` puts them together.

typer and rich come with `pip install "autofuse[cli]"`; only the command imports them.
"""

import sys


def main() -> None:
    """Runs the command. Without typer or rich it prints how to install them, and exits with 2."""
    try:
        from autofuse.cli.app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        print(f'autofuse: the command needs {missing}: pip install "autofuse[cli]"', file=sys.stderr)
        raise SystemExit(2) from None
    app(prog_name="autofuse")
