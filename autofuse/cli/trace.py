"""`torchrun --nproc-per-node 4 -m autofuse trace matmul_all_reduce`: what a fused kernel does, and when."""

from pathlib import Path
from typing import Annotated

import typer

from autofuse.cli.gpu_ranks import OPS, extents, gpu_ranks
from autofuse.cli.terminal import check_folders, one_of, user_errors, write
from autofuse.lowering.plan import Order
from autofuse.timeline import Timeline, chrome_trace, draw_svg, read, summary


def trace(
    op: Annotated[str, typer.Argument(help=f"{', '.join(OPS[:-1])} or {OPS[-1]}.")],
    tokens: Annotated[int, typer.Option(help="Rows of the product, all ranks' of a gather too.")] = 2048,
    size: Annotated[str, typer.Option(help="K,N of the layer; ranks share K, a gather's the other way.")] = (
        "8192,8192"
    ),
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    order: Annotated[str, typer.Option(help="direct, ring or oblivious.")] = "direct",
    out: Annotated[Path, typer.Option(help="Prefix of the files: PREFIX.json and PREFIX.svg.")] = Path(
        "trace"
    ),
) -> None:
    """Records a call of a fused op on every GPU under torchrun: timeline for Perfetto, picture, table."""
    picture, events = (out.with_name(f"{out.name}.{kind}") for kind in ("svg", "json"))
    with user_errors():
        one_of(op, OPS, "op")
        one_of(dtype, ("bfloat16", "float16"), "--dtype")
        one_of(order, [each.value for each in Order], "--order")
        if "all_gather" in op and order != "direct":
            raise ValueError(f"--order {order}: the kernels of {op} know direct only")
        check_folders(out)
        with gpu_ranks("trace") as (rank, world):
            m, k, n = extents(op, tokens, size, world)
            timelines = _record(op, m, k, n, dtype, order, rank, world)
        if rank != 0:
            return
        title = f"{op}: [{m}, {k}] @ [{k}, {n}] on each of {world} ranks, {dtype}, {order}"
        write(events, chrome_trace(timelines))
        write(picture, draw_svg(timelines, title))
    typer.echo(
        f"{title}\n\n{summary(timelines)}\n\nwritten to {events} (ui.perfetto.dev opens it) and {picture}"
    )


def _record(op: str, m: int, k: int, n: int, dtype: str, order: str, rank: int, world: int) -> list[Timeline]:
    """One call, on all ranks. Rank 0 gets the timelines of all ranks, the others get none."""
    import torch
    import torch.distributed as dist

    from autofuse.lowering.gpu.dense.trace import record

    own = record(op, m, k, n, getattr(torch, dtype), order).tolist()
    traces: list[list[list[list[int]]]] | None = [[]] * world if rank == 0 else None
    dist.gather_object(own, traces)
    return [read(r, each) for r, each in enumerate(traces or [])]
