"""`torchrun --nproc-per-node 4 -m autofuse trace matmul_all_reduce`: what a fused kernel does, when."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from autofuse.cli.terminal import check_folders, one_of, user_errors, write
from autofuse.lowering.plan import Order
from autofuse.timeline import Timeline, chrome_trace, draw_svg, read, summary

OPS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")


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
        if op == "all_gather_matmul" and order != "direct":
            raise ValueError(f"--order {order}: the kernels of {op} know direct only")
        check_folders(out)
        with _group() as (rank, world):
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


def extents(op: str, tokens: int, size: str, world: int) -> tuple[int, int, int]:
    """(M, K, N) of the matmul on each rank, from the extents of the whole layer.

    A reduction multiplies `[M, K / W] @ [K / W, N]`; a gather, which stands before the other layer of
    the pair, `[M, N] @ [N, K / W]`. Raises ValueError for what cannot be cut into `world` equal parts.
    """
    parts = size.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"--size: expected K,N such as 8192,8192, got {size!r}")
    k, n = map(int, parts)
    if k < 1 or n < 1 or k % world:
        raise ValueError(f"--size {size}: expected positive extents, the first a multiple of {world} ranks")
    if tokens < 1 or (op != "matmul_all_reduce" and tokens % world):
        raise ValueError(f"--tokens {tokens}: expected a positive multiple of {world} ranks")
    return (tokens, n, k // world) if op == "all_gather_matmul" else (tokens, k // world, n)


def _record(op: str, m: int, k: int, n: int, dtype: str, order: str, rank: int, world: int) -> list[Timeline]:
    """One call, on all ranks; rank 0 gets the timelines of all, the others those of nobody."""
    import torch
    import torch.distributed as dist

    from autofuse.lowering.gpu.trace import record

    own = record(op, m, k, n, getattr(torch, dtype), order).tolist()
    traces: list[list[list[list[int]]]] | None = [[]] * world if rank == 0 else None
    dist.gather_object(own, traces)
    return [read(r, each) for r, each in enumerate(traces or [])]


@contextmanager
def _group() -> Iterator[tuple[int, int]]:
    """Rank and size of the group of all ranks that torchrun has started, a GPU each. ValueError if none."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        raise ValueError(
            "trace records kernels on GPUs, and torch finds none: expected a machine with one a rank"
        )
    if "RANK" not in os.environ:
        raise ValueError(
            "trace runs on every rank: start it as torchrun --nproc-per-node 4 -m autofuse trace ..."
        )
    local = int(os.environ["LOCAL_RANK"])
    if local >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local} has no GPU: torch finds {torch.cuda.device_count()}, a rank needs one"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
