"""reduce_update_gather that clips by the norm of all gradients, in two kernels: no parameter may change
before all sums are known.

`sum_gradients` runs once a piece. Pieces, items and words are those of `update_exchange`:

A. The first SENDERS programs send items of gradients to their owner.
B. Programs draw tickets in the order of the items of the own run. A program takes the words of all ranks,
   adds in rank order in fp32, and keeps the sum and the sum of its squares.
C. The program that counts the last sum of the last piece adds up the squares, stores the result in `finished`
   of all peers, signals them, and waits for the results of the peers. It adds these in rank order and stores
   the norm, so all ranks have the same norm.

`update_parameters` then runs once a piece:

D. A ticket is for an item of the own run. A program multiplies the kept sums by the factor that follows from
   the norm, updates states and parameters, and sends the parameters to all peers.
E. Other tickets are for items of other owners. A program takes the words of an item and stores them to the
   parameters; between two items of D, it copies what has arrived.

Parts A and D need no wait. B waits for A of the peers, C for their results, and E for D of the peers.
D may send at once: a rank that has the norm knows that all ranks have ended the launch that used this half
of the words before.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import PeerMemory, launch

from .comm import STATE_TICKETS, begin, draw, drawn, half_of, is_last, peer, signal_all
from .embedding_exchange import ENDLESS
from .patience import any_thread
from .shares import A, claim, end_shares, multiprocessor, start, stays
from .slices import clear
from .update_launch import KINDS, StepLaunch, UpdateConfig
from .update_moves import (
    are_there,
    copy_item,
    copy_parameters,
    count_kept,
    first_copy,
    hand_round,
    send_gradients,
    sent_of,
    sum_of,
    tell_started,
    wait_for_peers,
)
from .update_parts import (
    FP16,
    FP32,
    LAMB,
    LENGTH,
    at,
    buckets_of,
    clip_factor,
    elements_of,
    lanes,
    parameters_of,
    states_of,
    updated,
)
from .words import LINE

SQUARES = tl.constexpr(1024)
"""Sums of squares that a program adds up at a time."""


@triton.jit
def agree_on_norm(
    squares, norm, count, finished, signals, state, rank, site, half, first_signal, epoch, W: tl.constexpr
):
    """The root of the sum over all ranks of `squares`, of which each rank has `count`. half: where float64
    values lie in `finished`; first_signal: the counter of rank 0."""
    lane = tl.arange(0, SQUARES)
    partial = tl.zeros((SQUARES,), tl.float64)
    for first in range(0, count, SQUARES):
        partial += tl.load(squares + first + lane, mask=first + lane < count, other=0.0)
    mine = tl.sum(partial)
    for p in tl.static_range(1, W):
        tl.store(peer(finished, (rank + p) % W, tl.float64) + half + rank, mine)
    signal_all(signals, W, first_signal + rank, rank)
    wait_for_peers(peer(signals, rank, tl.int32) + first_signal, state, rank, site, epoch, W)
    total = tl.zeros((), tl.float64)
    for r in tl.static_range(W):
        theirs = tl.load(peer(finished, rank, tl.float64) + half + r, volatile=True)
        total += tl.where(rank == r, mine, theirs)
    tl.store(norm, tl.sqrt(total).to(tl.float32))


@triton.jit(
    do_not_specialize=[
        "first", "items", "scale", "count", "last", "rank", "site", "inbox_half", "norm_half",
        "signals_half",
    ]
)  # fmt: skip
def sum_gradients(
    words, buckets, sums, squares, norm, inboxes, finished, signals, done, state,
    first, items, scale, count, last, rank, site, inbox_half, norm_half, signals_half,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, GRAD: tl.constexpr, UNIT: tl.constexpr,
    SENDERS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor.

    words, buckets, inboxes, first, items: as `update_exchange` has them; sums: fp32, of the elements that
    this rank owns; squares: fp64, of all items of the run, `count`; norm: fp32; last: whether this piece is
    the last.
    """
    grads: tl.constexpr = tl.float32 if GRAD == FP32 else (tl.float16 if GRAD == FP16 else tl.bfloat16)
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    half = half_of(epoch) * tl.cast(inbox_half, tl.int64) * LINE
    send_gradients(
        words, buckets, inboxes, state, asked, first, items, rank, half, program, PROGRAMS, SENDERS, W, grads,
        UNIT, AHEAD,
    )  # fmt: skip
    unit = tl.full((), ENDLESS, tl.int32)
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        unit = drawn(draw(state + STATE_TICKETS))
    kept = tl.full((), 0, tl.int32)
    word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, items, 1)
    while unit < items:
        item = unit
        ticket = draw(state + STATE_TICKETS)
        _, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
        mine = at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, grads)
        g, mask, _ = sum_of(inboxes, half, mine, mask, item, items, state, rank, site, epoch, W, grads)
        unit = drawn(ticket)
        word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, items, 1)
        g *= scale
        if kept != 0:  # not the last one, which this program has in hand at least
            count_kept(done)
        begun = tl.load(tensor + 2, mask=inside, other=0) * UNIT + bucket * LENGTH
        tl.store(sums + (begun[:, None] + lanes()), g, mask=mask)
        wide = g.to(tl.float64)
        tl.store(squares + first + item, tl.sum(wide * wide))
        kept = tl.full((), 1, tl.int32)
    first_signal = half_of(epoch) * signals_half
    if kept != 0:
        if count_kept(done) == items - 1:
            tl.atomic_add(done, -items, sem="acquire", scope="gpu")
            tl.debug_barrier()  # all threads read what other programs have stored
            if last != 0:
                agree_on_norm(
                    squares, norm, count, finished, signals, state, rank, site,
                    half_of(epoch) * tl.cast(norm_half, tl.int64), first_signal, epoch, W,
                )  # fmt: skip
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        clear(peer(signals, rank, tl.int32) + first_signal, W, 32)
        end_shares(state, epoch, PROGRAMS)


@triton.jit(
    do_not_specialize=["first", "items", "max_norm", "rank", "site", "inbox_half"]
)  # fmt: skip
def update_parameters(
    words, buckets, rates, sums, norm, m_of, v_of, most_of, master_of, inboxes, state,
    first, items, max_norm, rank, site, inbox_half,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, PARAM: tl.constexpr, UNIT: tl.constexpr,
    RULE: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor.

    sums, norm: as `sum_gradients` has stored them; max_norm: 0 clips nothing; all else as `update_exchange`
    has it. LAMB: sums, rates: the directions and the steps that `measure_updates` has stored.
    """
    params: tl.constexpr = tl.float32 if PARAM == FP32 else (tl.float16 if PARAM == FP16 else tl.bfloat16)
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    half = half_of(epoch) * tl.cast(inbox_half, tl.int64) * LINE
    tell_started(state, asked, rank, program, PROGRAMS, W)
    unit = tl.full((), ENDLESS, tl.int32)
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        unit = drawn(draw(state + STATE_TICKETS))
    copy = first_copy(state, unit)
    factor = clip_factor(norm, max_norm)
    word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, items, 1)
    while unit < items:
        item = unit
        ticket = draw(state + STATE_TICKETS)
        number, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
        param, place, row, p = parameters_of(tensor, bucket, inside, mask, master_of, params, UNIT, MASTER)
        g = tl.load(sums + place, mask=mask, other=0.0)
        m, v, greatest = states_of(m_of, v_of, most_of, place, mask, RULE)
        unit = drawn(ticket)
        word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, items, 1)
        there = are_there(inboxes, half, copy, items, rank, W, params)
        if RULE == LAMB:
            p -= tl.load(rates + number, mask=inside, other=0.0)[:, None] * g
        else:
            p = updated(p, g, m, v, greatest, rates, row, factor, m_of, v_of, most_of, place, mask, RULE)
        if MASTER:
            tl.store(master_of + place, p, mask=mask)
        sent = sent_of(mask, item, items, 1)
        hand_round(p.to(params), param, mask, sent, item, inboxes, half, rank, items, W, params)
        if any_thread(there):
            copy = copy_item(
                words, buckets, inboxes, state, copy, first, items, rank, site, half, epoch, W, params, UNIT
            )
    copy_parameters(
        words, buckets, inboxes, state, copy, first, items, rank, site, half, epoch, W, params, UNIT
    )
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        end_shares(state, epoch, PROGRAMS)


class Clipping(NamedTuple):
    """What a step has that clips, or checks the norm of all gradients. norm: fp32, where it is stored;
    max_norm: 0 clips nothing; check: called once the norm is there, before any parameter changes; it may
    raise."""

    norm: Tensor
    max_norm: float
    check: Callable[[], None]


def launch_clipped_update(
    memory: PeerMemory,
    words: Tensor,
    buckets: Tensor,
    rates: Tensor,
    states: Sequence[Tensor],
    master: Tensor | None,
    squares: Tensor,
    sums: Tensor,
    most: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    unit: int,
    rule: int,
    mean: bool,
    clipping: Clipping,
    config: UpdateConfig,
    site: int = 0,
    compile_only: bool = False,
) -> None:
    """All pieces of both kernels.

    squares: fp64, one for each bucket of the longest run; sums: fp32, of the elements that this rank owns.
    All else is as `launch_update_exchange` takes it.
    """
    step = StepLaunch(memory, words, buckets, most, dtypes, unit, config, site, compile_only)
    launch_sums(step, squares, sums, mean, clipping)
    launch_parameters(step, rates, sums, clipping.norm, states, master, rule, clipping.max_norm)


def launch_sums(step: StepLaunch, squares: Tensor, sums: Tensor, mean: bool, clipping: Clipping) -> None:
    """The sums and their norm, which is then checked."""
    memory, grad, pieces = step.memory, step.dtypes[0], step.pieces
    for first, items in pieces:
        launch(
            sum_gradients, step.programs, step.compile_only,
            step.words, step.buckets, sums, squares, clipping.norm, memory.words.addresses,
            memory.finished.addresses, memory.signals.addresses, memory.done, memory.state,
            first, items, 1 / memory.world if mean else 1.0, max(step.most, 1),
            int(first == pieces[-1][0]), memory.rank, step.site, memory.words.half(torch.uint8) // LINE.value,
            memory.finished.half(torch.float64), memory.signals.half(torch.int32), GRAD=KINDS[grad],
            **step.sending(), **step.settings(),
        )  # fmt: skip
    if not step.compile_only:
        clipping.check()


def launch_parameters(
    step: StepLaunch, rates: Tensor, sums: Tensor, norm: Tensor, states: Sequence[Tensor],
    master: Tensor | None, rule: int, max_norm: float,
) -> None:  # fmt: skip
    memory, param = step.memory, step.dtypes[1]
    none = [rates] * (3 - len(states))
    for first, items in step.pieces:
        launch(
            update_parameters, step.programs, step.compile_only,
            step.words, step.buckets, rates, sums, norm, *states, *none, rates if master is None else master,
            memory.words.addresses, memory.state,
            first, items, max_norm, memory.rank, step.site,
            memory.words.half(torch.uint8) // LINE.value, PARAM=KINDS[param], RULE=rule,
            MASTER=master is not None, **step.settings(),
        )  # fmt: skip
