"""`autofuse simulate t3`, `dlrm`, `h200` or a script: what fusion gains on machines that are not here."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autofuse.cli.terminal import check_folders, progress_bar, user_errors, write

if TYPE_CHECKING:
    from autofuse.lowering.simulate.machine import Machine

WORLDS, LINKS = (2, 8, 64, 256, 1024), (50.0, 200.0, 450.0)
"""Ranks and GB/s of a sweep."""
WIDTHS = (25, 24, 5, 8, 7, 9, 12, 16)
"""Characters in each column of a sweep. They are fixed, since every row is printed as soon as it is known."""


def simulate(
    what: Annotated[str, typer.Argument(help="t3, dlrm, h200, speed, or a Python file as for explain.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments, after --.")
    ] = None,
    world: Annotated[int, typer.Option(help="Ranks of a script.", min=2)] = 8,
    link: Annotated[float, typer.Option(help="GB/s of a link in one direction.", min=1.0)] = 340.0,
    latency: Annotated[float, typer.Option(help="Microseconds of a link.", min=0.0)] = 0.7,
    hosts: Annotated[
        int | None, typer.Option(help="GPUs of a host; all of one host if absent.", min=1)
    ] = None,
    nic: Annotated[float, typer.Option(help="GB/s to other hosts, for each GPU.", min=0.1)] = 50.0,
    sweep: Annotated[bool, typer.Option("--sweep", help="Over ranks up to 1024, and links.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases.")] = False,
    figures: Annotated[Path | None, typer.Option(help="Write pictures to this folder.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a timeline as `trace` does, without suffix.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this file.")] = None,
) -> None:
    """Runs the plans of fused ops on described machines, beside published or measured numbers.

    t3 and dlrm: the published simulations. h200: predictions beside the benchmarks. A script: its graphs, as
    `explain` reads them, on H200 with the network of the options.
    """
    with user_errors():
        check_folders(json, trace, figures and figures / "a")
        if what == "t3":
            _t3(quick, figures, json)
        elif what == "dlrm":
            _dlrm(quick)
        elif what == "speed":
            _speed()
        else:
            machine = _machine(link, latency, hosts, nic)
            if what == "h200":
                _h200(quick, sweep, json, trace, machine)
            else:
                _script(what, arguments or [], world, sweep, machine, json)


def _machine(link: float, latency: float, hosts: int | None, nic: float) -> Machine:
    from autofuse.lowering.simulate.machine import Network, Shape
    from autofuse.lowering.simulate.machines import H200

    network = Network(link * 1e3, latency)
    if hosts is not None:
        network = replace(network, shape=Shape.HOSTS, width=hosts, nic_rate=nic * 1e3, nic_latency=3.0)
    return replace(H200, network=network)


def _t3(quick: bool, figures: Path | None, json: Path | None) -> None:
    from autofuse.simulate import t3_published as t3
    from autofuse.simulate.t3 import LARGE, SMALL
    from autofuse.simulate.t3_figures import draw
    from autofuse.simulate.tables import beside

    if quick:
        chosen = [case for case in SMALL if case.model == "T-NLG" and case.world == 8 and case.name == "OP"]
        typer.echo(t3.by_sub_layer(t3.run_all(chosen)))
        return
    with progress_bar() as progress:
        small = t3.run_all(SMALL, progress)
        large = t3.run_all(LARGE, progress)
        cut = t3.splits(small)
    rows = t3.rows(small, large, cut)
    typer.echo(f"{t3.by_sub_layer([*small, *large])}\n\n{beside(rows)}")
    if json is not None:
        write(json, json_module.dumps([asdict(row) for row in rows], indent=1) + "\n")
    for name, text in draw(small).items() if figures is not None else ():
        write(figures / name, text)  # type: ignore[operator]


def _dlrm(quick: bool) -> None:
    from autofuse.simulate.dlrm import report

    typer.echo(report(quick))


def _speed() -> None:
    """A sub-layer of some 10^6 events."""
    import time

    from autofuse.lowering.simulate.machines import T3
    from autofuse.simulate.t3 import LARGE, overlapped, round_robin

    start, events = time.perf_counter(), 0
    while events < 1_000_000:
        events += overlapped(LARGE[1], round_robin(replace(T3, groups=32))).events
    seconds = time.perf_counter() - start
    typer.echo(f"{events} events in {seconds:.1f} s, {events / seconds:.0f} a second")


def _h200(quick: bool, sweep: bool, json: Path | None, trace: Path | None, machine: Machine) -> None:
    from autofuse.simulate import h200_measured as measured
    from autofuse.simulate.h200 import cells
    from autofuse.simulate.layers import rows, write_trace

    if trace is not None:
        write_trace(trace, machine)
        return
    if sweep:
        for row in rows(WORLDS, machine):
            typer.echo(" ".join(text.ljust(width) for text, width in zip(row, WIDTHS, strict=True)).rstrip())
        return
    chosen = cells()
    if quick:
        chosen = [cell for cell in chosen if cell.tokens in (8, 2048) and cell.label == "llama70b.o_proj"]
    with progress_bar() as progress:
        found = measured.predict_all(chosen, progress)
    typer.echo(f"{measured.by_cell(found)}\n\n{measured.report(found)}")
    if json is not None:
        write(json, measured.to_json(found))


def _script(
    script: str, arguments: Sequence[str], world: int, sweep: bool, machine: Machine, json: Path | None
) -> None:
    from autofuse.simulate.script import explained, gains, table, to_json

    if not Path(script).is_file():
        raise ValueError(f"{script!r}: expected t3, dlrm, h200, speed, or a file; there is none of this name")
    if not sweep:
        found = gains(explained(script, arguments, world), machine)
        typer.echo(table(found))
        if json is not None:
            write(json, to_json(found))
        return
    for ranks in WORLDS:
        try:
            report = explained(script, arguments, ranks)
        except ValueError as error:
            typer.echo(f"{ranks} ranks: {error}\n")
            continue
        for rate in LINKS:
            on = replace(machine, network=replace(machine.network, rate=rate * 1e3))
            typer.echo(f"{ranks} ranks, {rate:g} GB/s\n{table(gains(report, on))}\n")
