"""Device functions of programmatic dependent launch (`native_kernels/gpu/dependent.py`)."""

import triton
import triton.language as tl

from .comm import INTERPRET
from .shares import STATE_PRESENCE


@triton.jit
def grid_wait():
    """Wait until the kernels before have ended and what they stored can be read."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def launch_dependents(state, rank, world, epoch):
    """Let the next kernel be placed if all peers have started the call; only the first warp looks, and nobody
    waits for a peer. Otherwise the next kernel is placed when this one has ended."""
    if not INTERPRET:
        words = tl.load(state + STATE_PRESENCE + rank)
        tl.inline_asm_elementwise(
            """{
            .reg .pred p, q; .reg .b32 t, v; .reg .b64 a;
            mov.u32 t, %tid.x;
            setp.gt.u32 p, t, 31;
            @p bra DONE;
            mov.u32 v, $3;
            setp.lt.u32 q, t, $2;
            setp.ne.and.u32 q, t, $4, q;
            mul.wide.u32 a, t, 4;
            add.u64 a, a, $1;
            @q ld.relaxed.sys.global.u32 v, [a];
            sub.s32 v, v, $3;
            setp.ge.s32 q, v, 0;
            vote.sync.all.pred p, q, -1;
            @p griddepcontrol.launch_dependents;
            DONE:
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r,r",
            [words, tl.cast(world, tl.int32), tl.cast(epoch, tl.int32), tl.cast(rank, tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
