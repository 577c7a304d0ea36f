"""reduce_update_gather: one persistent kernel that sums gradients, updates parameters and hands them round.

The elements of all tensors are cut into buckets of at most 1024 (`lowering.buckets`); each rank owns a run of
them. A launch exchanges a piece: the same number of buckets of every run, one after another. An item is G
buckets of one run, a slice some items. Behind the end of a run items are empty, but counted, so that every
rank hears from every other one in each call.

A. A program stores items of its gradients in the inbox of their owner. The program that counts the last item
   of a slice signals the owner.
B. Tickets, in the order of the items of the own run: wait for the slice from all ranks, add in rank order in
   fp32, update states and parameters, and store the parameters in `finished` of all peers. The last item of a
   slice signals all.
C. Tickets behind those: wait for a slice of an owner, and copy its items to the parameters.

A waits for nobody, B for A of the peers, C for B. No rank stores to parameters of another one.

A rank has two halves each of the inbox and `finished`, [W, buckets of a piece, 1024], and of the counters
[2 * W, slices]: gradients, then parameters, by their source.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import Need, PeerMemory, cdiv, launch

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

LENGTH = tl.constexpr(1024)
"""Elements of a bucket."""
FIELDS = tl.constexpr(5)
"""Words of a tensor: addresses of gradient (0: none) and parameter, number of its first element among the
states of this rank, length, row of its numbers. Elements count in units of UNIT."""
TENSOR_BIT = tl.constexpr(40)
"""A bucket is a word: its number in its tensor, and the tensor from this bit on."""
LINE = tl.constexpr(16)
"""Halves begin at multiples of so many elements."""
BUCKET_MASK = tl.constexpr((1 << 40) - 1)
NUMBERS = tl.constexpr(12)
KINDS = {torch.float32: 4, torch.bfloat16: 1, torch.float16: 2}
FP32, FP16 = tl.constexpr(4), tl.constexpr(2)
AMSGRAD, MOMENTUM = tl.constexpr(1), tl.constexpr(3)
"""Codes of rules; adam has 0, sgd 2."""


@dataclass(frozen=True)
class UpdateConfig:
    """group: buckets of an item; slice_items: items of a slice; piece: most buckets of a launch."""

    group: int = 1
    slice_items: int = 64
    warps: int = 4
    per_sm: int = 4
    piece: int = 1 << 16

    @property
    def registers(self) -> int:
        """Of a thread, such that all programs fit."""
        return min(255, 65536 // (32 * self.warps * self.per_sm) // 8 * 8)

    def run(self, world: int) -> int:
        """Most buckets of a run in a launch, whole items."""
        return max(1, self.piece // world // self.group) * self.group

    def slices(self, buckets: int) -> int:
        """Of a piece of so many buckets."""
        return cdiv(cdiv(buckets, self.group), self.slice_items)


def update_needs(config: UpdateConfig, most: int, grad_size: int, param_size: int, world: int) -> Need:
    """Memory of a call whose longest run has `most` buckets."""
    most = min(most, config.run(world))
    slices, elements = config.slices(most), world * cdiv(most, config.group) * config.group * 1024
    return Need(
        inbox=2 * elements * grad_size,
        finished=2 * elements * param_size,
        signals=2 * 4 * 2 * world * slices,
        done=world * slices,
    )


@triton.jit
def buckets_of(words, buckets, owner, item, first, most, W: tl.constexpr, G: tl.constexpr):
    """The buckets of an item: their words, and whether there are any."""
    number = first + item * G + tl.arange(0, G)
    begun = tl.load(words + owner)
    end = tl.minimum(tl.load(words + owner + 1), begun + first + most)
    inside = begun + number < end
    return tl.load(buckets + begun + number, mask=inside, other=0), inside


@triton.jit
def lengths_of(tensor, bucket, inside, UNIT: tl.constexpr):
    """How many elements of buckets count: none of a tensor without a gradient."""
    given = inside & (tl.load(tensor, mask=inside, other=0) != 0)
    units = tl.load(tensor + 3, mask=given, other=0) - bucket * (LENGTH // UNIT)
    return tl.minimum(units, LENGTH // UNIT).to(tl.int32) * UNIT


@triton.jit
def at(address, first, DTYPE: tl.constexpr):
    """Pointers to LENGTH elements each, from numbers `first` on behind 16-byte aligned addresses."""
    of = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), [16])
    return (of + first)[:, None] + tl.arange(0, LENGTH)[None, :]


@triton.jit
def slots(region, half, source, item, most, DTYPE: tl.constexpr, G: tl.constexpr):
    """Pointers to the places of an item of `source` in memory of a rank."""
    to = tl.multiple_of(region.to(tl.pointer_type(DTYPE)), 16) + half
    bucket = source * most + item * G + tl.arange(0, G)
    return to + (bucket.to(tl.int64) * LENGTH)[:, None] + tl.arange(0, LENGTH)[None, :]


@triton.jit
def ratio(rates, row, j: tl.constexpr):
    return tl.load(rates + row * NUMBERS + j)[:, None]


@triton.jit
def count_sums(done, signals, item, items, slice_items, slices, rank, first_signal, W: tl.constexpr):
    """Count an item whose parameters are stored; the last one of a slice signals all."""
    tl.debug_barrier()
    piece = item // slice_items
    count = tl.minimum(slice_items, items - piece * slice_items)
    word = done + (W - 1) * slices + piece
    if tl.atomic_add(word, 1, sem="release", scope="gpu") == count - 1:
        tl.atomic_add(word, -count, sem="acquire", scope="gpu")
        signal_all(signals, W, first_signal + (W + rank) * slices + piece, rank)


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
    tensors = words + W + 1
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
            mask = tl.arange(0, LENGTH)[None, :] < lengths_of(tensor, bucket, inside, UNIT)[:, None]
            values = tl.load(
                at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, grads), mask=mask, other=0.0
            )
            # The stores of the item before have arrived by now, so that counting it does not wait.
            if pushed >= 0:
                count_item(done, signals, pushed, slices, slice_items, items, 1, rank, first_signal, W)
            to = slots(tl.load(inbox + owner), half, rank, item, most, grads, G)
            tl.store(to, values, mask=mask)
            pushed = step * slices + item // slice_items
        if pushed >= 0:
            count_item(done, signals, pushed, slices, slice_items, items, 1, rank, first_signal, W)
        share = further(look(state, STATE_STARTED), PROGRAMS, state, A, PROGRAMS, program)
    units = tl.cast(items * W, tl.int32)
    unit = units
    if stays(state, multiprocessor(PROGRAMS // PER_SM), PER_SM, rank, W, epoch):
        unit = tl.atomic_add(state + STATE_TICKETS, 1).to(tl.int32)
    arrived = peer(signals, rank, tl.int32) + first_signal
    own = tl.load(inbox + rank)
    code = site * CODES_PER_SITE + REDUCING
    known = tl.full((), -1, tl.int32)
    summed = tl.full((), -1, tl.int32)
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
        mask = tl.arange(0, LENGTH)[None, :] < lengths_of(tensor, bucket, inside, UNIT)[:, None]
        mine = at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, grads)
        g = tl.zeros((G, LENGTH), tl.float32)
        for r in tl.range(0, W, loop_unroll_factor=2):
            theirs = slots(own, half, r, item, most, grads, G)
            g += tl.load(tl.where(r == rank, mine, theirs), mask=mask, other=0.0).to(tl.float32)
        param = at(tl.load(tensor + 1, mask=inside, other=0), bucket * LENGTH, params)
        begun = tl.load(tensor + 2, mask=inside, other=0) * UNIT + bucket * LENGTH
        place = begun[:, None] + tl.arange(0, LENGTH)[None, :]
        row = tl.load(tensor + 4, mask=inside, other=0)
        if MASTER:
            p = tl.load(master_of + place, mask=mask, other=0.0)
        else:
            p = tl.load(param, mask=mask, other=0.0).to(tl.float32)
        if RULE <= AMSGRAD:
            g = g * (scale * ratio(rates, row, 10)) + ratio(rates, row, 1) * p
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
            g = g * (scale * ratio(rates, row, 10)) + ratio(rates, row, 1) * p
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
        mask = tl.arange(0, LENGTH)[None, :] < lengths_of(tensor, bucket, inside, UNIT)[:, None]
        new = tl.load(slots(own, gathered, source, item, most, params, G), mask=mask, other=0.0)
        tl.store(at(tl.load(tensor + 1, mask=inside, other=0), bucket * LENGTH, params), new, mask=mask)
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
    """All pieces. words, buckets, rates: as the kernel has them, on the device; most: buckets of the longest
    run; dtypes: of gradients and of parameters; unit: 4, or less, that divides all lengths; rule: its code.
    """
    world, rank, programs = memory.world, memory.rank, memory.programs * config.per_sm
    grad, param = dtypes
    none = [rates] * (3 - len(states))
    for first in range(0, max(most, 1), config.run(world)):
        items = cdiv(min(config.run(world), max(most, 1) - first), config.group)
        launch(
            update_exchange, programs, compile_only,
            words, buckets, rates, *states, *none, rates if master is None else master,
            memory.inbox.addresses, memory.finished.addresses, memory.signals.addresses, memory.done,
            memory.state,
            first, items * config.group, items, config.slice_items, cdiv(items, config.slice_items),
            1 / world if mean else 1.0, rank, site, memory.inbox.half(grad) // LINE.value,
            memory.finished.half(param) // LINE.value, memory.signals.half(torch.int32),
            PROGRAMS=programs, PER_SM=config.per_sm, W=world, GRAD=KINDS[grad], PARAM=KINDS[param],
            UNIT=unit, RULE=rule, MASTER=master is not None, G=config.group,
            num_warps=config.warps, num_stages=1, maxnreg=config.registers,
        )  # fmt: skip
