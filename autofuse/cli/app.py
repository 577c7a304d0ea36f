"""The subcommands under one name. A subcommand that needs torch imports it when it runs."""

import typer

from autofuse.cli import bench, doctor, explain, plan, simulate, trace, tune

app = typer.Typer(
    help="What autofuse does to a script, whether this machine is ready for it, and how fast it is.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # errors and help are a few plain lines
    pretty_exceptions_enable=False,
)
app.command()(doctor.doctor)
app.command(context_settings={"allow_interspersed_args": False})(explain.explain)
app.command()(plan.plan)
app.add_typer(bench.app, name="bench")
app.command()(tune.tune)
app.command()(trace.trace)
app.command()(simulate.simulate)
