"""The gathered X, for a caller that keeps it: copied out of the memory where the parts have arrived.

    out[o, s, i] = part of rank s [o, i]

Rows of X are (outer, W, inner), those of a part (outer, inner).

It runs behind the kernel that gathered, on its stream, and waits for nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import PeerMemory, cdiv, launch

from .comm import begin, half_of

BLOCK = 1024
"""Pieces of 16 bytes that a program copies."""

WARPS = 8
MOST_PROGRAMS = 1024


@triton.jit
def kept_rows(
    gathered, part, out, state, rank, half, pieces, inner, blocks,
    PROGRAMS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sizes are in pieces of 16 bytes: half: before the second half of the memory; pieces: of a part, in so
    many blocks; inner: of the inner rows of a part."""
    behind = half_of(begin(state) - 1).to(tl.int64) * half  # the call that gathered has ended
    word = tl.arange(0, 2)[None, :]
    for t in tl.range(tl.program_id(0), W * blocks, PROGRAMS):
        source = t // blocks
        piece = (t % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        inside = (piece < pieces)[:, None] & (word < 2)
        to = ((piece // inner * W + source) * inner + piece % inner)[:, None] * 2 + word
        if source == rank:
            held = tl.load(part + piece[:, None] * 2 + word, mask=inside)
        else:
            at = behind + source.to(tl.int64) * pieces + piece
            held = tl.load(gathered + at[:, None] * 2 + word, mask=inside)
        tl.store(out + to, held, mask=inside)


def launch_kept_rows(
    memory: PeerMemory, gathered: Tensor, part: Tensor, outer: int, out: Tensor, compile_only: bool = False
) -> None:
    """part: [C, K], contiguous, rows of 16 bytes or a multiple; out: [W * C, K]; gathered: [H + W * C, K], as
    `launch_gather_matmul` returns it."""
    (chunk, k), world = part.shape, memory.world
    row = k * part.element_size() // 16
    pieces = chunk * row
    blocks = cdiv(pieces, BLOCK)
    programs = min(world * blocks, MOST_PROGRAMS)
    launch(
        kept_rows, programs, compile_only,
        *(t.view(torch.int64) for t in (gathered, part, out)), memory.state, memory.rank,
        (gathered.shape[0] - world * chunk) * row, pieces, chunk // outer * row, blocks,
        PROGRAMS=programs, W=world, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
