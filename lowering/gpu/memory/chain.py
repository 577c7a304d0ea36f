"""Keeps the fused kernels of a device in one order, by an event."""

from __future__ import annotations

from ctypes import c_int64
from functools import cache

import torch

from autofuse.lowering import torch_internals


class Chain:
    """Lets the fused kernels of one device run one after another, whatever their groups and streams. Two
    kernels that wait for peers could keep each other from running."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._event = torch.cuda.Event()
        # Handles of the last stream and of the event, which `native_kernels/gpu/launch.cpp` reads.
        self.last, self.event = c_int64(-1), c_int64(0)

    def enter(self) -> None:
        """Before a launch: the current stream waits for the launch before."""
        raw = torch_internals.current_raw_stream(self._device.index)
        if raw != self.last.value:
            stream = torch.cuda.current_stream(self._device)
            if self._stream is not None:
                stream.wait_event(self._event)
            self._stream, self.last.value = stream, raw

    def leave(self) -> None:
        """After the launch."""
        self._event.record(self._stream)
        if not self.event.value:  # torch creates the driver's event when it first records one
            self.event.value = int(self._event.cuda_event)


@cache
def chain_of(device: torch.device) -> Chain:
    return Chain(device)
