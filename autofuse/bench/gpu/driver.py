"""What the ranks of all GPU benchmarks do: join, measure the machine, time variants, write files, end."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from autofuse import torchrun
from autofuse.bench.gpu.rates import link_rates
from autofuse.lowering.gpu.choice.timer import Call, Check, time_all, together
from autofuse.lowering.gpu.choice.timing import QUICK, Effort, Timing
from autofuse.lowering.torch_internals import symmetric_empty, symmetric_views

T = TypeVar("T")

Key: TypeAlias = tuple[str, str]
"""Kind and name of a variant. Kinds are compute, parts, peers, ours and ways."""

TIMEOUT_S = 60.0
LINK_BYTES = 256 << 20
"""Bytes of the memory in which the links are measured. Every rank has an equal part of it. A link takes some
100 us or more for a part, so that the start does not count."""
LINK_GB_PER_S = {4: 356.0, 8: 346.0}
"""Rates of the links of H200 by the number of ranks, used only if they cannot be measured."""


def join(command: str, check: Callable[[int], object], device_type: str = "cuda") -> None:
    """Joins the group of torchrun. ValueError if there is none, no GPU, or `check(world)` says so."""

    def check_world(world: int) -> None:
        if world < 2:
            raise ValueError("one rank has no peers; start 2 ranks or more")
        check(world)

    torchrun.join(f"bench {command}", check_world, 2 * TIMEOUT_S, device_type)
    # Collectives are being renamed, and the oldest torch that is supported has only the old names.
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.manual_seed(1 + dist.get_rank())


def machine() -> dict[str, Any]:
    """The entry of the machine in the JSON file."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "world": dist.get_world_size(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def link(count: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Symmetric memory for `count` numbers in bfloat16 or more, and the rate of the links.

    The rate is the best that was seen, so that no transfer is faster; or an assumed one with the reason.
    """
    group = dist.group.WORLD
    assert group is not None
    count = max(count, LINK_BYTES // 2)
    buffer = symmetric_empty(count, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    views = [view[: LINK_BYTES // 2] for view in symmetric_views(buffer, group)]
    try:
        mine = torch.zeros_like(views[dist.get_rank()])
        rates = together(lambda: link_rates(mine, views))
        return buffer, {"link_gb_per_s": max(rates.values()), "link_rates": rates, "link_failed": ""}
    except RuntimeError as error:
        rate = LINK_GB_PER_S[4 if dist.get_world_size() <= 4 else 8]
        return buffer, {"link_gb_per_s": rate, "link_rates": {}, "link_failed": str(error)}


class Asking:
    """Evaluates, on all ranks together, what may fail about a cell. `failed`: what has failed."""

    def __init__(self) -> None:
        self.failed: dict[Key, Timing] = {}

    def __call__(self, kind: str, name: str, what: Callable[[], T], otherwise: T) -> T:
        """The result of `what`; if it fails, `otherwise`, and an entry in `failed`."""
        try:
            return together(what)
        except RuntimeError as error:
            self.failed[kind, name] = Timing(failed=str(error))
            return otherwise


def time_cell(
    variants: Mapping[Key, Call],
    calls: int,
    effort: Effort,
    check: Check[Key],
    *,
    keep: Callable[[dict[Key, Timing]], None] | None = None,
    eager: Collection[Key] = (),
) -> dict[Key, Timing]:
    """The times of all variants of a cell; `eager`: as `time_all` has it.

    keep: lets the times of `ways` decide which way `auto` takes. The ways are then timed first, the fastest
    twice; only afterwards `auto` is timed side by side with its peers.
    """
    timings: dict[Key, Timing] = {}
    if keep is not None:
        candidates = {key: call for key, call in variants.items() if key[0] == "ways"}
        timings = time_all(candidates, calls, QUICK, check, finals=effort)
        keep(timings)
        variants = {key: call for key, call in variants.items() if key[0] != "ways"}
    return timings | time_all(variants, calls, effort, check, eager=eager)


def by_kind(timings: dict[Key, Timing], kind: str) -> dict[str, Timing]:
    """Timings of one kind by name."""
    return {name: timing for (group, name), timing in timings.items() if group == kind}


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """|result - exact| / |exact| (Frobenius). RuntimeError if the shapes differ."""
    if result.shape != exact.shape:
        raise RuntimeError(f"expected a result of shape {tuple(exact.shape)}, got {tuple(result.shape)}")
    return float((result.double() - exact).norm() / exact.norm())


def written(name: str, data: dict[str, Any], file: Path | None) -> None:
    """Rank 0 reports that a cell has been measured, and writes all `data` so far."""
    if dist.get_rank() == 0:
        print(f"measured {name}", file=sys.stderr, flush=True)
        if file is not None:
            file.write_text(json.dumps(data, indent=1) + "\n")
    torch.cuda.empty_cache()


def leave(report: Callable[[], str], file: Path | None) -> NoReturn:
    """Rank 0 prints the report and writes it to a file; then all ranks end.

    Freeing communicators and symmetric memory that graphs have captured may take forever.
    """
    if dist.get_rank() == 0:
        text = report()
        print(text, flush=True)
        if file is not None:
            file.write_text(text + "\n")
    dist.barrier()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    sys.stderr.flush()
    os._exit(0)
