"""`autofuse bench`: the rows of the CPU benchmark, as a table and as JSON. The subcommands measure GPUs."""

import json as json_module
import math
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from autofuse import torchrun
from autofuse.cli.gpu_ranks import OPS, layer
from autofuse.cli.terminal import check_folders, one_of, progress_bar, user_errors, write

app = typer.Typer(invoke_without_command=True)

Rows = Annotated[
    list[str] | None, typer.Option(help="Only cells whose name contains this; repeat for several.")
]
Quick = Annotated[bool, typer.Option(help="Fewer cells and samples; of ours only auto.")]
Tune = Annotated[bool, typer.Option(help="Let auto decide by what is measured here, and keep it for later.")]
Json = Annotated[Path | None, typer.Option(help="Write all that was measured to this file.")]
Markdown = Annotated[Path | None, typer.Option(help="Write the tables to this file.")]


@app.callback()
def bench(
    context: typer.Context,
    ranks: Annotated[list[int], typer.Option(help="Size of a group; repeat for several.")] = [2, 4],  # noqa: B006
    rows: Annotated[
        list[str] | None, typer.Option(help="Only rows whose name contains this; repeat for several.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu.")] = "cpu",
    policy: Annotated[str, typer.Option(help="auto or always.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    repeats: Annotated[int, typer.Option(help="Least repetitions of a row.")] = 15,
    seconds: Annotated[float, typer.Option(help="Least time for a row.")] = 1.0,
    json: Json = None,
    table: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
) -> None:
    """The same functions under torch.compile with stock Inductor and with autofuse, in one run."""
    if context.invoked_subcommand is not None:
        return
    with user_errors():
        one_of(device, ("cpu",), "--device")
        one_of(policy, ("auto", "always"), "--policy")
        one_of(dtype, ("float32", "bfloat16", "float16"), "--dtype")
        if min(ranks) < 2:
            raise ValueError(f"--ranks {min(ranks)}: expected 2 ranks or more")
        check_folders(json, table)
        # Importing torch takes seconds: first check the command line.
        import torch

        from autofuse.bench.cpu.measure import Options
        from autofuse.bench.cpu.run import cores, run
        from autofuse.bench.cpu.table import table as table_of

        load = os.getloadavg()[0]
        options = Options(tuple(rows or ()), policy, dtype, repeats, seconds)
        with progress_bar() as progress:
            measured = run(ranks, options, progress)
        # A reader of the numbers must see whether something else was running.
        about = f"{cores()} cores, torch {torch.__version__}, load average before the run {load:.1f}"
        text = f"{table_of(measured)}\n{about}"
        typer.echo(text)
        if table is not None:
            write(table, text + "\n")
        if json is not None:
            machine = {
                "torch": torch.__version__,
                "machine": platform.machine(),
                "cores": cores(),
                "load": load,
            }
            settings = {"dtype": dtype, "policy": policy, "device": device}
            all_rows = [{**asdict(row), "speedup": row.speedup} for row in measured]
            write(json, json_module.dumps({**machine, **settings, "rows": all_rows}, indent=1) + "\n")


@app.command()
def dense(
    shapes: Annotated[
        list[str] | None, typer.Option(help="Only this shape, such as llama70b.o_proj; repeat for several.")
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K,N",
            help="A layer of this size, K over all ranks; repeat for several.",
        ),
    ] = None,
    ops: Annotated[list[str] | None, typer.Option("--op", help="Only this op; repeat for several.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Only so many tokens; repeat for several.", min=1)
    ] = None,
    quick: Quick = False,
    orders: Annotated[bool, typer.Option(help="Measure direct against oblivious order instead.")] = False,
    ctas: Annotated[bool, typer.Option(help="Measure time against the number of programs instead.")] = False,
    tune: Tune = False,
    holdout: Annotated[
        bool, typer.Option(help="Judge choice at sizes that were not measured instead; needs no GPU.")
    ] = False,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """The dense ops on the GPUs of torchrun: ours, and all that torch ships, in one process."""
    with user_errors():
        check_folders(json, markdown)
        if holdout:
            from autofuse.bench.gpu.holdout import report

            text = report()
            typer.echo(text)
            if markdown is not None:
                write(markdown, text + "\n")
            return
        sizes = [f"{k},{n}" for k, n in map(layer, size or ())]
        for op in ops or ():
            one_of(op, OPS, "--op")
        from autofuse.bench.gpu.dense.cells import (
            QUICK_SHAPES,
            QUICK_TOKENS,
            SHAPES,
            SWEEP_SHAPES,
            SWEEP_TOKENS,
            TOKENS,
        )

        if tune and (orders or ctas):
            raise ValueError("--tune: with --orders or --ctas nothing is chosen; leave one of them out")
        _check_tune(tune, quick)
        for shape in shapes or ():
            one_of(shape, tuple(SHAPES), "--shapes")
        from autofuse.bench.gpu.dense.run import Options, join, run

        sweep = orders or ctas
        counts = SWEEP_TOKENS if sweep else QUICK_TOKENS if quick else TOKENS
        names = SWEEP_SHAPES if sweep else QUICK_SHAPES if quick else SHAPES
        chosen = (*(shapes or ()), *sizes) or names
        options = Options(tuple(chosen), tuple(tokens or counts), quick, orders, ctas, tuple(ops or ()), tune)
        join(options)
    run(options, json, markdown)


@app.command()
def embedding(
    rows: Rows = None, quick: Quick = False, tune: Tune = False, json: Json = None, markdown: Markdown = None
) -> None:
    """Pooled embeddings, their gradients and the all-to-all on the GPUs of torchrun: ours, and torch's."""
    _exchange("embedding", rows, quick, tune, json, markdown)


@app.command()
def experts(
    rows: Rows = None, quick: Quick = False, tune: Tune = False, json: Json = None, markdown: Markdown = None
) -> None:
    """Expert matmuls and their all-to-all on the GPUs of torchrun: ours, and all that torch ships."""
    _exchange("experts", rows, quick, tune, json, markdown)


@app.command()
def sums(
    rows: Rows = None, quick: Quick = False, tune: Tune = False, json: Json = None, markdown: Markdown = None
) -> None:
    """Reductions of rows that ranks add up, and of matmuls with one more stage, on the GPUs of torchrun."""
    _exchange("sums", rows, quick, tune, json, markdown)


@app.command()
def host(rows: Rows = None, json: Json = None, markdown: Markdown = None) -> None:
    """What a call costs the hosts of the GPUs of torchrun: ours and what it replaces, compiled and eager."""
    with user_errors():
        check_folders(json, markdown)
        from autofuse.bench.gpu.host.run import join, run

        join(tuple(rows or ()))
    run(tuple(rows or ()), json, markdown)


@app.command()
def models(
    rows: Rows = None,
    quick: Annotated[bool, typer.Option(help="Tiny models, few samples.")] = False,
    device: Annotated[str, typer.Option(help="cuda or, only with --quick, cpu.")] = "cuda",
    layers: Annotated[int, typer.Option(help="Layers of models that serve.", min=1)] = 20,
    train_layers: Annotated[int, typer.Option(help="Layers of models that train.", min=1)] = 4,
    seconds: Annotated[float, typer.Option(help="Begin nothing new after so long.")] = float("inf"),
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Layers of models on the ranks of torchrun, end to end: ours, and all that torch ships. Rows that are in
    the JSON file already are not measured again."""
    with user_errors():
        one_of(device, ("cuda", "cpu"), "--device")
        if device == "cpu" and not quick:
            raise ValueError("--device cpu: the models are too large; add --quick")
        check_folders(json, markdown)
        from autofuse.bench.models.run import Options, join, run

        options = Options(tuple(rows or ()), quick, device, (layers, train_layers), seconds)
        join(options)
    run(options, json, markdown)


@app.command()
def optimizer(
    ranks: Annotated[list[int], typer.Option(help="Size of a group; repeat for several.")] = [2],  # noqa: B006
    rows: Rows = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only float32 or bfloat16; without it both.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu; or cuda, the GPUs of torchrun.")] = "cpu",
    lamb: Annotated[bool, typer.Option(help="Measure LAMB, too.")] = True,
    captured: Annotated[bool, typer.Option(help="On GPUs, replay steps from CUDA graphs.")] = False,
    clipped: Annotated[bool, typer.Option(help="Clip gradients by their global norm.")] = False,
    training: Annotated[bool, typer.Option(help="Measure whole training steps instead.")] = False,
    written: Annotated[bool, typer.Option(help="Measure compiled steps in tensor ops instead.")] = False,
    seconds: Annotated[float, typer.Option(help="Time for a row, about.")] = 3.0,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """An optimizer's step with its exchange of gradients: ours, and all that torch ships."""
    with user_errors():
        one_of(device, ("cpu", "cuda"), "--device")
        dtypes = tuple(dtype or ("float32", "bfloat16"))
        for name in dtypes:
            one_of(name, ("float32", "bfloat16"), "--dtype")
        if min(ranks) < 2:
            raise ValueError(f"--ranks {min(ranks)}: expected 2 ranks or more")
        check_folders(json, markdown)
        from autofuse.bench.optimizer.rows import Options, table
        from autofuse.bench.optimizer.run import run, run_on_gpus

        load = os.getloadavg()[0]
        if captured and device == "cpu":
            raise ValueError("--captured: expected --device cuda")
        if training and (captured or clipped):
            raise ValueError("--training: training steps are neither captured nor clipped")
        if written and (training or clipped):
            raise ValueError("--written: steps in tensor ops are neither clipped nor training steps")
        options = Options(
            tuple(rows or ()), dtypes, lamb, seconds, captured=captured, clipped=clipped, training=training,
            written=written,
        )  # fmt: skip
        if device == "cuda":
            torchrun.join("bench optimizer --device cuda")
            _tell(table(run_on_gpus(options, json)), [], load, None, markdown)
            return
        measured = run(ranks, options)
        all_rows = [{**asdict(row), "best_other": row.best} for row in measured]
        _tell(table(measured), all_rows, load, json, markdown)


@app.command()
def tails(
    seconds: Annotated[float, typer.Option(help="Begin no cell after so long.")] = float("inf"),
    tune: Tune = False,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """A matmul, its all_reduce, a residual and a norm on the GPUs of torchrun, in every way."""
    with user_errors():
        check_folders(json, markdown)
        from autofuse.bench.gpu.driver import join
        from autofuse.bench.gpu.tails import check, run

        join("tails", check)
    run(seconds, tune, json, markdown)


@app.command()
def schedules(
    ranks: Annotated[list[int], typer.Option(help="Size of a group; repeat for several.")] = [2],  # noqa: B006
    rows: Rows = None,
    hidden: Annotated[list[int] | None, typer.Option(help="Hidden size; repeat for several.", min=8)] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(help="K over all ranks, in hidden sizes; repeat for several.", min=0.1),
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Only so many tokens; repeat for several.", min=1)
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only float32 or bfloat16; without it both, on GPUs bfloat16.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu; or cuda, the GPUs of torchrun.")] = "cpu",
    quick: Annotated[bool, typer.Option(help="Few, small cells and few samples.")] = False,
    seconds: Annotated[
        float | None, typer.Option(help="Time for a row, about; on GPUs: begin no row after so long.")
    ] = None,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Every schedule of matmul, all_reduce, residual and norm, and of two of them with an MLP between. On
    GPUs, rows that are in the JSON file already are not measured again."""
    with user_errors():
        one_of(device, ("cpu", "cuda"), "--device")
        on_gpus = device == "cuda"
        dtypes = tuple(dtype or (("bfloat16",) if on_gpus else ("float32", "bfloat16")))
        for name in dtypes:
            one_of(name, ("float32", "bfloat16"), "--dtype")
        if min(ranks) < 2:
            raise ValueError(f"--ranks {min(ranks)}: expected 2 ranks or more")
        check_folders(json, markdown)
        from autofuse.bench import schedules as bench

        sizes = (64,) if quick else (4096,) if on_gpus else (2048,)
        counts = (2, 8) if quick else bench.TOKENS_ON_GPUS if on_gpus else bench.TOKENS_ON_CPUS
        options = bench.Options(
            tuple(hidden or sizes),
            tuple(ratio or ((1.0, 3.5) if on_gpus else (1.0,))),
            tuple(tokens or counts),
            dtypes,
            tuple(rows or ()),
            0.0 if quick else 3.0 if seconds is None else seconds,
            quick,
            device=device,
        )
        load = os.getloadavg()[0]
        if not on_gpus:
            measured = bench.run(ranks, options)
            _tell(bench.table(measured), [row.to_json() for row in measured], load, json, markdown)
            return
        until = time.monotonic() + (math.inf if seconds is None else seconds)
        bench.join(options)
    bench.run_on_gpus(options, until, json, markdown)


def _exchange(
    benchmark: str,
    rows: list[str] | None,
    quick: bool,
    tune: bool,
    json: Path | None,
    markdown: Path | None,
) -> NoReturn:
    with user_errors():
        _check_tune(tune, quick)
        check_folders(json, markdown)
        from autofuse.bench.gpu.exchange.run import Options, join, run

        options = Options(benchmark, tuple(rows or ()), quick, tune)
        join(options)
    run(options, json, markdown)


def _tell(
    text: str, rows: list[dict[str, object]], load: float, json: Path | None, markdown: Path | None
) -> None:
    """Print a table, and write it and its rows; of the ranks of torchrun the first one does. `load`: the load
    average before the run, since a reader of the numbers must see whether something else was running."""
    import torch

    from autofuse.bench.cpu.run import cores

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        if int(os.environ["RANK"]):
            return
    text += f"\n\n{cores()} cores, torch {torch.__version__}, load average before the run {load:.1f}"
    typer.echo(text)
    if markdown is not None:
        write(markdown, text + "\n")
    if json is not None:
        machine = {"torch": torch.__version__, "cores": cores(), "load": load}
        write(json, json_module.dumps({**machine, "rows": rows}, indent=1) + "\n")


def _check_tune(tune: bool, quick: bool) -> None:
    if tune and quick:
        raise ValueError("--tune --quick: tuning takes times of all ways, which --quick leaves out; drop one")
