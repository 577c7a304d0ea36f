"""`autofuse bench models`, as every rank of torchrun runs it."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import autofuse
from autofuse.bench.gpu import driver
from autofuse.bench.gpu.driver import TIMEOUT_S, leave, written
from autofuse.bench.gpu.host.run import host_us
from autofuse.bench.models import dense, dlrm, moe
from autofuse.bench.models.rows import CEILING, DECLARED, OURS, Measured, Row, sites_of
from autofuse.bench.models.table import report
from autofuse.bench.models.variants import VARIANTS
from autofuse.bench.models.work import Cell, Work
from autofuse.lowering.gpu.choice.timer import slowest, time_all, together
from autofuse.lowering.gpu.choice.timing import Effort, Timing
from autofuse.lowering.torch_internals import compiling_variants
from autofuse.passes.report import Report

T = TypeVar("T")

WRONG = 0.05
WORSE = 4.0
"""A result is wrong if its error exceeds the first number, and the second times the error of eager."""
OUT_OF_TIME = "not begun: out of time"


@dataclass(frozen=True)
class Options:
    """layers: of serving and of training; seconds: nothing new is begun after them."""

    rows: tuple[str, ...] = ()
    quick: bool = False
    device: str = "cuda"
    layers: tuple[int, int] = (20, 4)
    seconds: float = float("inf")


def join(options: Options) -> None:
    """Joins the group of torchrun. ValueError if there is none, no GPU, or no such row."""
    driver.join("models", lambda world: chosen(options, world), options.device)


def chosen(options: Options, world: int) -> list[Cell]:
    """In the order of `rows`. ValueError if there is no such cell, or if the ranks cannot share out heads."""
    if options.quick:
        found = dense.cells(["tiny"], (min(2, options.layers[0]), 2), [64], [4], [64])
    else:
        if world not in (2, 4, 8):
            raise ValueError(f"{world} ranks cannot share out the heads of the models; start 2, 4 or 8 ranks")
        names = ["llama70b", "llama8b", "qwen32b"]
        found = dense.cells(names, options.layers, [2048, 512, 8192], [64, 1, 16, 256], [8192, 2048])
    found += [*moe.cells(options.quick, world), *dlrm.cells(options.quick)]
    if options.device == "cpu":  # where torch has no symmetric memory
        found = [replace(cell, others=()) for cell in found]
    if not options.rows:
        return found
    # The end of a number is the end of a name: `decode 1` is not the beginning of `decode 16`.
    named: list[Cell] = []
    for row in options.rows:
        pattern = re.compile(rf"{re.escape(row)}(?!\d)")
        these = [cell for cell in found if pattern.search(cell.name)]
        if not these:
            raise ValueError(
                f"--rows: no cell is named like {row}; there are {', '.join(c.name for c in found)}"
            )
        named += these
    return list(dict.fromkeys(named))


def run(options: Options, json_file: Path | None, markdown: Path | None) -> NoReturn:
    """Measures; rank 0 prints and writes the table, and the JSON file after every row. Ends the process."""
    until = time.monotonic() + options.seconds
    device = (
        torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    )
    data = begun(options, json_file)
    rows = {row["name"]: row for row in data["rows"]}
    effort = Effort(rounds=3, sample_us=3500.0) if options.quick else Effort()
    with autofuse.config.patch(timeout_s=TIMEOUT_S), compiling_variants():
        for cell in chosen(options, dist.get_world_size()):
            if cell.name in rows and rows[cell.name]["complete"]:
                continue
            if over(until):
                break
            rows[cell.name] = measure(cell, device, effort, until).to_json()
            data["rows"] = list(rows.values())
            cleared()
            written(cell.name, data, json_file)
    leave(lambda: report(data), markdown)


def begun(options: Options, json_file: Path | None) -> dict[str, Any]:
    """What a run before this one has left in the file. ValueError if that was elsewhere."""
    if options.device == "cuda":
        machine = driver.machine()
    else:
        machine = {"gpu": "CPU", "world": dist.get_world_size(), "torch": torch.__version__}
    data: dict[str, Any] = {"machine": machine, "rows": []}
    if json_file is not None and json_file.exists():
        data = json.loads(json_file.read_text())
        if data["machine"] != machine:
            raise ValueError(f"--json {json_file}: was measured on {data['machine']}; this is {machine}")
    dist.barrier()  # all have read it before it is written
    return data


def over(until: float) -> bool:
    """Whether a rank has no time left."""
    return slowest(float(time.monotonic() >= until)) > 0


def cleared() -> None:
    """Frees what a cell has left."""
    torch._dynamo.reset()
    gc.collect()


def measure(cell: Cell, device: torch.device, effort: Effort, until: float) -> Row:
    """The row of a cell; all ranks measure together."""
    try:
        work = together(lambda: cell.make(device))
    except RuntimeError as error:
        return Row(cell.name, {name: Measured(failed=str(error)) for name in cell.variants})
    exact_failed, exact = "", None
    try:
        exact = together(work.exact)
    except RuntimeError as error:
        exact_failed = str(error)
    torch.cuda.empty_cache()  # others than torch's allocator need memory, too
    captures = cell.captured and device.type == "cuda"
    found: dict[str, Measured] = {}
    steps: dict[str, Callable[[int], Any]] = {}
    sites = {OURS: Report(), DECLARED: Report()}
    for name in cell.variants:
        if over(until):
            found[name] = Measured(failed=OUT_OF_TIME)
            continue
        limit = max(WRONG, WORSE * (found.get("eager", Measured()).error or 0.0))
        if name == DECLARED and work.declare is not None:
            work.declare()
        with autofuse.debug() if name in sites else nullcontext(Report()) as seen:
            found[name], step = ready(name, work, exact, limit)
        if name in sites:
            sites[name] = seen
        if step is not None:
            steps[name] = step
    del exact
    found = {name: replace(measured, host_us=_host(steps.get(name))) for name, measured in found.items()}
    times = time_all(steps, 1, effort, eager=set(steps))
    graphs = time_all(steps, 1, effort) if captures else {}
    for name in steps:
        found[name] = _timed(found[name], times[name], graphs.get(name), _kernels(steps[name], device))
    complete = all(measured.failed != OUT_OF_TIME for measured in found.values())
    became = {name: sites_of(report) for name, report in sites.items()}
    return Row(cell.name, found, became[OURS], complete, exact_failed, became[DECLARED])


def ready(
    name: str, work: Work, exact: Sequence[Tensor] | None, limit: float
) -> tuple[Measured, Callable[[int], Any] | None]:
    """A variant after its first steps, and its step."""
    start = time.monotonic()

    def first() -> tuple[Callable[[int], Any], float | None]:
        forward = VARIANTS[name].compiled(work.forward)
        results = work.step(forward)
        error = None if name == CEILING or exact is None else error_of(results, exact)
        work.step(forward)
        return lambda _: work.step(forward), error

    try:
        step, mine = together(first)
        error = None if mine is None else slowest(mine if mine == mine else float("inf"))
        if error is not None and not error <= limit:
            raise RuntimeError(f"the result is wrong: its error is {error:.1e}")
    except RuntimeError as failure:
        return Measured(failed=str(failure), ready_s=time.monotonic() - start), None
    return Measured(error=error, ready_s=time.monotonic() - start), step


def error_of(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest of the relative errors (Frobenius)."""
    errors = [
        float((result.to(right.dtype) - right).norm() / right.norm().clamp(min=1e-30))
        for result, right in zip(results, exact, strict=True)
    ]
    return max(error if error == error else float("inf") for error in errors)


def _host(step: Callable[[int], Any] | None) -> float | None:
    return None if step is None else _or_none(lambda: slowest(together(lambda: host_us(lambda: step(0)))))


def _kernels(step: Callable[[int], Any], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return _or_none(lambda: slowest(together(lambda: kernel_us(lambda: step(0)))))


def kernel_us(call: Callable[[], object]) -> float:
    """The sum of the durations of the kernels and copies of a call."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    kernels = [
        event
        for event in profiled.events() or ()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    return float(sum(event.time_range.elapsed_us() for event in kernels))


def _or_none(what: Callable[[], T]) -> T | None:
    try:
        return what()
    except RuntimeError:
        return None


def _timed(measured: Measured, times: Timing, graph: Timing | None, kernels: float | None) -> Measured:
    us, failed = times.us, times.failed
    if graph is None:
        return replace(measured, us=us, failed=failed, kernel_us=kernels)
    why = graph.failed or ("could not be captured" if graph.eager else "")
    return replace(
        measured,
        us=us,
        failed=failed,
        kernel_us=kernels,
        graph_us=None if why else graph.us,
        graph_failed=why,
    )
