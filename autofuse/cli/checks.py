"""The checks of the doctor: what was found, whether it is good enough, and what to do about it."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as funcol

import autofuse
from autofuse import config
from autofuse.backend import autofuse as backend
from autofuse.cli.fake_ranks import fake_ranks
from autofuse.holdings import group_summaries
from autofuse.lowering import torch_internals
from autofuse.lowering.cpu.workspace import SMALLEST_BUFFER
from autofuse.lowering.gpu.support import has_triton, why_not
from autofuse.native_kernels import cpu
from autofuse.native_kernels.gpu import prepared

SUPPORTED = ((2, 11), (2, 15))
SHARED_MEMORY = Path("/dev/shm")
LITTLE_BYTES, FEW_BYTES = 16 << 20, 1 << 30
"""Bytes of shared memory: with less than the first autofuse cannot work, with less than the second it is soon
full."""


@dataclass(frozen=True)
class Check:
    """One check. `state`: `ok`; `limited`: something is not used; `broken`: nothing is."""

    name: str
    state: str
    found: str
    advice: str = ""
    """What to do about it; empty if there is nothing to do."""


def all_checks() -> list[Check]:
    """Every check, in an order in which later ones build on earlier ones. No check raises: a failure is a
    finding."""
    checks: list[Check] = []
    parts: tuple[Callable[[], Iterator[Check]], ...] = (
        _versions,
        _processors,
        _gpus,
        _native_kernels,
        _compiler,
        _shared_memory,
        _group_memory,
        _launcher,
        _backend,
        _inductor,
        _fusion,
    )
    for part in parts:
        try:
            checks += part()
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            checks.append(Check(part.__name__.strip("_").replace("_", " "), "broken", lines[-1]))
    return checks


def _versions() -> Iterator[Check]:
    low, high = (".".join(map(str, version)) for version in SUPPORTED)
    found = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if found < SUPPORTED[0]:
        yield Check("torch", "broken", torch.__version__, f"install torch {low} to {high}")
    elif found > SUPPORTED[1]:
        yield Check(
            "torch", "limited", torch.__version__, f"not tried yet; torch {low} to {high} are supported"
        )
    else:
        yield Check("torch", "ok", f"{torch.__version__} (supported: {low} to {high})")
    yield Check("python", "ok", platform.python_version())


def _processors() -> Iterator[Check]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = (
        f"{usable} of {os.cpu_count()} cores, {platform.machine()}, {torch.get_num_threads()} torch threads"
    )
    yield Check("processors", "ok", found)


def _gpus() -> Iterator[Check]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Check("gpus", "ok", "none that torch can use")
        return
    names = ", ".join(dict.fromkeys(torch.cuda.get_device_name(i) for i in range(count)))
    unfit: dict[str, list[str]] = {}
    for i in range(count):
        why = why_not(torch.device("cuda", i))
        if why is not None:
            unfit.setdefault(why, []).append(str(i))
    advice = "; ".join(f"collectives on GPU {', '.join(gpus)} are kept: {why}" for why, gpus in unfit.items())
    yield Check("gpus", "limited" if unfit else "ok", f"{count} x {names}", advice)
    if prepared.library() is None:
        yield Check(
            "launches",
            "limited",
            "by Python, which takes longer",
            "install a C++ compiler, reinstall autofuse",
        )
    else:
        yield Check("launches", "ok", "by the native library")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    if pairs:
        apart = [f"{i}-{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
        access = f"no peer access: {', '.join(apart)}" if apart else "all reach each other"
        yield Check("links", "limited" if apart else "ok", f"{access}; {_link_kinds(count)}")
    backend = torch_internals.symmetric_memory("cuda")
    yield Check("symmetric memory", "ok", backend or "none in this torch")


def _link_kinds(count: int) -> str:
    """The names of the links between the GPUs by `nvidia-smi topo -m`."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "nvidia-smi is not there to tell the kind of link"
    done = subprocess.run([smi, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
    rows = [line.split()[1 : 1 + count] for line in done.stdout.splitlines() if re.match(r"GPU\d+\s", line)]
    kinds = sorted({kind for row in rows for kind in row if kind != "X"})
    if not kinds:
        return "nvidia-smi tells no kind of link"
    nvlink = "NVLink" if all(kind.startswith("NV") for kind in kinds) else "not all NVLink"
    return f"{nvlink} ({', '.join(kinds)})"


def _native_kernels() -> Iterator[Check]:
    if cpu.available():
        yield Check("native kernels", "ok", "for the CPU")
    else:
        yield Check("native kernels", "broken", "none", cpu.why_not())


def _compiler() -> Iterator[Check]:
    wanted = [os.environ.get("CXX", ""), "g++", "clang++"]
    found = next((path for name in wanted if name and (path := shutil.which(name))), None)
    if found:
        yield Check("C++ compiler", "ok", found)
    else:
        advice = "install g++ or clang++ (or set CXX): Inductor compiles with it for the CPU"
        yield Check("C++ compiler", "limited", "none", advice)


def _shared_memory() -> Iterator[Check]:
    if not SHARED_MEMORY.is_dir():
        state = "ok" if sys.platform == "darwin" else "broken"
        yield Check("shared memory", state, f"no {SHARED_MEMORY} on {sys.platform}", "")
        return
    disk = shutil.disk_usage(SHARED_MEMORY)
    found = f"{disk.free / 2**20:,.0f} of {disk.total / 2**20:,.0f} MiB are free in {SHARED_MEMORY}"
    found += ", a rank takes about twice what its largest collective moves"
    advice = "make it larger: docker run --shm-size=..., mount -o remount,size=... /dev/shm"
    if disk.free < LITTLE_BYTES:
        yield Check("shared memory", "broken", found, advice)
    elif disk.free < FEW_BYTES:
        yield Check("shared memory", "limited", found, advice)
    else:
        yield Check("shared memory", "ok", found)


def _group_memory() -> Iterator[Check]:
    """What each group takes, and what the groups of this process hold."""
    at_first = f"{2 * SMALLEST_BUFFER >> 10} KiB"
    if torch.cuda.is_available() and has_triton():
        from autofuse.lowering.gpu.memory.allocation import least_bytes

        at_first += f", on GPUs {least_bytes() / 2**20:,.0f} MiB"
    found = f"a group takes {at_first} a rank at first, and grows with its largest call"
    yield Check("group memory", "ok", f"{found}; in the program that runs, autofuse.memory_summary() tells")
    for summary in group_summaries():
        first, *rest = summary.splitlines()
        yield Check("group memory", "ok", first + "".join(f"; {' '.join(line.split())}" for line in rest))


def _launcher() -> Iterator[Check]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    if "WORLD_SIZE" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ:
        advice = (
            "set LOCAL_WORLD_SIZE, as torchrun does: without it ranks of several hosts are only found out at "
            "the first call, which then runs plain collectives"
        )
        yield Check("launcher", "limited", found, advice)
    else:
        yield Check("launcher", "ok", found or "not under a launcher")
    own = {name: value for name, value in sorted(os.environ.items()) if name.startswith("AUTOFUSE_")}
    shown = ("policy", "patterns", "order", "schedule", "prefer", "measure", "update", "equal_rows", "margin")
    settings = " ".join(f"{name}={getattr(config, name)}" for name in shown)
    table = f" table={config.table}" if config.table else ""
    set_by = f" (from {', '.join(own)})" if own else ""
    limit = "that of the group" if config.timeout_s is None else f"{config.timeout_s:g}"
    yield Check("settings", "ok", f"{settings} timeout_s={limit}{table}{set_by}")


def _backend() -> Iterator[Check]:
    if "autofuse" in torch.compiler.list_backends():
        yield Check("backend", "ok", 'torch.compile finds "autofuse"')
    else:
        advice = "install the checkout (pip install -e .), or pass autofuse.backend.autofuse itself"
        yield Check("backend", "limited", 'torch.compile does not find "autofuse"', advice)


def _inductor() -> Iterator[Check]:
    x = torch.arange(64.0)
    torch.testing.assert_close(torch.compile(_tiny, backend=backend, dynamic=False)(x), _tiny(x))
    yield Check("inductor", "ok", "compiles for the CPU")


def _tiny(x: Tensor) -> Tensor:
    return (x.sin() + 1).sum()


def _fusion() -> Iterator[Check]:
    """Compiles a site as on two ranks of one host, up to code generation."""
    with fake_ranks(0, 2):
        torch.distributed.init_process_group()
        with config.patch(policy="always", patterns="all", order="direct"):
            report = autofuse.explain(_site)(torch.ones(16, 32), torch.ones(32, 8))
    (site,) = report.sites
    if site.fused:
        yield Check("fusion", "ok", f"{site.collective} of 2 CPU ranks becomes {site.pattern}")
    else:
        assert site.reason is not None
        yield Check("fusion", "broken", f"kept: {site.reason.value}: {site.detail}", site.reason.advice)
    if site.prediction is not None:
        yield Check("cost table", "ok", f"{site.prediction.table} (autofuse tune fits one to this machine)")


def _site(x: Tensor, w: Tensor) -> Tensor:
    group = torch.distributed.group.WORLD
    assert group is not None
    return funcol.all_reduce(x @ w, "sum", group)
