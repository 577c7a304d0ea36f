"""Copy engines move data to peers, beside a kernel that waits for the data. No multiprocessor moves data (the
dma of T3).

- After each copy, another copy of 4 bytes sets a counter of the receiver, for which its kernel waits.
- The last program of the receiver's kernel sets its counters back to 0 and gives credit to the sender. The
  sender's copy stream takes the credit before its next call stores again.
- Nothing depends on the epoch. So a captured graph can be replayed, and a call can be repeated with other
  operands.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from autofuse.lowering.torch_internals import current_raw_stream

from .commands import OF_CALL, Command, Do, carry_out, new_event, new_stream
from .memory import FIRST_CREDIT, PeerMemory
from .memory import FIRST_PRESENCE as FIRST_PRESENCE


class CopyEngine:
    """The copy engines of one group, with a stream for each peer. `memory` may be replaced by larger memory.

    RuntimeError where the Python bindings of the CUDA driver are missing.
    """

    def __init__(self, memory: PeerMemory) -> None:
        self.memory, device = memory, memory.state.device
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._peers = [(memory.rank + i) % memory.world for i in range(1, memory.world)]
        # With a stream for each peer, a late peer does not hold up the others. Streams of torch's pool are
        # shared. If a copy that the kernel waits for were on the kernel's stream, it would start behind it.
        self._streams = [new_stream() for _ in self._peers]
        self._begun, self._ended = new_event(), [new_event() for _ in self._peers]
        self._forked = 0

    def push(self, part: Tensor, slice_rows: int, slices: int) -> None:
        """Start to copy `part: [C, K]`, or one part for each rank, `[W, C, K]`, to all peers, rank + 1 first.

        Behind each slice its flag is raised. part: contiguous.
        """
        assert part.is_contiguous()
        chunk, k = part.shape[-2:]
        row = k * part.element_size()
        commands = self._fork(1)
        for p in self._peers:
            own = part.data_ptr() + (p * chunk * row if part.dim() == 3 else 0)
            commands += self._sent(self._streams[0], p, own, chunk * row, slice_rows * row, slices)
        self._do(commands)

    def fork(self) -> None:
        """Call it before the launch of a kernel that fills the outbox: copies of `forward` run beside it."""
        self._do(self._fork(len(self._streams)))

    def forward(self, full: Tensor, chunk_bytes: int, slice_bytes: int) -> None:
        """Start to copy the outbox, a chunk for every rank; behind each slice its flag is raised.

        full: int32 [W, slices], on the device. The kernel raises one once a slice is complete, the stream
        clears it. Call this after the launch: streams may share a queue, and the kernel must not wait in it
        behind these copies.
        """
        commands: list[Command] = []
        for stream, p in zip(self._streams, self._peers, strict=True):
            own, words = self.memory.outbox.data_ptr() + p * chunk_bytes, full[p].data_ptr()
            commands += self._sent(stream, p, own, chunk_bytes, slice_bytes, full.shape[1], words)
        self._do(commands)

    def join(self) -> None:
        """Later work of the current stream starts after the copies."""
        commands = []
        for stream, event in zip(self._streams[: self._forked], self._ended, strict=False):
            commands += [Command(Do.RECORD, stream, event), Command(Do.AWAIT, OF_CALL, event)]
        self._do(commands)

    def give_credit(self) -> None:
        """Tell all peers that they may store again, after all work of the current stream so far."""
        self._do([self._raise(OF_CALL, p, FIRST_CREDIT + self.memory.rank) for p in self._peers])

    def _sent(
        self, stream: int, peer: int, own: int, nbytes: int, slice_bytes: int, slices: int, full: int = 0
    ) -> Iterator[Command]:
        """Copy `nbytes` from the address `own` to a peer, slice by slice. full: the address of the words by
        which a kernel tells that slices are complete; 0 if all are."""
        rank = self.memory.rank
        there = self.memory.copies.views[peer].data_ptr() + rank * nbytes
        yield self._take_credit(stream, peer)
        for s in range(slices):
            if full:
                yield Command(Do.TAKE, stream, full + 4 * s)
            at = s * slice_bytes
            yield Command(Do.COPY, stream, there + at, own + at, min(slice_bytes, nbytes - at))
            yield self._raise(stream, peer, rank * slices + s)

    def _fork(self, streams: int) -> list[Command]:
        forked = self._streams[:streams]
        self._forked = len(forked)
        waits = (Command(Do.AWAIT, stream, self._begun) for stream in forked)
        return [Command(Do.RECORD, OF_CALL, self._begun), *waits]

    def _take_credit(self, stream: int, peer: int) -> Command:
        return Command(Do.TAKE, stream, self._word(self.memory.rank, FIRST_CREDIT + peer))

    def _raise(self, stream: int, peer: int, at: int) -> Command:
        """Raise a flag of the peer."""
        return Command(Do.COPY, stream, self._word(peer, at), self._one.data_ptr(), 4)

    def _word(self, rank: int, at: int) -> int:
        return self.memory.copy_signals.views[rank].data_ptr() + 4 * at

    def _do(self, commands: list[Command]) -> None:
        carry_out(commands, current_raw_stream(self.memory.state.get_device()))
