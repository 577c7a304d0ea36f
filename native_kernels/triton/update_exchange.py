"""reduce_update_gather: one persistent kernel that sums gradients, updates parameters and hands them round.

The elements of all tensors are cut into buckets of at most 1024 (`lowering.buckets`); each rank owns a run of
them. A launch exchanges a piece: the same number of buckets of every run, one after another. An item is G
buckets of one run, a slice some items. Behind the end of a run items are empty, but counted, so that every
rank hears from every other one in each call.

A. The first SENDERS programs store items of gradients in the inbox of their owner, MOVED at once. The program
   that counts the last item of a slice signals the owner.
B. Tickets, in the order of the items of the own run: wait for the slice from all ranks, add in rank order in
   fp32, update states and parameters, and store the parameters in `finished` of all peers. The last item of a
   slice signals all.
C. Tickets of their own, in the order of the items of all peers: wait for a slice of an owner, and copy MOVED
   of its items to the parameters. Between two items of B a program copies what has arrived.

    senders      A0 A1 A2 A3 ...  A12 A13 A14 A15   then as the others
    others       B0   B1   B2  C0   B3   B4   B5   C1  ...

A waits for no peer, B for A of the peers, C for B. No rank stores to parameters of another one. A keeps some
items ahead of B (`wait_for_sums`), so that links and memory are busy at the same time, and an item is still
in the L2 cache when it is summed, or copied.

A rank has two halves each of the inbox and `finished`, [W, buckets of a piece, 1024], and of the counters
[2 * W, slices]: gradients, then parameters, by their source.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import PeerMemory, launch

from .comm import STATE_TICKETS, begin, draw, drawn, half_of, is_last, peer
from .embedding_exchange import ENDLESS
from .patience import any_thread
from .shares import A, claim, end_shares, multiprocessor, start, stays
from .slices import clear, count_for_all
from .update_launch import KINDS, StepLaunch, UpdateConfig
from .update_parts import (
    FP16,
    FP32,
    LENGTH,
    LINE,
    are_there,
    at,
    buckets_of,
    copy_item,
    copy_parameters,
    elements_of,
    first_copy,
    hand_round,
    parameters_of,
    send_gradients,
    states_of,
    sum_of,
    updated,
    wait_for_peers,
)


@triton.jit(
    do_not_specialize=[
        "first", "most", "items", "slice_items", "slices", "scale", "rank", "site", "inbox_half",
        "finished_half", "signals_half",
    ]
)  # fmt: skip
def update_exchange(
    words, buckets, rates, m_of, v_of, most_of, master_of, inbox, finished, signals, done, state,
    first, most, items, slice_items, slices, scale, rank, site, inbox_half, finished_half, signals_half,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, GRAD: tl.constexpr, PARAM: tl.constexpr,
    UNIT: tl.constexpr, RULE: tl.constexpr, MASTER: tl.constexpr, G: tl.constexpr,
    SENDERS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor.

    words: int64, where the run of each rank begins in `buckets`, W + 1 words, then FIELDS of each tensor;
    rates: fp32 [rows, NUMBERS]; m_of, v_of, most_of, master_of: fp32 states; first, most: the buckets of each
    run in this piece; most is a multiple of G.
    """
    grads: tl.constexpr = tl.float32 if GRAD == FP32 else (tl.float16 if GRAD == FP16 else tl.bfloat16)
    params: tl.constexpr = tl.float32 if PARAM == FP32 else (tl.float16 if PARAM == FP16 else tl.bfloat16)
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    half = half_of(epoch) * tl.cast(inbox_half, tl.int64) * LINE
    gathered = half_of(epoch) * tl.cast(finished_half, tl.int64) * LINE
    first_signal = half_of(epoch) * signals_half
    send_gradients(
        words, buckets, inbox, signals, done, state, asked, first, most, items, slice_items, slices, rank,
        half, first_signal, program, PROGRAMS, SENDERS, W, grads, UNIT, G, AHEAD,
    )  # fmt: skip
    unit = tl.full((), ENDLESS, tl.int32)
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        unit = drawn(draw(state + STATE_TICKETS))
    handed, first_handed = done + (W - 1) * slices, first_signal + (W + rank) * slices
    arrived = peer(signals, rank, tl.int32) + first_signal
    own = tl.load(inbox + rank)
    known = tl.full((), -1, tl.int32)
    summed = tl.full((), -1, tl.int32)
    word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, most, G)
    copy = first_copy(state, unit)
    while unit < items:
        item = unit
        ticket = draw(state + STATE_TICKETS)
        piece = item // slice_items
        if piece != known:
            wait_for_peers(arrived + piece, slices, state, rank, site, piece, epoch, W)
            known = piece
        _, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
        mine = at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, grads)
        g = sum_of(own, half, mine, mask, item, most, rank, W, grads, G)
        param, place, row, p = parameters_of(tensor, bucket, inside, mask, master_of, params, UNIT, MASTER)
        m, v, greatest = states_of(m_of, v_of, most_of, place, mask, RULE)
        unit = drawn(ticket)
        word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, most, G)
        there = are_there(arrived, copy, items, slice_items, slices, rank, W)
        p = updated(p, g, m, v, greatest, rates, row, scale, m_of, v_of, most_of, place, mask, RULE)
        if MASTER:
            tl.store(master_of + place, p, mask=mask)
        if summed >= 0:
            count_for_all(handed, signals, summed, items, slice_items, rank, first_handed, W)
        hand_round(p.to(params), param, mask, item, finished, gathered, rank, most, W, params, G)
        summed = item
        if any_thread(there):
            copy = copy_item(
                words, buckets, finished, arrived, state, copy, first, most, slice_items, slices, rank, site,
                gathered, epoch, W, params, UNIT, G,
            )  # fmt: skip
    if summed >= 0:  # before it waits for what peers send after they have this
        count_for_all(handed, signals, summed, items, slice_items, rank, first_handed, W)
    copy_parameters(
        words, buckets, finished, arrived, state, copy, first, most, items, slice_items, slices, rank, site,
        gathered, epoch, W, params, UNIT, G,
    )  # fmt: skip
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        clear(peer(signals, rank, tl.int32) + first_signal, 2 * W * slices, 256)
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
            memory.inbox.addresses, memory.finished.addresses, memory.signals.addresses, memory.done,
            memory.state,
            *step.sizes(first, items), 1 / memory.world if mean else 1.0, memory.rank, site,
            memory.inbox.half(dtypes[0]) // LINE.value, memory.finished.half(dtypes[1]) // LINE.value,
            memory.signals.half(torch.int32), GRAD=KINDS[dtypes[0]], PARAM=KINDS[dtypes[1]], RULE=rule,
            MASTER=master is not None, **step.sending(), **step.settings(),
        )  # fmt: skip
