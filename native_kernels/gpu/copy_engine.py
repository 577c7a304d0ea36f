"""Copy engines move data to peers beside a kernel that waits for the flags they raise.

No multiprocessor moves data (the dma of T3). Behind each copy, another copy of 4 bytes raises a flag of the
receiver. The kernel of the receiver clears its flags and gives a credit; the sender waits for the credit
before it stores again. Nothing depends on the epoch, so that a captured graph can be replayed.
"""

from typing import Any

import torch
from torch import Tensor

from .memory import FIRST_CREDIT, PeerMemory
from .memory import FIRST_PRESENCE as FIRST_PRESENCE


class CopyEngine:
    """The copy engines of one group, a stream a peer; `memory` may be replaced by larger memory.

    RuntimeError where the Python bindings of the CUDA driver are missing.
    """

    def __init__(self, memory: PeerMemory) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise RuntimeError(
                "copy engines need the package cuda-bindings, which CUDA builds of torch bring"
            ) from error
        self._driver, self.memory, device = driver, memory, memory.state.device
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._signals = [view.view(torch.int32) for view in memory.copy_signals.views]
        self._peers = [(memory.rank + i) % memory.world for i in range(1, memory.world)]
        # A stream for each peer, so that a late peer holds up no other. Streams of torch's pool are shared:
        # on the stream of the kernel, copies that the kernel waits for would start after it.
        self._streams = [torch.cuda.ExternalStream(self._new_stream(), device) for _ in self._peers]
        self._forked = self._streams[:0]

    def push(self, part: Tensor, slice_rows: int, slices: int) -> None:
        """Start to copy `part: [C, K]`, or one part for each rank, `[W, C, K]`, to all peers, rank + 1 first.

        Behind each slice its flag is raised.
        """
        self._fork(1)
        if not self._peers:
            return
        memory, stream = self.memory, self._streams[0]
        chunk, k = part.shape[-2:]
        with torch.cuda.stream(stream):
            for p in self._peers:
                own = part if part.dim() == 2 else part[p]
                there = memory.copies.matrix(p, part.dtype, memory.rank * chunk * k, chunk, k)
                self._take_credit(stream, p)
                for s in range(slices):
                    rows = slice(s * slice_rows, min((s + 1) * slice_rows, chunk))
                    there[rows].copy_(own[rows], non_blocking=True)
                    self._raise(p, memory.rank * slices + s)

    def fork(self) -> None:
        """Call it before the launch of a kernel that fills the outbox: copies of `forward` run beside it."""
        self._fork(len(self._streams))

    def forward(self, full: Tensor, chunk_bytes: int, slice_bytes: int) -> None:
        """Start to copy the outbox, a chunk for every rank; behind each slice its flag is raised.

        full: int32 [W, slices], on the device. The kernel raises one once a slice is complete, the stream
        clears it. Call this after the launch: streams may share a queue, and the kernel must not wait in it
        behind these copies.
        """
        memory, slices = self.memory, full.shape[1]
        here = memory.outbox[: memory.world * chunk_bytes].split(chunk_bytes)
        for stream, p in zip(self._streams, self._peers, strict=True):
            there = memory.copies.views[p][memory.rank * chunk_bytes :][:chunk_bytes].split(slice_bytes)
            with torch.cuda.stream(stream):
                self._take_credit(stream, p)
                for s, part in enumerate(here[p].split(slice_bytes)):
                    self._take(stream, full[p, s])
                    there[s].copy_(part, non_blocking=True)
                    self._raise(p, memory.rank * slices + s)

    def join(self) -> None:
        """Later work of the current stream starts after the copies."""
        for stream in self._forked:
            torch.cuda.current_stream().wait_stream(stream)

    def give_credit(self) -> None:
        """Tell all peers that they may store again, after all work of the current stream so far."""
        for p in self._peers:
            self._raise(p, FIRST_CREDIT + self.memory.rank)

    def _fork(self, streams: int) -> None:
        self._forked = self._streams[:streams]
        begun = torch.cuda.current_stream().record_event()
        for stream in self._forked:
            stream.wait_event(begun)

    def _take_credit(self, stream: torch.cuda.Stream, peer: int) -> None:
        self._take(stream, self._signals[self.memory.rank][FIRST_CREDIT + peer])

    def _take(self, stream: torch.cuda.Stream, flag: Tensor) -> None:
        """Wait until the flag is at least 1 (more after a wait has given up), and clear it."""
        least = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._call(self._driver.cuStreamWaitValue32, stream.cuda_stream, flag.data_ptr(), 1, least)
        self._call(self._driver.cuStreamWriteValue32, stream.cuda_stream, flag.data_ptr(), 0, 0)

    def _raise(self, peer: int, at: int) -> None:
        """Raise a flag of the peer, on the current stream."""
        self._signals[peer][at : at + 1].copy_(self._one, non_blocking=True)

    def _new_stream(self) -> int:
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._call(self._driver.cuStreamCreate, flags.value))

    def _call(self, function: Any, *args: Any) -> Any:
        error, *results = function(*args)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"a copy engine could not be set going: {function.__name__}: {error}")
        return results[0] if results else None
