"""reduce_update_gather that clips by the norm of all gradients, in two kernels: no parameter may change
before all sums are known.

`sum_gradients` runs once a piece. Pieces, items and slices are those of `update_exchange`:

A. The first SENDERS programs store items of gradients in the inbox of their owner. The program that counts
   the last item of a slice signals the owner.
B. Programs draw tickets in the order of the items of the own run. A program waits for the slice from all
   ranks, adds in rank order in fp32, and keeps the sum and the sum of its squares.
C. The program that counts the last sum of the last piece adds up the squares, stores the result in `finished`
   of all peers, and waits for the results of the peers. It adds these in rank order and stores the norm, so
   all ranks have the same norm.

`update_parameters` then runs once a piece:

D. A ticket is for an item of the own run. A program multiplies the kept sums by the factor that follows from
   the norm, updates states and parameters, and stores the parameters in `finished` of all peers. The program
   that counts the last item of a slice signals all peers.
E. Other tickets are for items of other owners. A program waits for the slice and copies its items to the
   parameters; between two items of D, it copies what has arrived.

Parts A and D need no wait. B waits for A of the peers, C for their results, and E for D of the peers.
D may store at once: a rank that has the norm knows that all ranks have ended the launch that used this half
of `finished` before.
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
from .slices import clear, count_for_all
from .update_launch import KINDS, StepLaunch, UpdateConfig
from .update_parts import (
    FP16,
    FP32,
    LAMB,
    LENGTH,
    LINE,
    are_there,
    at,
    buckets_of,
    clip_factor,
    copy_item,
    copy_parameters,
    count_kept,
    elements_of,
    first_copy,
    hand_round,
    lanes,
    parameters_of,
    send_gradients,
    states_of,
    sum_of,
    tell_started,
    updated,
    wait_for_peers,
)

SQUARES = tl.constexpr(1024)
"""Sums of squares that a program adds up at a time."""


@triton.jit
def agree_on_norm(
    squares, norm, count, finished, signals, state, rank, site, half, first_signal, norms, epoch,
    W: tl.constexpr,
):  # fmt: skip
    """The root of the sum over all ranks of `squares`, of which each rank has `count`. norms: the counter of
    rank 0; half: where float64 values lie in `finished`."""
    lane = tl.arange(0, SQUARES)
    partial = tl.zeros((SQUARES,), tl.float64)
    for first in range(0, count, SQUARES):
        partial += tl.load(squares + first + lane, mask=first + lane < count, other=0.0)
    mine = tl.sum(partial)
    for p in tl.static_range(1, W):
        tl.store(peer(finished, (rank + p) % W, tl.float64) + half + rank, mine)
    signal_all(signals, W, first_signal + norms + rank, rank)
    arrived = peer(signals, rank, tl.int32) + first_signal + norms
    wait_for_peers(arrived, 1, state, rank, site, 0, epoch, W)
    total = tl.zeros((), tl.float64)
    for r in tl.static_range(W):
        theirs = tl.load(peer(finished, rank, tl.float64) + half + r, volatile=True)
        total += tl.where(rank == r, mine, theirs)
    tl.store(norm, tl.sqrt(total).to(tl.float32))


@triton.jit(
    do_not_specialize=[
        "first", "most", "items", "slice_items", "slices", "scale", "count", "last", "rank", "site",
        "inbox_half", "norm_half", "signals_half",
    ]
)  # fmt: skip
def sum_gradients(
    words, buckets, sums, squares, norm, inbox, finished, signals, done, state,
    first, most, items, slice_items, slices, scale, count, last, rank, site, inbox_half, norm_half,
    signals_half,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, GRAD: tl.constexpr, UNIT: tl.constexpr,
    G: tl.constexpr, SENDERS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor.

    words, buckets, first, most: as `update_exchange` has them; sums: fp32, of the elements that this rank
    owns; squares: fp64, of all items of the run, `count`; norm: fp32; last: whether this piece is the last.
    """
    grads: tl.constexpr = tl.float32 if GRAD == FP32 else (tl.float16 if GRAD == FP16 else tl.bfloat16)
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    half = half_of(epoch) * tl.cast(inbox_half, tl.int64) * LINE
    first_signal = half_of(epoch) * signals_half
    send_gradients(
        words, buckets, inbox, signals, done, state, asked, first, most, items, slice_items, slices, rank,
        half, first_signal, program, PROGRAMS, SENDERS, W, grads, UNIT, G, AHEAD,
    )  # fmt: skip
    unit = tl.full((), ENDLESS, tl.int32)
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        unit = drawn(draw(state + STATE_TICKETS))
    arrived = peer(signals, rank, tl.int32) + first_signal
    own = tl.load(inbox + rank)
    known = tl.full((), -1, tl.int32)
    kept = tl.full((), 0, tl.int32)
    counter = done + (W - 1) * slices
    word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, most, G)
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
        unit = drawn(ticket)
        word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, most, G)
        g *= scale
        if kept != 0:  # not the last one, which this program has in hand at least
            count_kept(counter)
        begun = tl.load(tensor + 2, mask=inside, other=0) * UNIT + bucket * LENGTH
        tl.store(sums + (begun[:, None] + lanes()), g, mask=mask)
        wide = g.to(tl.float64)
        tl.store(squares + first // G + item, tl.sum(wide * wide))
        kept = tl.full((), 1, tl.int32)
    if kept != 0:
        if count_kept(counter) == items - 1:
            tl.atomic_add(counter, -items, sem="acquire", scope="gpu")
            tl.debug_barrier()  # all threads read what other programs have stored
            if last != 0:
                agree_on_norm(
                    squares, norm, count, finished, signals, state, rank, site,
                    half_of(epoch) * tl.cast(norm_half, tl.int64), first_signal, W * slices, epoch, W,
                )  # fmt: skip
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        clear(peer(signals, rank, tl.int32) + first_signal, W * slices + W, 256)
        end_shares(state, epoch, PROGRAMS)


@triton.jit(
    do_not_specialize=[
        "first", "most", "items", "slice_items", "slices", "max_norm", "rank", "site", "finished_half",
        "signals_half",
    ]
)  # fmt: skip
def update_parameters(
    words, buckets, rates, sums, norm, m_of, v_of, most_of, master_of, finished, signals, done, state,
    first, most, items, slice_items, slices, max_norm, rank, site, finished_half, signals_half,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, PARAM: tl.constexpr, UNIT: tl.constexpr,
    RULE: tl.constexpr, MASTER: tl.constexpr, G: tl.constexpr,
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
    gathered = half_of(epoch) * tl.cast(finished_half, tl.int64) * LINE
    first_signal = half_of(epoch) * signals_half
    tell_started(state, asked, rank, program, PROGRAMS, W)
    unit = tl.full((), ENDLESS, tl.int32)
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        unit = drawn(draw(state + STATE_TICKETS))
    copy = first_copy(state, unit)
    handed, first_handed = done + (W - 1) * slices, first_signal + (W + rank) * slices
    arrived = peer(signals, rank, tl.int32) + first_signal
    factor = clip_factor(norm, max_norm)
    summed = tl.full((), -1, tl.int32)
    word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, most, G)
    while unit < items:
        item = unit
        ticket = draw(state + STATE_TICKETS)
        number, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
        param, place, row, p = parameters_of(tensor, bucket, inside, mask, master_of, params, UNIT, MASTER)
        g = tl.load(sums + place, mask=mask, other=0.0)
        m, v, greatest = states_of(m_of, v_of, most_of, place, mask, RULE)
        unit = drawn(ticket)
        word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, most, G)
        there = are_there(arrived, copy, items, slice_items, slices, rank, W)
        if RULE == LAMB:
            p -= tl.load(rates + number, mask=inside, other=0.0)[:, None] * g
        else:
            p = updated(p, g, m, v, greatest, rates, row, factor, m_of, v_of, most_of, place, mask, RULE)
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

    squares: fp64, at least `squares_of` of them; sums: fp32, of the elements that this rank owns. All else is
    as `launch_update_exchange` takes it.
    """
    step = StepLaunch(memory, words, buckets, most, dtypes, unit, config, site, compile_only)
    launch_sums(step, squares, sums, mean, clipping)
    launch_parameters(step, rates, sums, clipping.norm, states, master, rule, clipping.max_norm)


def launch_sums(step: StepLaunch, squares: Tensor, sums: Tensor, mean: bool, clipping: Clipping) -> None:
    """The sums and their norm, which is then checked."""
    memory, grad, pieces = step.memory, step.dtypes[0], step.pieces
    count = squares_of(step.config, step.most, memory.world)
    for first, items in pieces:
        launch(
            sum_gradients, step.programs, step.compile_only,
            step.words, step.buckets, sums, squares, clipping.norm, memory.inbox.addresses,
            memory.finished.addresses, memory.signals.addresses, memory.done, memory.state,
            *step.sizes(first, items), 1 / memory.world if mean else 1.0, count,
            int(first == pieces[-1][0]), memory.rank, step.site, memory.inbox.half(grad) // LINE.value,
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
            memory.finished.addresses, memory.signals.addresses, memory.done, memory.state,
            *step.sizes(first, items), max_norm, memory.rank, step.site,
            memory.finished.half(param) // LINE.value, memory.signals.half(torch.int32),
            PARAM=KINDS[param], RULE=rule, MASTER=master is not None, **step.settings(),
        )  # fmt: skip


def squares_of(config: UpdateConfig, most: int, world: int) -> int:
    """Items of the longest run, each of which has a sum of squares."""
    return sum(items for _, items in config.pieces(most, world))
