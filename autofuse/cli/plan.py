"""`autofuse plan matmul_all_reduce --world 4 --shape 512x4096`: what each rank computes, sends and awaits,
and when."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from autofuse.cli.terminal import pair, stdout, user_errors, write
from autofuse.lowering.drawing import draw_svg, draw_text
from autofuse.lowering.orders import make_plan
from autofuse.lowering.plan import Plan, contention
from autofuse.lowering.verify import verify as prove

_WIDTH = 120
"""Columns of a drawing that is not for a terminal."""

_MOST_WORLD = 256
"""Most ranks. Plans of all ranks are made, and the number of their actions grows with the square of the
world."""


def plan(
    op: Annotated[str, typer.Argument(help="A fused op, such as matmul_reduce_scatter.")],
    world: Annotated[int, typer.Option(help="Number of ranks.")] = 4,
    shape: Annotated[
        str, typer.Option(help="ROWSxCOLS of the matrix whose rows are cut into a chunk a rank.")
    ] = "512x512",
    block: Annotated[str | None, typer.Option(help="Largest ROWSxCOLS of a tile; a chunk if absent.")] = None,
    order: Annotated[str, typer.Option(help="direct, ring or oblivious.")] = "direct",
    compare: Annotated[str | None, typer.Option(help="A second order, drawn beside the first.")] = None,
    one_shot: Annotated[bool, typer.Option(help="The all_reduce in which every rank reduces all.")] = False,
    table: Annotated[bool, typer.Option(help="Print the actions of --rank instead.")] = False,
    rank: Annotated[int, typer.Option(help="Whose actions --table prints.")] = 0,
    verify: Annotated[
        bool, typer.Option(help="Prove the plans: no race, no deadlock, all delivered.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="Write the drawing to this file.")] = None,
) -> None:
    """Draws the plans of all ranks: ranks and steps, tiles, links, and how many peers meet at one rank."""
    with user_errors():
        orders = [order] if compare is None else [order, compare]
        extent = pair(shape, "--shape")
        tile = None if block is None else pair(block, "--block")
        plans = {each: make_plans(op, each, world, extent, tile, one_shot) for each in orders}
        if not 0 <= rank < world:
            raise ValueError(f"--rank {rank} is outside of a world of {world}")
        for each, ranks in plans.items():
            if table:
                typer.echo(f"{ranks[rank]}\n{_meetings(ranks)}\n")
            elif svg is None:
                _draw(ranks)
            else:
                path = svg if compare is None else svg.with_stem(f"{svg.stem}-{each}")
                write(path, draw_svg(ranks) + "\n")
    if verify:
        proved = [_verify(ranks) for ranks in plans.values()]
        if not all(proved):
            raise typer.Exit(1)


def make_plans(
    op: str,
    order: str,
    world: int,
    shape: tuple[int, int],
    block: tuple[int, int] | None = None,
    one_shot: bool = False,
) -> list[Plan]:
    """The plans of all ranks. The rows of `shape` are cut into a chunk a rank, as evenly as it goes; what
    chunks hold is in `plan.Family`: parts of the product, of the gathered matrix, or what a rank sends to
    each of the others. Raises ValueError for what `make_plan` does not take."""
    if not 1 <= world <= _MOST_WORLD:
        raise ValueError(f"--world {world}: expected 1 to {_MOST_WORLD} ranks")
    rows, cols = shape
    chunks = tuple((rows * (c + 1) // world - rows * c // world, cols) for c in range(world))
    if one_shot:  # one chunk of everything, for all ranks
        chunks = (shape, *[(0, cols)] * (world - 1))
    tile = block or (max(1, *(r for r, _ in chunks)), max(1, cols))
    return [make_plan(op, order, world, rank, chunks, tile, one_shot) for rank in range(world)]


def _draw(plans: Sequence[Plan]) -> None:
    console = stdout()
    text = Text(draw_text(plans, console.width if console.is_terminal else _WIDTH) + "\n")
    text.highlight_regex(r"(?m)^(step|rank \d+|peers)", "bold")
    text.highlight_regex(r"\d*[<>]\d*\+?", "green")  # tiles that cross a link
    text.highlight_regex(r"\bw(\d+|\*)", "dim")
    for line in re.finditer(r"(?m)^peers .*$", text.plain):
        for number in re.finditer(r"\d+", line.group()):
            if int(number.group()) > 1:  # peers that meet at one rank
                text.stylize("red", line.start() + number.start(), line.start() + number.end())
    console.print(text)


def _meetings(plans: Sequence[Plan]) -> str:
    return f"peers that meet at one rank's memory, by step: {' '.join(map(str, contention(plans)))}"


def _verify(plans: Sequence[Plan]) -> bool:
    """Prints the result of the verifier; returns whether the plans are proved."""
    name = f"{plans[0].op}, {plans[0].order.value}, {plans[0].world} ranks"
    try:
        prove(plans)
    except AssertionError as error:
        typer.echo(f"not proved: {error}", err=True)
        return False
    typer.echo(f"proved: {name}")
    return True
