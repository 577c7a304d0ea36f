"""The board: host memory that the ranks of a group share, in which each rank tells the others of failures."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum

from autofuse.lowering.cpu.names import FOLDER, locked, remove_left_behind
from autofuse.native_kernels.gpu.state import RECORD_WORDS

ROW_BYTES = 1024
_WORDS_AT = 64
_TEXT_AT = _WORDS_AT + 4 * RECORD_WORDS
_TEXT_BYTES = ROW_BYTES - _TEXT_AT


class Stage(IntEnum):
    """How far a rank is with a failure."""

    FINE = 0
    ALARMED = 1
    """It knows of a failure: peers stop waiting."""
    SETTLED = 2
    """Its kernels have stopped: the row says for whom they waited."""


class Board:
    """A row for each rank: the stage, a copy of its failure record, and a text. Each rank writes its own."""

    def __init__(self, path: str, world: int) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(fd, world * ROW_BYTES)
        finally:
            os.close(fd)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._stages = [ctypes.c_int32.from_address(self._base + r * ROW_BYTES) for r in range(world)]

    @staticmethod
    @contextmanager
    def create(world: int) -> Iterator[str]:
        """The path of a new board. The file is removed on exit, when all ranks have opened it."""
        remove_left_behind()
        path = f"{FOLDER}/af-board-{os.getpid()}-{secrets.token_hex(4)}"
        fd = locked(lambda: os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            os.ftruncate(fd, world * ROW_BYTES)
            yield path
        finally:
            os.close(fd)
            with suppress(FileNotFoundError):
                os.unlink(path)

    def stage(self, rank: int) -> Stage:
        return Stage(self._stages[rank].value)

    def words(self, rank: int) -> list[int]:
        return list((ctypes.c_int32 * RECORD_WORDS).from_address(self._at(rank, _WORDS_AT)))

    def text(self, rank: int) -> str:
        return ctypes.string_at(self._at(rank, _TEXT_AT)).decode(errors="replace")

    def write(self, rank: int, stage: Stage, words: Sequence[int], text: str) -> None:
        """Writes the stage last: a rank that reads the new stage finds the words and the text."""
        encoded = text.encode()[: _TEXT_BYTES - 1] + b"\0"
        ctypes.memmove(self._at(rank, _TEXT_AT), encoded, len(encoded))
        (ctypes.c_int32 * RECORD_WORDS).from_address(self._at(rank, _WORDS_AT))[:] = list(words)
        self._stages[rank].value = stage

    def _at(self, rank: int, offset: int) -> int:
        return self._base + rank * ROW_BYTES + offset
