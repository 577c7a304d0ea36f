"""Device tables: the constants of the cost model for one kind of device, and measured points, as JSON.

Constants are positive numbers under dotted keys. Times are in microseconds, rates per microsecond:

    memory.rate                       bytes that a rank reads from its memory
    matmul.<dtype>.rate               floating-point operations of a matmul
    matmul.<dtype>.start_us           least time of a matmul
    matmul.<dtype>.pack_rate          bytes of a weight that is packed for more than one row; optional
    matmul.<dtype>.few_rows_rate      operations of the fused ops' own matmul of few rows; optional
    pooling.rate, .start_us           bytes of embedding rows, and the least time of a table
    <collective>.<ranks>.start_us     least time of an unfused collective
    <collective>.<ranks>.rate         bytes that an unfused collective moves
    fused.<collective>.<ranks>.start_us  overhead of the fused op that replaces the collective
    fused.signal_us                   time between raising a signal and seeing it
    link.<ranks>.<store mode>         bytes that one rank sends or receives in a fused op

A constant that is missing for a number of ranks is taken from the nearest number (`DeviceTable.ranked`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
STORES = ("remote", "dma")

_DTYPE = r"(float32|bfloat16|float16)"
_KEYS = tuple(
    re.compile(key)
    for key in (
        r"memory\.rate",
        rf"matmul\.{_DTYPE}\.(rate|start_us|pack_rate|few_rows_rate)",
        r"pooling\.(rate|start_us)",
        rf"({'|'.join(COLLECTIVES)})\.\d+\.(start_us|rate)",
        rf"fused\.({'|'.join(COLLECTIVES)})\.\d+\.start_us",
        r"fused\.signal_us",
        rf"link\.\d+\.({'|'.join(STORES)})",
    )
)
_SHIPPED = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Point:
    """A measured site: its `Task.key`, and the times fused and apart in microseconds, None if not
    measured."""

    task: str
    fused_us: float | None
    unfused_us: float | None


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """The constants and measured points of one kind of device."""

    name: str
    device: str
    """The type of the device and, after a colon, a part of the device's name: `cpu`, `cuda:H200`."""
    cores: int | None
    """Number of cores that the ranks of a host shared in the measurements; None if each rank has a device."""
    constants: Mapping[str, float]
    points: tuple[Point, ...] = ()

    @property
    def overlaps(self) -> bool:
        """Whether data moves beside the compute. CPU ranks move their data themselves."""
        return self.cores is None

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def ranked(self, prefix: str, name: str, world: int, cores: int) -> float:
        """The constant `<prefix>.<ranks>.<name>` for `world` ranks on `cores` cores: that of the nearest
        number of ranks by ratio. Numbers of ranks that share cores, or do not, as `world` ranks do are
        preferred."""
        shared = world > cores

        def distance(ranks: int) -> tuple[bool, float]:
            alike = self.cores is None or (ranks > self.cores) == shared
            return not alike, abs(math.log(ranks / world))

        ranks = min(self._ranks[prefix, name], key=distance)
        return self.constants[f"{prefix}.{ranks}.{name}"]

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], list[int]]:
        """The numbers of ranks for which the table has `<prefix>.<ranks>.<name>`."""
        found: dict[tuple[str, str], list[int]] = {}
        for key in self.constants:
            *prefix, ranks, name = key.split(".")
            if ranks.isdecimal():
                found.setdefault((".".join(prefix), name), []).append(int(ranks))
        return found

    def dtype(self, name: str) -> str:
        """The dtype whose constants apply to `name`: `name` itself if its matmul was measured."""
        return name if f"matmul.{name}.rate" in self.constants else self._dtypes[0]

    @cached_property
    def _dtypes(self) -> list[str]:
        return sorted(key.split(".")[1] for key in self.constants if re.fullmatch(r"matmul\..*\.rate", key))

    @cached_property
    def by_task(self) -> dict[str, Point]:
        """The measured points, each by its task."""
        return {point.task: point for point in self.points}

    def to_json(self) -> str:
        data = {**asdict(self), "constants": dict(self.constants)}
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> DeviceTable:
        """The table in a JSON text. ValueError, with `where` and the key, if the text is no valid table."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where}: no JSON ({error}); write it with `autofuse tune`") from None
        fields = _Fields(data, where)
        cores = fields.take("cores", (int, type(None)), "a number of cores or null")
        if cores is not None and cores < 1:
            raise ValueError(f"{where}: cores is {cores}, expected at least 1, or null")
        constants = fields.take("constants", dict, "an object")
        for key, value in constants.items():
            _check(key, value, where)
        _check_complete(constants, where)
        points = fields.take("points", list, "a list")
        name = fields.take("name", str, "a string")
        device = fields.take("device", str, "a string")
        fields.check_empty()
        return cls(name, device, cores, constants, tuple(_point(p, i, where) for i, p in enumerate(points)))


class _Fields:
    """The entries of a JSON object, taken one by one."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: expected a JSON object, got {type(data).__name__}")
        self.data, self.where = dict(data), where

    def take(self, key: str, kind: type | tuple[type, ...], expected: str) -> Any:
        if key not in self.data:
            raise ValueError(f"{self.where}: {key} is missing, expected {expected}")
        value = self.data.pop(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} is {value!r}, expected {expected}")
        return value

    def check_empty(self) -> None:
        for key in self.data:
            raise ValueError(f"{self.where}: unknown key {key}")


def _check(key: str, value: object, where: str) -> None:
    if not any(pattern.fullmatch(key) for pattern in _KEYS):
        raise ValueError(f"{where}: constants: unknown key {key}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{where}: constants: {key} is {value!r}, expected a positive number")


def _check_complete(constants: Mapping[str, float], where: str) -> None:
    """ValueError if a constant is missing that the model needs for some site."""
    needed = ["memory.rate", "pooling.rate", "pooling.start_us", "fused.signal_us"]
    dtypes = {key.split(".")[1] for key in constants if key.startswith("matmul.")} or {"float32"}
    needed += [f"matmul.{dtype}.{name}" for dtype in sorted(dtypes) for name in ("rate", "start_us")]
    for kind in COLLECTIVES:
        ranks = {key.split(".")[1] for key in constants if key.startswith(f"{kind}.")} or {"2"}
        needed += [f"{kind}.{r}.{name}" for r in sorted(ranks) for name in ("start_us", "rate")]
        if not any(key.startswith(f"fused.{kind}.") for key in constants):
            needed.append(f"fused.{kind}.2.start_us")
    if not any(re.fullmatch(r"link\.\d+\.remote", key) for key in constants):
        needed.append("link.2.remote")
    for key in needed:
        if key not in constants:
            raise ValueError(f"{where}: constants: {key} is missing")


def _point(data: object, index: int, where: str) -> Point:
    fields = _Fields(data, f"{where}: points[{index}]")
    task = fields.take("task", str, "a string")
    kinds = (int, float, type(None))
    times = [fields.take(key, kinds, "a time in us or null") for key in ("fused_us", "unfused_us")]
    fields.check_empty()
    return Point(task, *times)


def read(path: Path) -> DeviceTable:
    """The table in a file. ValueError, with the file and the key, if the file holds no valid table."""
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check `table`") from None
    return _read(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=64)
def _read(path: Path, mtime: int, size: int) -> DeviceTable:
    return DeviceTable.from_json(path.read_text(), str(path))


@functools.cache
def shipped() -> tuple[DeviceTable, ...]:
    """The tables that come with autofuse."""
    return tuple(read(path) for path in sorted(_SHIPPED.glob("*.json")))


def cache_folder() -> Path:
    """Where `autofuse tune` writes the tables of this machine."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "autofuse"


def tables(path: str = "") -> tuple[DeviceTable, ...]:
    """All tables, first the table at `path`, then the tables of this machine, then the shipped tables.

    All ranks must find the same tables, because they decide by the tables, without communication, whether to
    fuse. The ranks of one host read the same files; the user copies the files to other hosts. ValueError for
    an invalid table.
    """
    own = [Path(path).expanduser()] if path else []
    return (*map(read, (*own, *sorted(cache_folder().glob("*.json")))), *shipped())


def table_for(tables: Sequence[DeviceTable], device: torch.device) -> DeviceTable:
    """The first table for the device, else the first for its type; ValueError if there is none."""
    name = _device_name(device)
    for table in tables:
        kind, _, model = table.device.partition(":")
        if kind == device.type and model in name:
            return table
    for table in tables:
        if table.device.partition(":")[0] == device.type:
            return table
    raise ValueError(f"no table of constants for {device.type}; write one with `autofuse tune`")


@functools.cache
def _device_name(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    return torch.cuda.get_device_name(device)
