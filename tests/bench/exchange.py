"""Cells around an all-to-all on CPU ranks: every variant runs once, and its error is what counts."""

from collections.abc import Callable, Collection, Mapping
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import autofuse.lowering.ops  # noqa: F401
from autofuse.bench.gpu import driver as gpu_run
from autofuse.bench.gpu.exchange import run as exchange_run
from autofuse.bench.gpu.exchange.rows import Cell, Rates
from autofuse.bench.gpu.exchange.run import Options
from autofuse.bench.gpu.exchange.work import Variant, Work
from autofuse.lowering.gpu.choice.timing import Timing
from autofuse.lowering.ops.library import FUSED_OPS

MACHINE = {"gpu": "GPU", "world": 2, "torch": "2.11", "cuda": "13.0", "triton": "3.6", "nccl": "2.28"}
RATES = Rates(link=356.0, memory=4150.0)


def measured(cell: Cell, make: Callable[[Any, torch.device, str], Work]) -> dict[str, Any]:
    """The row of a cell, as JSON. Beside ours also runs what ours is where there is no kernel."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(1 + dist.get_rank())
    work = make(cell, torch.device("cpu"), group.group_name)
    with (
        torch.no_grad(),
        patch.object(gpu_run, "time_all", _once),
        patch.object(gpu_run, "together", lambda what: what()),
    ):
        return exchange_run.measure(cell, work, RATES, Options("any", ())).to_json()


def reference(op: str, arguments: tuple[Any, ...], like: Variant) -> float:
    """The error of the op's reference, of which the first result is like that of a variant."""
    result = FUSED_OPS[op].reference(FUSED_OPS[op].parse(arguments))
    return like.error(result[0] if isinstance(result, list) else result)


def _once(
    variants: Mapping[tuple[str, str], Callable[[int], Any]],
    calls: int,
    effort: object,
    check: Callable[[tuple[str, str], Any], float],
    eager: Collection[tuple[str, str]],
) -> dict[tuple[str, str], Timing]:
    """Instead of `time_all`: one call counts, another one follows, which may use other operands."""
    timings = {}
    for key, call in variants.items():
        timings[key] = Timing(100.0, key in eager, error=check(key, call(0)))
        call(1)
    return timings


def data_of(benchmark: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the JSON file of a benchmark has."""
    return {
        "machine": MACHINE,
        "settings": {"benchmark": benchmark, "dtype": "bfloat16"},
        "link_gb_per_s": RATES.link,
        "link_failed": "",
        "memory_gb_per_s": RATES.memory,
        "notes": ["A note."],
        "rows": rows,
    }
