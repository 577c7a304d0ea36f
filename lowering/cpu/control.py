"""The control segment of each rank, which has a fixed size:

headers[2]      the call of this rank, by parity of the epoch: epoch, hash, text
failures        why this rank has given up, and for which rank it waits (`failures.py`)
values[2]       the values of an `exchange`, by parity of the meeting: length, then up to 512 int64
meetings[W]     slots: the last meeting of rank `source`
signals[W][64]  slots: the epoch in which rank `source` has raised signal `slot`
"""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from autofuse.native_kernels import cpu

SLOTS = 64  # signals from one rank to another
VALUES = 512  # most int64 that a rank can exchange at a time

_LINE = 64
_HEADER = 1024
_FAILURE = 2 * _HEADER
_VALUES = 4096
_ROW = VALUES + 8  # int64 of one parity, in whole cache lines
_Row = ctypes.c_int64 * _ROW
_MEETINGS = _VALUES + 2 * _ROW * 8


def nbytes_of(world: int) -> int:
    """Size of a control segment."""
    return _MEETINGS + world * (1 + SLOTS) * _LINE


class Control:
    """The addresses of all parts of the control segments in this process. Lists have an entry for each rank.

    Attributes:
        values, headers: by parity, then by rank.
        failures: addresses of the ranks' failure texts, each `failure_bytes` long.
        meetings_in: slots in this rank's segment, one for each source.
        meetings: two arrays of C: this rank's slots in the segments of others, and `meetings_in`.
        headers_of: `headers` as an array of C for each parity.
    """

    def __init__(self, rank: int, segments: Sequence[Tensor]) -> None:
        world, base = len(segments), [cpu.address(t) for t in segments]
        self.values = [[_Row.from_address(b + _VALUES + p * _ROW * 8) for b in base] for p in (0, 1)]
        self.headers = [[b + parity * _HEADER for b in base] for parity in (0, 1)]
        self.failures, self.failure_bytes = [b + _FAILURE for b in base], _VALUES - _FAILURE
        mine, signals = base[rank], _MEETINGS + world * _LINE
        self.meetings_in = [mine + _MEETINGS + source * _LINE for source in range(world)]
        pointers = ctypes.c_void_p * world
        meetings_out = pointers(*(b + _MEETINGS + rank * _LINE for b in base))
        self.meetings = meetings_out, pointers(*self.meetings_in)
        self.headers_of = [pointers(*headers) for headers in self.headers]
        self._signals_in = [mine + signals + source * SLOTS * _LINE for source in range(world)]
        self._signals_out = [b + signals + rank * SLOTS * _LINE for b in base]

    def signal_from(self, source: int, slot: int) -> int:
        """The address at which `source` signals this rank."""
        assert 0 <= slot < SLOTS, slot
        return self._signals_in[source] + slot * _LINE

    def signal_to(self, dest: int, slot: int) -> int:
        """The address at which this rank signals `dest`."""
        assert 0 <= slot < SLOTS, slot
        return self._signals_out[dest] + slot * _LINE


def epoch_of(header: int) -> int:
    """The epoch of the call in a header."""
    return ctypes.c_uint64.from_address(header).value


def text_of(header: int) -> str:
    """The text of the call in a header."""
    length = ctypes.c_uint64.from_address(header + 16).value
    return ctypes.string_at(header + 24, length).decode(errors="replace")
