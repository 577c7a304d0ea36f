"""`autofuse tune`: measures this machine for the cost model; on GPUs, the ways to run the dense ops."""

from pathlib import Path
from typing import Annotated

import typer

from autofuse.cli.gpu_ranks import OPS, extents, gpu_ranks
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
            _tune_gpus(
                dtype or ["bfloat16"], size or ["8192,8192"], tokens or [1, 8, 32, 128, 512, 2048, 8192]
            )
            return
        from autofuse.tune import comparison, default_output
        from autofuse.tune import tune as measure_and_fit

        path = output or default_output()
        with progress_bar() as progress:
            table = measure_and_fit(ranks, dtype or ["float32"], path, quick, progress)
        typer.echo(f"{comparison(table)}\nwritten to {path}")


def _tune_gpus(dtypes: list[str], sizes: list[str], tokens: list[int]) -> None:
    for dtype in dtypes:
        one_of(dtype, ("bfloat16", "float16"), "--dtype")
    with gpu_ranks("tune") as (rank, world):
        import torch

        from autofuse.lowering.gpu.dense.measure import tune_problem

        for op in OPS:
            for m in tokens:
                if op in ("matmul_reduce_scatter", "all_gather_matmul") and m % world:
                    continue
                for size in sizes:
                    for dtype in dtypes:
                        point, path = tune_problem(op, *extents(op, m, size, world), getattr(torch, dtype))
                        if rank == 0:
                            best = [f"{us:.1f} us, {way}" for way, us in point.times[:1]] or ["not measured"]
                            typer.echo(f"{op} tokens={m} size={size} {dtype}: {best[0]}")
        if rank == 0:
            typer.echo(f"written to {path}")
