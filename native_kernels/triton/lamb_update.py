"""reduce_update_gather by LAMB, in two kernels: the step of a tensor depends on two norms of all of it, that
of the parameter and that of the direction u.

`measure_updates` runs once a piece. Pieces, items and words are those of `update_exchange`:

A. The first SENDERS programs send items of gradients to their owner.
B. Tickets, in the order of the items of the own run. A program takes the words of all ranks, adds in rank
   order in fp32, updates the states, and keeps u, and for each bucket the sums of the squares of the
   parameter and of u.
C. In the last piece, later tickets are for the tensors of the own run. A program waits until this rank has
   counted all items, adds up the sums of the tensor's buckets, and stores the step of the tensor. Only the
   first and the last tensor of a run may have other owners. A program stores sums of such a tensor in
   `finished` of all ranks. The program that counts the last tensor signals all peers, waits for them, adds
   the sums of all owners in rank order, and stores the step. So all owners have the same step.

`update_parameters` of `clipped_update` then subtracts the product of step and u, and hands the parameters
round.

A step that clips has `sum_gradients` of `clipped_update` before that. `measure_updates` then runs once, for
the whole run: it reads the kept sums, and has no part A.

Part A needs no wait. B waits for A of the peers, C for B of this rank and for C of the peers.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import PeerMemory, launch

from .clipped_update import SQUARES, Clipping, launch_parameters, launch_sums
from .comm import (
    CODES_PER_SITE,
    REDUCING,
    STATE_TICKETS,
    begin,
    draw,
    drawn,
    half_of,
    is_last,
    peer,
    signal_all,
    wait_all,
)
from .embedding_exchange import ENDLESS
from .lamb_parts import direction_of, span_of, step_of
from .shares import A, claim, end_shares, multiprocessor, start, stays
from .slices import clear
from .update_launch import KINDS, StepLaunch, UpdateConfig
from .update_moves import count_kept, send_gradients, sum_of, tell_started, wait_for_peers
from .update_parts import (
    FP16,
    FP32,
    LAMB,
    LENGTH,
    TENSOR_BIT,
    at,
    buckets_of,
    clip_factor,
    elements_of,
    lanes,
    ratio,
)
from .words import LINE

EDGE = tl.constexpr(2)
"""Sums of an edge, which is a tensor that a run begins or ends in: of squares of the parameter and of u."""


@triton.jit
def run_of(words, buckets, rank):
    """The first tensor that a rank owns a bucket of, and how many there are: tensor 0, and 1, without any."""
    begun, end = tl.load(words + rank), tl.load(words + rank + 1)
    first = tl.load(buckets + begun, mask=begun < end, other=0) >> TENSOR_BIT
    last = tl.load(buckets + end - 1, mask=begun < end, other=0) >> TENSOR_BIT
    return first.to(tl.int32), (last - first + 1).to(tl.int32)


@triton.jit
def is_edge(words, begun, end, rank):
    """Whether other ranks own buckets of a tensor of this rank, which has buckets `[begun, end)`."""
    return (begun < tl.load(words + rank)) | (end > tl.load(words + rank + 1))


@triton.jit
def edge_at(finished, half, words, begun, owner, rank):
    """Where `rank` finds the sums of `owner` for an edge that begins with bucket `begun`."""
    is_later = (begun > tl.load(words + owner)).to(tl.int32)  # the run ends in it
    return peer(finished, rank, tl.float64) + half + (2 * owner + is_later) * EDGE


@triton.jit
def sums_of_buckets(squares, first, end, count):
    """Of squares of the parameter and of u, of buckets `[first, end)` of the run."""
    lane = tl.arange(0, SQUARES)
    of_p = tl.zeros((SQUARES,), tl.float64)
    of_u = tl.zeros((SQUARES,), tl.float64)
    for bucket in range(first, end, SQUARES):
        mask = bucket + lane < end
        of_p += tl.load(squares + bucket + lane, mask=mask, other=0.0)
        of_u += tl.load(squares + count + bucket + lane, mask=mask, other=0.0)
    return tl.sum(of_p), tl.sum(of_u)


@triton.jit
def agree_on_steps(
    words, buckets, rates, squares, steps, finished, signals, counters, state, unit, items, count, rank, site,
    half, first_signal, epoch,
    W: tl.constexpr,
):  # fmt: skip
    """Part C. unit: the first ticket behind the items, which this program has drawn; counters: of items and
    of tensors; first_signal: of the signals of this part."""
    first, tensors = run_of(words, buckets, rank)
    run, run_end = tl.load(words + rank), tl.load(words + rank + 1)
    counted = tl.full((), -1, tl.int32)
    while unit < items + tensors:
        number = first + unit - items
        ticket = draw(state + STATE_TICKETS)
        if counted < 0:
            code = site * CODES_PER_SITE + REDUCING
            wait_all(counters, 0, 1, items, state, code, rank, 0, epoch)
        begun, end = span_of(words, buckets, number, W)
        of_p, of_u = sums_of_buckets(
            squares, tl.maximum(begun, run) - run, tl.minimum(end, run_end) - run, count
        )
        if is_edge(words, begun, end, rank):
            for r in tl.static_range(W):
                to = edge_at(finished, half, words, begun, rank, r)
                tl.store(to, of_p)
                tl.store(to + 1, of_u)
        else:
            tl.store(steps + number, step_of(words, rates, number, of_p, of_u, W))
        counted = count_kept(counters + 1)
        unit = drawn(ticket)
    if counted == tensors - 1:
        tl.atomic_add(counters + 1, -tensors, sem="acquire", scope="gpu")
        signal_all(signals, W, first_signal + rank, rank)
        wait_for_peers(peer(signals, rank, tl.int32) + first_signal, state, rank, site, epoch, W)
        for edge in tl.static_range(2):
            number = first + edge * (tensors - 1)
            begun, end = span_of(words, buckets, number, W)
            if is_edge(words, begun, end, rank):
                of_p = tl.zeros((), tl.float64)
                of_u = tl.zeros((), tl.float64)
                for r in tl.static_range(W):
                    owns = tl.maximum(begun, tl.load(words + r)) < tl.minimum(end, tl.load(words + r + 1))
                    there = edge_at(finished, half, words, begun, r, rank)
                    of_p += tl.where(owns, tl.load(there, volatile=True), 0.0)
                    of_u += tl.where(owns, tl.load(there + 1, volatile=True), 0.0)
                tl.store(steps + number, step_of(words, rates, number, of_p, of_u, W))


@triton.jit(
    do_not_specialize=[
        "first", "items", "scale", "max_norm", "count", "last", "rank", "site", "inbox_half",
        "edges_half", "signals_half",
    ]
)  # fmt: skip
def measure_updates(
    words, buckets, rates, sums, norm, squares, steps, m_of, v_of, master_of, inboxes, finished, signals,
    done, state,
    first, items, scale, max_norm, count, last, rank, site, inbox_half, edges_half, signals_half,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, GRAD: tl.constexpr, PARAM: tl.constexpr,
    UNIT: tl.constexpr, MASTER: tl.constexpr, SUMMED: tl.constexpr,
    SENDERS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor.

    buckets: behind the word of the last bucket, the number of the first bucket of each tensor, and of all
    buckets; sums: fp32, of the elements that this rank owns, where u goes; squares: fp64 [2, count]; steps:
    fp32, of all tensors; last: whether this piece is the last; SUMMED: sums and norm are what `sum_gradients`
    has stored, and there is one piece. All else is as `update_exchange` has it.
    """
    grads: tl.constexpr = tl.float32 if GRAD == FP32 else (tl.float16 if GRAD == FP16 else tl.bfloat16)
    params: tl.constexpr = tl.float32 if PARAM == FP32 else (tl.float16 if PARAM == FP16 else tl.bfloat16)
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    half = half_of(epoch) * tl.cast(inbox_half, tl.int64) * LINE
    first_signal = half_of(epoch) * signals_half
    if SUMMED:
        tell_started(state, asked, rank, program, PROGRAMS, W)
    else:
        send_gradients(
            words, buckets, inboxes, state, asked, first, items, rank, half, program, PROGRAMS, SENDERS, W,
            grads, UNIT, AHEAD,
        )  # fmt: skip
    unit = tl.full((), ENDLESS, tl.int32)
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        unit = drawn(draw(state + STATE_TICKETS))
    factor = scale
    if SUMMED:
        factor = clip_factor(norm, max_norm)
    kept = tl.full((), 0, tl.int32)
    word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, items, 1)
    while unit < items:
        item = unit
        ticket = draw(state + STATE_TICKETS)
        _, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
        begun = tl.load(tensor + 2, mask=inside, other=0) * UNIT + bucket * LENGTH
        place = begun[:, None] + lanes()
        row = tl.load(tensor + 4, mask=inside, other=0)
        if MASTER:
            p = tl.load(master_of + place, mask=mask, other=0.0)
        else:
            param = at(tl.load(tensor + 1, mask=inside, other=0), bucket * LENGTH, params)
            p = tl.load(param, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(m_of + place, mask=mask, other=0.0)
        v = tl.load(v_of + place, mask=mask, other=0.0)
        if SUMMED:
            g = tl.load(sums + place, mask=mask, other=0.0)
        else:
            mine = at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, grads)
            g, mask, _ = sum_of(inboxes, half, mine, mask, item, items, state, rank, site, epoch, W, grads)
        g *= factor * ratio(rates, row, 10)
        unit = drawn(ticket)
        word = buckets_of(words, buckets, rank, tl.minimum(unit, items), first, items, 1)
        if kept != 0:  # not the last one, which this program has in hand at least
            count_kept(done)
        u = direction_of(p, g, m, v, rates, row, m_of, v_of, place, mask)
        tl.store(sums + place, u, mask=mask)
        number = first + item + tl.arange(0, 1)
        wide = p.to(tl.float64)
        tl.store(squares + number, tl.sum(wide * wide, axis=1))
        wide = tl.where(mask, u, 0.0).to(tl.float64)  # 0 / 0 where nothing is, if eps is 0
        tl.store(squares + count + number, tl.sum(wide * wide, axis=1))
        kept = tl.full((), 1, tl.int32)
    if kept != 0:
        count_kept(done)
    if last != 0:
        agree_on_steps(
            words, buckets, rates, squares, steps, finished, signals, done, state, unit, items, count, rank,
            site, half_of(epoch) * tl.cast(edges_half, tl.int64), first_signal, epoch, W,
        )  # fmt: skip
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        tl.store(done, 0)
        clear(peer(signals, rank, tl.int32) + first_signal, W, 32)
        end_shares(state, epoch, PROGRAMS)


def launch_lamb_update(
    memory: PeerMemory,
    words: Tensor,
    buckets: Tensor,
    rates: Tensor,
    states: Sequence[Tensor],
    master: Tensor | None,
    squares: Tensor,
    sums: Tensor,
    steps: Tensor,
    most: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    unit: int,
    mean: bool,
    clipping: Clipping | None,
    config: UpdateConfig,
    site: int = 0,
    compile_only: bool = False,
) -> None:
    """All pieces of all kernels.

    squares: fp64, two for each bucket of the longest run; sums: fp32, of the elements that this rank owns;
    steps: fp32, of all tensors. All else is as `launch_update_exchange` takes it.
    """
    step = StepLaunch(memory, words, buckets, most, dtypes, unit, config, site, compile_only)
    count, norm, max_norm, pieces = max(most, 1), steps, 0.0, step.pieces
    if clipping is not None:
        norm, max_norm = clipping.norm, clipping.max_norm
        launch_sums(step, squares, sums, mean, clipping)
        pieces = [(0, count)]
    for piece in pieces:
        launch(
            measure_updates, step.programs, compile_only,
            words, buckets, rates, sums, norm, squares, steps, *states, rates if master is None else master,
            memory.words.addresses, memory.finished.addresses, memory.signals.addresses, memory.done,
            memory.state,
            *piece, 1 / memory.world if mean else 1.0, max_norm, count, int(piece == pieces[-1]), memory.rank,
            site, memory.words.half(torch.uint8) // LINE.value, memory.finished.half(torch.float64),
            memory.signals.half(torch.int32), GRAD=KINDS[dtypes[0]], PARAM=KINDS[dtypes[1]],
            MASTER=master is not None, SUMMED=clipping is not None, **step.sending(),
            **step.settings(),
        )  # fmt: skip
    launch_parameters(step, steps, sums, steps, (), master, LAMB.value, 0.0)
