"""Repeats the launches of a call with other addresses, in one call of C.

`recording()` records the launches of a call. `prepare` makes them callable with the addresses of the operands
alone. A launch that cannot be prepared goes through its launcher again. So do all launches without the
library (`launch.cpp`, a plain C ABI like that of the CPU kernels) or without the driver's bindings.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from .commands import Command

ABI_VERSION = 5
MOST_BYTES, MOST_PARAMS = 4096, 128
MOST_OPERANDS = 32
"""The limit follows from the 32-bit word that has a bit for each aligned operand."""
BROKEN = 7
"""`Start` returns this value if the driver has taken a part of the call and refused another."""
NO_OPERAND = 2**32 - 1
"""In place of an operand's number, for an address that lies in no operand."""

MAP_BYTES = 128
"""Size of a tensor map."""

Address: TypeAlias = int


class At(NamedTuple):
    """The place of an address among the parameters of a launch. is_map: it is in a tensor map, which begins
    at `offset`."""

    offset: int
    address: Address
    is_map: bool


@dataclass(frozen=True)
class Launched:
    """A launch as it was given to the driver.

    params: the bytes of all parameters; offsets: where each parameter begins; cluster: blocks of a cluster, 0
    without clusters; places: where addresses of operands may be; dependent: the kernel may begin before the
    kernels in front of it have ended (`dependent.py`); held: an object that must live as long as `function`.
    """

    function: int
    grid: int
    threads: int
    shared_bytes: int
    cluster: int
    params: bytes
    offsets: tuple[int, ...]
    places: tuple[At, ...]
    dependent: bool = False
    held: Any = field(default=None, compare=False)


Part: TypeAlias = "Launched | tuple[Command, ...] | None"
"""A part of a call: a launch, or commands; None for a launch that cannot be prepared."""

_local = threading.local()


@contextmanager
def recording() -> Iterator[list[Part]]:
    """Collects the launches and commands of this thread within the `with` statement."""
    before = getattr(_local, "launches", None)
    launches: list[Part] = []
    _local.launches = launches
    try:
        yield launches
    finally:
        _local.launches = before


def record(launched: Callable[[], Part]) -> None:
    """Add a part to the list of `recording`, if this thread records. launched: makes the part. Launchers call
    this behind each launch, and `carry_out` behind its commands."""
    launches = getattr(_local, "launches", None)
    if launches is not None:
        launches.append(launched())


# --- The library ----------------------------------------------------------------------------------------


class _Guard(ctypes.Structure):
    _fields_ = tuple(
        (name, c_void_p) for name in ("raised", "bad_input", "failed", "generation", "last", "event")
    )


class _Place(ctypes.Structure):
    _fields_ = tuple((name, c_uint32) for name in ("operand", "offset", "is_map", "delta"))


class _Driver(ctypes.Structure):
    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("launch_kernel", "record_event", "is_capturing", "replace_address"),
            *("wait_event", "wait_value", "write_value", "copy"),
        )
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("function", "params", "offsets", "places")),
        *((name, c_uint32) for name in ("grid", "threads", "shared_bytes", "cluster")),
        *((name, c_uint32) for name in ("bytes", "param_count", "place_count", "dependent")),
    )


class _Command(ctypes.Structure):
    _fields_ = (
        *((name, c_uint32) for name in ("what", "operand")),
        ("stream", c_void_p),
        *((name, c_uint64) for name in ("at", "source", "nbytes")),
    )


class _Step(ctypes.Structure):
    _fields_ = (("kernel", c_void_p), ("commands", c_void_p), ("command_count", c_uint64))


class _Prepared(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("driver", "guard", "steps")),
        *((name, c_uint32) for name in ("step_count", "operand_count", "aligned")),
        ("generation", c_int32),
    )


FUNCTIONS = (
    *("cuLaunchKernelEx", "cuEventRecord", "cuStreamIsCapturing", "cuTensorMapReplaceAddress"),
    *("cuStreamWaitEvent", "cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2", "cuMemcpyDtoDAsync_v2"),
)


@cache
def library() -> ctypes.CDLL | None:
    """The library of `launch.cpp`; None if it was not built."""
    for file in sorted(Path(__file__).parent.glob("_launch*.so")):
        try:
            found = ctypes.CDLL(str(file))
            if found.af_launch_abi_version() == ABI_VERSION:
                return found
        except (OSError, AttributeError):
            continue
    return None


@cache
def driver() -> _Driver | None:
    """Addresses of the driver's functions; None without a driver that has them."""
    try:
        loaded = ctypes.CDLL("libcuda.so.1")
        return _Driver(*(ctypes.cast(getattr(loaded, name), c_void_p).value for name in FUNCTIONS))
    except (OSError, AttributeError):
        return None


def replaced(tensor_map: bytes, address: Address) -> bytes:
    """The tensor map with another address."""
    found = driver()
    assert found is not None
    store = ctypes.create_string_buffer(MAP_BYTES + 64)
    at = -(-ctypes.addressof(store) // 64) * 64
    ctypes.memmove(at, tensor_map, MAP_BYTES)
    replace = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)(found.replace_address)
    if error := replace(at, address):
        raise RuntimeError(f"cuTensorMapReplaceAddress failed: {error}")
    return ctypes.string_at(at, MAP_BYTES)


class Guard:
    """The words by which a launch finds out, without Python, that it has to go the long way.

    raised, bad_input: addresses of words of the failure record; failed, generation: words of the group;
    last, event: words of the chain of the device.
    """

    def __init__(
        self, raised: Address, bad_input: Address, failed: c_int32, generation: c_int32, last: c_int64,
        event: c_int64,
    ) -> None:  # fmt: skip
        self.generation = generation
        self._held = failed, last, event
        words = (ctypes.addressof(each) for each in (failed, generation, last, event))
        self.words = _Guard(raised, bad_input, *words)


Start: TypeAlias = Callable[..., int]
"""`start(stream, *addresses of the operands)` launches and returns 0, or returns a code if the launch must go
the long way."""

Values: TypeAlias = Sequence[tuple[int, bytes]]
"""Parameters that differ from call to call, other than addresses of operands: their offsets and bytes."""


def put(values: Values, params: Address) -> None:
    """Write the values into parameters."""
    for offset, found in values:
        ctypes.memmove(params + offset, found, len(found))


def tell(start: Start, values: Values) -> None:
    """Write the values into the parameters of all later starts. `start` has one launch, and no other thread
    may call it meanwhile."""
    put(values, start.params)  # type: ignore[attr-defined]


def prepare(parts: Sequence[Part], operands: Sequence[Tensor], guard: Guard) -> Start | None:
    """A function that repeats the parts of a call, one behind the other; None if a part cannot be
    repeated."""
    found, of_driver = library(), driver()
    if found is None or of_driver is None or not parts or len(operands) > MOST_OPERANDS:
        return None
    spans = _spans(operands)
    made = [each for each in (_prepared(part, spans) for part in parts) if each is not None]
    moved = {operand for each in made for operand in each.moved}
    kernels = [each.kernel for each in made if each.kernel is not None]
    if len(made) < len(parts) or moved != {i for i, *_ in spans} or not kernels:
        return None
    steps = (_Step * len(made))(*(each.step for each in made))
    aligned = sum((t.data_ptr() % 16 == 0) << i for i, t in enumerate(operands))
    prepared = _Prepared(
        ctypes.addressof(of_driver), ctypes.addressof(guard.words), ctypes.addressof(steps), len(made),
        len(operands), aligned, guard.generation.value,
    )  # fmt: skip
    launch = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint64, c_char_p)(("af_launch", found))
    # ctypes converts each argument, which takes longer than to pack all addresses.
    at, pack = ctypes.addressof(prepared), Struct(f"{len(operands)}Q").pack

    def start(stream: int, *given: int) -> int:
        result: int = launch(at, stream, pack(*given))
        if result == BROKEN:
            raise RuntimeError("the driver refuses a part of a fused op that has begun")
        return result

    start.held = prepared, guard, steps, made  # type: ignore[attr-defined]
    start.params = kernels[0].params  # type: ignore[attr-defined]
    return start


class _One(NamedTuple):
    """A prepared part. moved: the operands whose addresses it has; held: objects that must live as long;
    kernel: None for commands."""

    step: _Step
    moved: frozenset[int]
    held: Any
    kernel: _Kernel | None = None


Span: TypeAlias = tuple[int, Address, int]
"""The number of an operand, where it begins, and its bytes."""


def _spans(operands: Sequence[Tensor]) -> list[Span]:
    found = []
    for i, t in enumerate(operands):
        if t.numel():
            steps = zip(t.shape, t.stride(), strict=True)
            length = (1 + sum((size - 1) * step for size, step in steps)) * t.element_size()
            found.append((i, t.data_ptr(), length))
    return found


def _prepared(part: Part, spans: Sequence[Span]) -> _One | None:
    """The part with its addresses. An address that lies in an operand moves with it; all others stay. None if
    an address lies in two operands."""
    if part is None:
        return None
    return _kernel(part, spans) if isinstance(part, Launched) else _commands(part, spans)


def _kernel(launched: Launched, spans: Sequence[Span]) -> _One | None:
    if len(launched.offsets) > MOST_PARAMS or len(launched.params) > MOST_BYTES:
        return None
    places = []
    for at in launched.places:
        within = _within(at.address, spans)
        if len(within) > 1 or (within and within[0][1] >= 1 << 32):
            return None
        if within:
            places.append(_Place(within[0][0], at.offset, at.is_map, within[0][1]))
    params = ctypes.create_string_buffer(launched.params, len(launched.params))
    offsets = (c_uint32 * len(launched.offsets))(*launched.offsets)
    table = (_Place * len(places))(*places)
    kernel = _Kernel(
        launched.function, ctypes.addressof(params), ctypes.addressof(offsets), ctypes.addressof(table),
        launched.grid, launched.threads, launched.shared_bytes, launched.cluster, len(launched.params),
        len(offsets), len(places), launched.dependent,
    )  # fmt: skip
    moved = frozenset(place.operand for place in places)
    return _One(_Step(ctypes.addressof(kernel)), moved, (params, offsets, table, launched.held), kernel)


def _commands(commands: Sequence[Command], spans: Sequence[Span]) -> _One | None:
    made, moved = [], set()
    for do, stream, at, source, nbytes in commands:
        within = _within(source, spans)
        if len(within) > 1:
            return None
        operand, begin = within[0] if within else (NO_OPERAND, source)
        moved |= {operand} - {NO_OPERAND}
        made.append(_Command(do, operand, stream, at, begin, nbytes))
    table = (_Command * len(made))(*made)
    return _One(_Step(None, ctypes.addressof(table), len(made)), frozenset(moved), table)


def _within(address: Address, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """In which operands an address lies, and how many bytes behind their beginnings."""
    return [(i, address - begin) for i, begin, length in spans if 0 <= address - begin < length]
