"""`autofuse tune`: measures this machine for the cost model; on GPUs, the ways to run the dense ops."""

import math
from pathlib import Path
from typing import Annotated

import typer

from autofuse.cli.gpu_ranks import gpu_ranks, layer
from autofuse.cli.terminal import one_of, progress_bar, user_errors


def tune(
    ranks: Annotated[list[int], typer.Option(help="Size of a group; repeat for several.")] = [2, 4],  # noqa: B006
    dtype: Annotated[list[str] | None, typer.Option(help="A dtype; repeat for several.")] = None,
    output: Annotated[Path | None, typer.Option(help="The table; the user's own if absent.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rows, few times: in about a minute.")] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda under torchrun.")] = "cpu",
    size: Annotated[
        list[str] | None, typer.Option(help="On GPUs: K,N of a layer, as for trace; repeat for several.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="On GPUs: so many tokens; repeat for several.", min=1)
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="On GPUs: layers of many models, as the shipped points.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="On GPUs: begin nothing after so many seconds.")] = math.inf,
    again: Annotated[bool, typer.Option("--again", help="On GPUs: also what was measured before.")] = False,
    fit: Annotated[
        str | None, typer.Option(help="A kind of GPU, such as h200: only fit constants to its points.")
    ] = None,
) -> None:
    """Measures compute and collectives of this machine and writes the table that `auto` decides by.

    On the GPUs of torchrun: every way to run the dense ops at the sizes given. With --fit: the constants that
    predict the ways of a kind of GPU, from the points that are shipped for it; needs no GPU.
    """
    with user_errors():
        if fit is not None:
            from autofuse.bench.gpu.measured import fit_shipped

            typer.echo(f"written to {fit_shipped(fit, output)}")
            return
        one_of(device, ("cpu", "cuda"), "--device")
        if device == "cuda":
            _tune_gpus(dtype or ["bfloat16"], size, tokens, layers, seconds, again)
            return
        from autofuse.tune import comparison, default_output
        from autofuse.tune import tune as measure_and_fit

        path = output or default_output()
        with progress_bar() as progress:
            table = measure_and_fit(ranks, dtype or ["float32"], path, quick, progress)
        typer.echo(f"{comparison(table)}\nwritten to {path}")


def _tune_gpus(
    dtypes: list[str],
    sizes: list[str] | None,
    tokens: list[int] | None,
    layers: bool,
    seconds: float,
    again: bool,
) -> None:
    for dtype in dtypes:
        one_of(dtype, ("bfloat16", "float16"), "--dtype")
    if layers and sizes:
        raise ValueError("--layers measures sizes of its own: leave out --size")
    with gpu_ranks("tune") as (rank, world):
        import torch

        from autofuse.cli import tune_ways as ways
        from autofuse.lowering.gpu.choice.points import own_file

        def told(line: str) -> None:
            if rank == 0:
                typer.echo(line)

        if layers:
            fitting = [size for size in ways.LAYERS if layer(size)[0] % world == 0]
            found = ways.mixed(
                ways.problems(fitting, tokens or ways.LAYER_TOKENS, dtypes, world, ways.LAYER_OPS)
            )
        else:
            found = ways.problems(sizes or ["8192,8192"], tokens or ways.TOKENS, dtypes, world)
        told(ways.tune_ways(found, seconds, again or not layers, layers, told))
        told(f"written to {own_file(torch.device('cuda', torch.cuda.current_device()))}")
