"""Descriptors of tensors in device memory.

A descriptor is a list of int64 words, in bytes: addresses, sizes and strides of the tensors of a call. A
descriptor that is on the device already is not written again. Calls of a group run one after another, so a
later call may overwrite a descriptor that an earlier call has read.

A captured call keeps the descriptor that it found. If it found none, the graph writes the descriptor at every
replay, to a slot that all such calls share.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

SLOTS = 32
"""Descriptors that are remembered."""

Put = Callable[[Tensor, bytes], None]


class Descriptors:
    """The descriptors of a group.

    put: stores words on the device, in the order of the current stream; allocate: returns int64 memory.
    """

    def __init__(self, put: Put, allocate: Callable[[int], Tensor]) -> None:
        self._put, self._allocate = put, allocate
        self._slots: list[Tensor] = []
        self._kept: list[list[Tensor]] = []  # captured graphs may read them
        self._size = 0
        self._known: dict[bytes, int] = {}  # slots by words, in the order of their last use
        self._captured: set[int] = set()

    def place(self, words: bytes, capturing: bool) -> Tensor:
        """The device's copy of a descriptor, until a later call with another one.

        Not to be called first with so many words while a graph is captured: that allocates.
        """
        slot = self._known.pop(words, None)
        if slot is not None:
            self._known[words] = slot
            if capturing:
                self._captured.add(slot)
            return self._slots[slot]
        if len(words) > 8 * self._size:
            self._grow(len(words) // 8)
        slot = None if capturing else self._free()
        found = self._slots[SLOTS if slot is None else slot]
        self._put(found, words)
        if slot is not None:
            self._known[words] = slot
        return found

    def _free(self) -> int | None:
        """A slot without a descriptor, else the slot of the descriptor whose last use is longest ago. None if
        captured calls have all slots."""
        used = set(self._known.values()) | self._captured
        for slot in range(SLOTS):
            if slot not in used:
                return slot
        for words, slot in self._known.items():
            if slot not in self._captured:
                del self._known[words]
                return slot
        return None

    def _grow(self, size: int) -> None:
        self._size = 1 << (size - 1).bit_length()
        self._kept.append(self._slots)
        self._slots = list(self._allocate((SLOTS + 1) * self._size).view(SLOTS + 1, self._size))
        self._known.clear()
        self._captured.clear()
