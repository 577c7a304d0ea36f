"""Copy engines move a part to all peers, beside a kernel that waits for the counters they set.

T3's dma: no SM moves data. Every copy is followed by a store of 1 to a counter of the receiver. The
receiver's kernel sets its counters back to 0 and gives credit; a sender waits for it before it stores again.
Nothing depends on the number of the call, so that a captured graph can be replayed.
"""

import torch
from torch import Tensor

from .memory import PeerMemory

FIRST_CREDIT = 8192
"""Where the words of credit lie among the copy signals, behind all counters: `FIRST_CREDIT + W` in all."""


class CopyEngine:
    """The copy engines as one group uses them.

    RuntimeError where the Python bindings of the CUDA driver are missing.
    """

    def __init__(self, memory: PeerMemory) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise RuntimeError(
                "copy engines need the package cuda-bindings, which CUDA builds of torch bring"
            ) from error
        self._driver, self._memory = driver, memory
        self._stream = torch.cuda.Stream(memory.state.device)
        self._one = torch.ones(1, dtype=torch.int32, device=memory.state.device)

    def push(self, part: Tensor, slice_rows: int, slices: int) -> None:
        """Start to store `part: [C, K]` to all peers, r + 1 first; each slice, then its counter."""
        memory, stream = self._memory, self._stream
        chunk, k = part.shape
        stream.wait_stream(torch.cuda.current_stream())
        signals = [view.view(torch.int32) for view in memory.copy_signals.views]
        equal = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        with torch.cuda.stream(stream):
            for i in range(1, memory.world):
                p = (memory.rank + i) % memory.world
                there = memory.copies.matrix(p, part.dtype, memory.rank * chunk * k, chunk, k)
                credit = signals[memory.rank][FIRST_CREDIT + p].data_ptr()
                self._check(self._driver.cuStreamWaitValue32(stream.cuda_stream, credit, 1, equal))
                self._check(self._driver.cuStreamWriteValue32(stream.cuda_stream, credit, 0, 0))
                for s in range(slices):
                    rows = slice(s * slice_rows, min((s + 1) * slice_rows, chunk))
                    there[rows].copy_(part[rows], non_blocking=True)
                    at = memory.rank * slices + s
                    signals[p][at : at + 1].copy_(self._one, non_blocking=True)

    def join(self) -> None:
        """Later work of the current stream comes after the copies."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def give_credit(self) -> None:
        """Tell all peers that they may store again, after all work of the current stream so far."""
        memory = self._memory
        for p in range(memory.world):
            if p != memory.rank:
                at = FIRST_CREDIT + memory.rank
                memory.copy_signals.views[p].view(torch.int32)[at : at + 1].copy_(
                    self._one, non_blocking=True
                )

    def _check(self, result: tuple[object, ...]) -> None:
        if result[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"a copy engine could not be set going: {result[0]}")
