"""reduce_update_gather: one persistent kernel that sums gradients, updates parameters and hands them round.

The elements of all tensors are cut into buckets of at most 1024 (`lowering.buckets`); each rank owns a run of
them. A launch exchanges a piece: the same number of buckets of every run, one after another. An item is a
bucket of one run. Behind the end of a run items are empty, but a few words are sent for each, so that every
rank hears from every other one in each call.

A. The first SENDERS programs send items of gradients to their owner, MOVED at once.
B. Tickets, in the order of the items of the own run: take the words of all ranks, add in rank order in fp32,
   update states and parameters, and send the parameters to all peers.
C. Tickets of their own, in the order of the items of all peers: take MOVED items of an owner, and store them
   to the parameters. Between two items of B a program copies what has arrived.

    senders      A0 A1 A2 A3 ...  A12 A13 A14 A15   then as the others
    others       B0   B1   B2  C0   B3   B4   B5   C1  ...

What travels are words (`words.py`), so there is no signal. A waits for no peer, B for A of the peers, C for
B. No rank stores to parameters of another one. A keeps some items ahead of B (`wait_for_sums`), so that links
and memory are busy at the same time, and an item is still in the L2 cache when it is summed, or copied.

If a wait gives up, the item does not change, and its parameters are not sent.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import PeerMemory, launch

from .comm import STATE_TICKETS, begin, draw, drawn, half_of, is_last
from .embedding_exchange import ENDLESS
from .patience import any_thread
from .shares import A, claim, end_shares, multiprocessor, start, stays
from .update_launch import KINDS, StepLaunch, UpdateConfig
from .update_moves import (
    are_there,
    copy_item,
    copy_parameters,
    first_copy,
    hand_round,
    send_gradients,
    sum_of,
)
from .update_parts import (
    FP16,
    FP32,
    LENGTH,
    at,
    buckets_of,
    elements_of,
    parameters_of,
    states_of,
    updated,
)
from .words import LINE


@triton.jit(do_not_specialize=["first", "items", "scale", "rank", "site", "inbox_half"])
def update_exchange(
    words, buckets, rates, m_of, v_of, most_of, master_of, inboxes, state,
    first, items, scale, rank, site, inbox_half,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, GRAD: tl.constexpr, PARAM: tl.constexpr,
    UNIT: tl.constexpr, RULE: tl.constexpr, MASTER: tl.constexpr, SENDERS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor.

    words: int64, where the run of each rank begins in `buckets`, W + 1 words, then FIELDS of each tensor;
    rates: fp32 [rows, NUMBERS]; m_of, v_of, most_of, master_of: fp32 states; inboxes: int64 [W], addresses of
    the memory for words of all ranks; first, items: the buckets of each run in this piece; inbox_half: in
    LINE bytes.
    """
    grads: tl.constexpr = tl.float32 if GRAD == FP32 else (tl.float16 if GRAD == FP16 else tl.bfloat16)
    params: tl.constexpr = tl.float32 if PARAM == FP32 else (tl.float16 if PARAM == FP16 else tl.bfloat16)
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    half = half_of(epoch) * tl.cast(inbox_half, tl.int64) * LINE
    gathered = half + tl.cast(items, tl.int64) * (W * LENGTH * (grads.primitive_bitwidth // 8))
    send_gradients(
        words, buckets, inboxes, state, asked, first, items, rank, half, program, PROGRAMS, SENDERS, W, grads,
        UNIT, AHEAD,
    )  # fmt: skip
    unit = tl.full((), ENDLESS, tl.int32)
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        unit = drawn(draw(state + STATE_TICKETS))
    word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, items, 1)
    copy = first_copy(state, unit)
    while unit < items:
        item = unit
        ticket = draw(state + STATE_TICKETS)
        _, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
        mine = at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, grads)
        param, place, row, p = parameters_of(tensor, bucket, inside, mask, master_of, params, UNIT, MASTER)
        m, v, greatest = states_of(m_of, v_of, most_of, place, mask, RULE)
        g, mask, sent = sum_of(inboxes, half, mine, mask, item, items, state, rank, site, epoch, W, grads)
        unit = drawn(ticket)
        word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, items, 1)
        there = are_there(inboxes, gathered, copy, items, rank, W, params)
        p = updated(p, g, m, v, greatest, rates, row, scale, m_of, v_of, most_of, place, mask, RULE)
        if MASTER:
            tl.store(master_of + place, p, mask=mask)
        hand_round(p.to(params), param, mask, sent, item, inboxes, gathered, rank, items, W, params)
        if any_thread(there):
            copy = copy_item(
                words, buckets, inboxes, state, copy, first, items, rank, site, gathered, epoch, W, params,
                UNIT,
            )  # fmt: skip
    copy_parameters(
        words, buckets, inboxes, state, copy, first, items, rank, site, gathered, epoch, W, params, UNIT,
    )  # fmt: skip
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        end_shares(state, epoch, PROGRAMS)


def launch_update_exchange(
    memory: PeerMemory,
    words: Tensor,
    buckets: Tensor,
    rates: Tensor,
    states: Sequence[Tensor],
    master: Tensor | None,
    most: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    unit: int,
    rule: int,
    mean: bool,
    config: UpdateConfig,
    site: int = 0,
    compile_only: bool = False,
) -> None:
    """All pieces. rates, states: as the kernel has them, on the device; rule: its code; all else as
    `StepLaunch` has it."""
    step = StepLaunch(memory, words, buckets, most, dtypes, unit, config, site, compile_only)
    none = [rates] * (3 - len(states))
    for first, items in step.pieces:
        launch(
            update_exchange, step.programs, compile_only,
            words, buckets, rates, *states, *none, rates if master is None else master,
            memory.words.addresses, memory.state,
            first, items, 1 / memory.world if mean else 1.0, memory.rank, site,
            memory.words.half(torch.uint8) // LINE.value, GRAD=KINDS[dtypes[0]], PARAM=KINDS[dtypes[1]],
            RULE=rule, MASTER=master is not None, **step.sending(), **step.settings(),
        )  # fmt: skip
