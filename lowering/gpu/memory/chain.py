"""The order of the fused kernels of a device."""

from __future__ import annotations

from functools import cache

import torch

from autofuse.lowering import torch_internals


class Chain:
    """Fused kernels of one device, whatever their groups and streams, run one after another: two that wait
    for peers could keep each other from running."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._last = -1  # its address
        self._event = torch.cuda.Event()

    def enter(self) -> None:
        """Before a launch: the current stream waits for the launch before."""
        raw = torch_internals.current_raw_stream(self._device.index)
        if raw != self._last:
            stream = torch.cuda.current_stream(self._device)
            if self._stream is not None:
                stream.wait_event(self._event)
            self._stream, self._last = stream, raw

    def leave(self) -> None:
        """After the launch."""
        self._event.record(self._stream)


@cache
def chain_of(device: torch.device) -> Chain:
    return Chain(device)
