"""reduce_update_gather that clips by the norm of all gradients, in two kernels: no parameter may change
before all sums are known.

`sum_gradients` runs once a piece. Pieces, items and slices are those of `update_exchange`:

A. A program stores items of its gradients in the inbox of their owner. The program that counts the last item
   of a slice signals the owner.
B. Programs draw tickets in the order of the items of the own run. A program waits for the slice from all
   ranks, adds in rank order in fp32, and keeps the sum and the sum of its squares.
C. The program that counts the last sum of the last piece adds up the squares, stores the result in `finished`
   of all peers, and waits for the results of the peers. It adds these in rank order and stores the norm, so
   all ranks have the same norm.

`update_parameters` then runs once a piece:

D. A ticket is for an item of the own run. A program multiplies the kept sums by the factor that follows from
   the norm, updates states and parameters, and stores the parameters in `finished` of all peers. The program
   that counts the last item of a slice signals all peers.
E. Later tickets are for slices of other owners. A program waits for the slice and copies its items to the
   parameters.

Parts A and D need no wait. B waits for A of the peers, C for their results, and E for D of the peers.
D may store at once: a rank that has the norm knows that all ranks have ended the launch that used this half
of `finished` before.
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import PeerMemory, cdiv, launch

from .comm import (
    CODES_PER_SITE,
    COPYING,
    REDUCING,
    STATE_TICKETS,
    begin,
    half_of,
    is_last,
    peer,
    signal_all,
    wait_all,
)
from .embedding_exchange import clear, count_item
from .shares import (
    STATE_STARTED,
    A,
    announce,
    claim,
    end_shares,
    first_share,
    further,
    look,
    multiprocessor,
    start,
    stays,
)
from .update_exchange import (
    AMSGRAD,
    BUCKET_MASK,
    FIELDS,
    FP16,
    FP32,
    KINDS,
    LENGTH,
    LINE,
    MOMENTUM,
    TENSOR_BIT,
    UpdateConfig,
    at,
    buckets_of,
    count_sums,
    lengths_of,
    ratio,
    slots,
)

SQUARES = tl.constexpr(1024)
"""Sums of squares that the last program adds up at a time."""


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
    code = site * CODES_PER_SITE + REDUCING
    wait_all(arrived, 1, rank, 1, state, code, 0, 0, epoch)
    wait_all(arrived + rank + 1, 1, W - 1 - rank, 1, state, code, rank + 1, 0, epoch)
    total = tl.zeros((), tl.float64)
    for r in tl.static_range(W):
        theirs = tl.load(peer(finished, rank, tl.float64) + half + r, volatile=True)
        total += tl.where(rank == r, mine, theirs)
    tl.store(norm, tl.sqrt(total).to(tl.float32))


@triton.jit
def count_sum(word):
    """Count an item whose sum is kept; how many there were."""
    tl.debug_barrier()
    return tl.atomic_add(word, 1, sem="release", scope="gpu")


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
    G: tl.constexpr,
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
    tensors = words + W + 1
    lane = tl.arange(0, LENGTH)[None, :]
    share = first_share(asked, state, A, PROGRAMS, program, PROGRAMS)
    while share >= 0:
        if share == 0:
            announce(state, rank, W, begin(state))
        pushed = tl.full((), -1, tl.int32)
        for unit in range(share, (W - 1) * items, PROGRAMS):
            step, item = unit // items, unit % items
            owner = (rank + 1 + step) % W
            word, inside = buckets_of(words, buckets, owner, item, first, most, W, G)
            tensor, bucket = tensors + (word >> TENSOR_BIT) * FIELDS, word & BUCKET_MASK
            mask = lane < lengths_of(tensor, bucket, inside, UNIT)[:, None]
            given = at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, grads)
            values = tl.load(given, mask=mask, other=0.0)
            # The stores of the item before have arrived by now, so that counting it does not wait.
            if pushed >= 0:
                count_item(done, signals, pushed, slices, slice_items, items, 1, rank, first_signal, W)
            tl.store(slots(tl.load(inbox + owner), half, rank, item, most, grads, G), values, mask=mask)
            pushed = step * slices + item // slice_items
        if pushed >= 0:
            count_item(done, signals, pushed, slices, slice_items, items, 1, rank, first_signal, W)
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, PROGRAMS, program)
    unit = tl.cast(items, tl.int32)
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        unit = tl.atomic_add(state + STATE_TICKETS, 1).to(tl.int32)
    arrived = peer(signals, rank, tl.int32) + first_signal
    own = tl.load(inbox + rank)
    code = site * CODES_PER_SITE + REDUCING
    known = tl.full((), -1, tl.int32)
    kept = tl.full((), 0, tl.int32)
    counter = done + (W - 1) * slices
    while unit < items:
        item = unit
        unit = tl.atomic_add(state + STATE_TICKETS, 1).to(tl.int32)
        piece = item // slice_items
        if piece != known:
            wait_all(arrived + piece, slices, rank, 1, state, code, 0, piece, epoch)
            others = W - 1 - rank
            wait_all(
                arrived + (rank + 1) * slices + piece, slices, others, 1, state, code, rank + 1, piece, epoch
            )
            known = piece
        word, inside = buckets_of(words, buckets, rank, item, first, most, W, G)
        tensor, bucket = tensors + (word >> TENSOR_BIT) * FIELDS, word & BUCKET_MASK
        mask = lane < lengths_of(tensor, bucket, inside, UNIT)[:, None]
        mine = at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, grads)
        g = tl.zeros((G, LENGTH), tl.float32)
        for r in tl.range(0, W, loop_unroll_factor=2):
            theirs = slots(own, half, r, item, most, grads, G)
            g += tl.load(tl.where(r == rank, mine, theirs), mask=mask, other=0.0).to(tl.float32)
        g *= scale
        if kept != 0:  # not the last one, which this program has in hand at least
            count_sum(counter)
        begun = tl.load(tensor + 2, mask=inside, other=0) * UNIT + bucket * LENGTH
        tl.store(sums + (begun[:, None] + lane), g, mask=mask)
        wide = g.to(tl.float64)
        tl.store(squares + first // G + item, tl.sum(wide * wide))
        kept = tl.full((), 1, tl.int32)
    if kept != 0:
        if count_sum(counter) == items - 1:
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
    has it.
    """
    params: tl.constexpr = tl.float32 if PARAM == FP32 else (tl.float16 if PARAM == FP16 else tl.bfloat16)
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    gathered = half_of(epoch) * tl.cast(finished_half, tl.int64) * LINE
    first_signal = half_of(epoch) * signals_half
    tensors = words + W + 1
    lane = tl.arange(0, LENGTH)[None, :]
    share = first_share(asked, state, A, PROGRAMS, program, PROGRAMS)
    while share >= 0:  # a share is nothing but to tell that this rank has started
        if share == 0:
            announce(state, rank, W, begin(state))
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, PROGRAMS, program)
    units = tl.cast(items * W, tl.int32)
    unit = units
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        unit = tl.atomic_add(state + STATE_TICKETS, 1).to(tl.int32)
    factor = tl.full((), 1.0, tl.float32)
    if max_norm != 0:
        limit = max_norm / (tl.load(norm).to(tl.float64) + 1e-6)
        factor = tl.minimum(limit, tl.full((), 1.0, tl.float64), tl.PropagateNan.ALL).to(tl.float32)
    summed = tl.full((), -1, tl.int32)
    while unit < items:
        item = unit
        unit = tl.atomic_add(state + STATE_TICKETS, 1).to(tl.int32)
        word, inside = buckets_of(words, buckets, rank, item, first, most, W, G)
        tensor, bucket = tensors + (word >> TENSOR_BIT) * FIELDS, word & BUCKET_MASK
        mask = lane < lengths_of(tensor, bucket, inside, UNIT)[:, None]
        param = at(tl.load(tensor + 1, mask=inside, other=0), bucket * LENGTH, params)
        begun = tl.load(tensor + 2, mask=inside, other=0) * UNIT + bucket * LENGTH
        place = begun[:, None] + lane
        row = tl.load(tensor + 4, mask=inside, other=0)
        if MASTER:
            p = tl.load(master_of + place, mask=mask, other=0.0)
        else:
            p = tl.load(param, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(sums + place, mask=mask, other=0.0) * (factor * ratio(rates, row, 10))
        g += ratio(rates, row, 1) * p
        if RULE <= AMSGRAD:
            m = tl.load(m_of + place, mask=mask, other=0.0)
            v = tl.load(v_of + place, mask=mask, other=0.0)
            m += ratio(rates, row, 2) * (g - m)
            v = ratio(rates, row, 3) * v + ratio(rates, row, 4) * g * g
            tl.store(m_of + place, m, mask=mask)
            tl.store(v_of + place, v, mask=mask)
            if RULE == AMSGRAD:
                v = tl.maximum(tl.load(most_of + place, mask=mask, other=0.0), v, tl.PropagateNan.ALL)
                tl.store(most_of + place, v, mask=mask)
            root = tl.sqrt_rn(v) * ratio(rates, row, 5) + ratio(rates, row, 6)
            p = ratio(rates, row, 0) * p - ratio(rates, row, 7) * tl.div_rn(m, root)
        else:
            if RULE == MOMENTUM:
                m = tl.load(m_of + place, mask=mask, other=0.0)
                m = ratio(rates, row, 2) * m + ratio(rates, row, 3) * g
                tl.store(m_of + place, m, mask=mask)
                g = ratio(rates, row, 4) * g + ratio(rates, row, 5) * m
            p -= ratio(rates, row, 0) * g
        if MASTER:
            tl.store(master_of + place, p, mask=mask)
        if summed >= 0:
            count_sums(done, signals, summed, items, slice_items, slices, rank, first_signal, W)
        new = p.to(params)
        tl.store(param, new, mask=mask)
        for step in range(W - 1):
            to = slots(tl.load(finished + (rank + 1 + step) % W), gathered, rank, item, most, params, G)
            tl.store(to, new, mask=mask)
        summed = item
    if summed >= 0:  # before it waits for what peers send after they have this
        count_sums(done, signals, summed, items, slice_items, slices, rank, first_signal, W)
    arrived = peer(signals, rank, tl.int32) + first_signal
    own = tl.load(finished + rank)
    code = site * CODES_PER_SITE + COPYING
    while unit < units:
        item = (unit - items) // (W - 1)
        source = (rank + 1 + (unit - items) % (W - 1)) % W
        unit = tl.atomic_add(state + STATE_TICKETS, 1).to(tl.int32)
        piece = item // slice_items
        wait_all(arrived + (W + source) * slices + piece, 0, 1, 1, state, code, source, piece, epoch)
        word, inside = buckets_of(words, buckets, source, item, first, most, W, G)
        tensor, bucket = tensors + (word >> TENSOR_BIT) * FIELDS, word & BUCKET_MASK
        mask = lane < lengths_of(tensor, bucket, inside, UNIT)[:, None]
        new = tl.load(slots(own, gathered, source, item, most, params, G), mask=mask, other=0.0)
        tl.store(at(tl.load(tensor + 1, mask=inside, other=0), bucket * LENGTH, params), new, mask=mask)
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        clear(peer(signals, rank, tl.int32) + first_signal, 2 * W * slices, 256)
        end_shares(state, epoch, PROGRAMS)


def launch_clipped_update(
    memory: PeerMemory,
    words: Tensor,
    buckets: Tensor,
    rates: Tensor,
    states: Sequence[Tensor],
    master: Tensor | None,
    sums: Tensor,
    squares: Tensor,
    norm: Tensor,
    most: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    unit: int,
    rule: int,
    mean: bool,
    max_norm: float,
    check: Callable[[], None],
    config: UpdateConfig,
    site: int = 0,
    compile_only: bool = False,
) -> None:
    """All pieces of both kernels; `check` is called between them, and may raise.

    sums: fp32, of the elements that this rank owns; squares: fp64, at least `squares_of` of them; norm: fp32,
    one element. All else is as `launch_update_exchange` takes it.
    """
    world, rank, programs = memory.world, memory.rank, memory.programs * config.per_sm
    grad, param = dtypes
    none = [rates] * (3 - len(states))
    settings = {
        "PROGRAMS": programs, "PER_SM": config.per_sm, "W": world, "UNIT": unit, "G": config.group,
        "num_warps": config.warps, "num_stages": 1, "maxnreg": config.registers,
    }  # fmt: skip
    pieces = _pieces(config, most, world)
    for first, items in pieces:
        launch(
            sum_gradients, programs, compile_only,
            words, buckets, sums, squares, norm, memory.inbox.addresses, memory.finished.addresses,
            memory.signals.addresses, memory.done, memory.state,
            first, items * config.group, items, config.slice_items, cdiv(items, config.slice_items),
            1 / world if mean else 1.0, squares_of(config, most, world), int(first == pieces[-1][0]), rank,
            site, memory.inbox.half(grad) // LINE.value, memory.finished.half(torch.float64),
            memory.signals.half(torch.int32), GRAD=KINDS[grad], **settings,
        )  # fmt: skip
    if not compile_only:
        check()
    for first, items in pieces:
        launch(
            update_parameters, programs, compile_only,
            words, buckets, rates, sums, norm, *states, *none, rates if master is None else master,
            memory.finished.addresses, memory.signals.addresses, memory.done, memory.state,
            first, items * config.group, items, config.slice_items, cdiv(items, config.slice_items), max_norm,
            rank, site, memory.finished.half(param) // LINE.value, memory.signals.half(torch.int32),
            PARAM=KINDS[param], RULE=rule, MASTER=master is not None, **settings,
        )  # fmt: skip


def _pieces(config: UpdateConfig, most: int, world: int) -> list[tuple[int, int]]:
    """First bucket of a run, and items, of every launch."""
    run = config.run(world)
    return [
        (first, cdiv(min(run, max(most, 1) - first), config.group)) for first in range(0, max(most, 1), run)
    ]


def squares_of(config: UpdateConfig, most: int, world: int) -> int:
    """Items of the longest run, each of which has a sum of squares."""
    return sum(items for _, items in _pieces(config, most, world))
