"""LAMB as in `lamb_update`, for few buckets: packets as in `update_packets`, in one kernel.

A. Send the gradients of each bucket to its owner.
B. Take the packets of a bucket from all ranks, add in rank order in fp32, and update the states. Keep the
   direction u, and send the sums of the squares of the parameter and of u to all ranks.
C. Tickets, in the order of the own buckets. A program takes the sums of all buckets of the tensor, adds them
   in the order of the buckets, subtracts the product of step and u, and sends the parameters to all peers.
D. Take the packets of a bucket from its owner, and store them to the parameters.

    rank 0   A: gradients --+    +--> B: sum, u, squares --+    +--> C: step, update --+    +--> D: store
                            |swap|                         |swap|                      |swap|
    rank 1   A: gradients --+    +--> B: sum, u, squares --+    +--> C: step, update --+    +--> D: store

Every owner of a tensor adds the same sums in the same order, so all have the same step. u is kept as packets
in the memory of its own rank, since C may run in another program than B: a packet needs no fence. A sum is
two packets, each with 32 of its 64 bits.

Shares of A and B are those of `update_packets`. C waits for B of other programs. A program that waits there
does a share of B that no program has taken, so C ends wherever programs are placed. Programs of the margin
draw no tickets, unless they do a share of B: the program that would draw has not been placed.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import Need, PeerMemory

from .comm import (
    CODES_PER_SITE,
    REDUCING,
    STATE_TICKETS,
    begin,
    draw,
    drawn,
    half_of,
    peer,
    put_packets,
    tag_of,
)
from .embedding_exchange import ENDLESS
from .lamb_parts import direction_of, span_of, step_of
from .packet_shares import end_packets, further, look, mark, marks_of, take_or_help, through, unmarked
from .patience import any_thread
from .payloads import in_order
from .shares import A, B, announce, firm, start
from .update_packet_parts import (
    UpdatePacketsConfig,
    bits_of,
    has_arrived,
    launch_packets,
    send_buckets,
    send_parameters,
    take_parameters,
    values_of,
)
from .update_parts import FP16, FP32, LENGTH, at, buckets_of, elements_of, lanes, parameters_of, ratio

WORDS = tl.constexpr(4)
"""Packets of the sums of a bucket: two for the parameter, two for u, lower bits first."""
TAKEN = tl.constexpr(128)
"""The number of buckets whose sums a program takes in one wait."""


def lamb_packets_needs(most: int, world: int) -> Need:
    """The memory that a call needs. most: the buckets of the rank that owns the most of them."""
    elements = (2 * world + 1) * LENGTH.value + world * WORDS.value
    return Need(packets=2 * max(most, 1) * elements * 8)


@triton.jit
def send_squares(packets, first, bucket, of_p, of_u, epoch, mask, W: tl.constexpr):
    """Send the sums of a bucket, fp64, to all ranks, this one among them. first: where sums begin in packets;
    bucket: its number among all."""
    word = tl.arange(0, WORDS)
    bits = tl.where(word < WORDS // 2, of_p, of_u).to(tl.int64, bitcast=True)
    half = (bits >> (32 * (word % 2)).to(tl.int64)).to(tl.uint32)
    for r in tl.static_range(W):
        put_packets(
            peer(packets, r, tl.int64) + first + bucket * WORDS + word, half, epoch, mask & (word >= 0)
        )


@triton.jit
def take_squares(
    words, own, bucket, end, state, program, programs, adding, rank, site, epoch, W: tl.constexpr
):
    """Add up the sums of the buckets `[bucket, end)`, of the first TAKEN at most. own: where sums begin in
    packets of this rank. Returns both totals, fp64 [2]; whether all sums have arrived; and the share of A and
    that of B that `take_or_help` has found."""
    word = tl.arange(0, WORDS)[None, :]
    number = bucket + tl.arange(0, TAKEN)[:, None]
    wanted = (number < end) & (word >= 0)
    owner = tl.zeros((TAKEN, 1), tl.int32)
    for r in tl.static_range(1, W):
        owner += (number >= tl.load(words + r)).to(tl.int32)
    packets, share, other, _ = take_or_help(
        own + number * WORDS + word, epoch, wanted, state, site * CODES_PER_SITE + REDUCING, owner, 0,
        program, programs, adding, rank, W, 1,
        LEAVES=False, ADDS=True,
    )  # fmt: skip
    bits = (packets & 0xFFFFFFFF) << (32 * (word % 2)).to(tl.int64)
    sums = tl.sum(tl.reshape(bits, (TAKEN, 2, WORDS // 2)), 2).to(tl.float64, bitcast=True)
    there = tl.min((has_arrived(packets, epoch) | (wanted == 0)).to(tl.int32))
    return tl.sum(sums, 0), there, share, other


@triton.jit(do_not_specialize=["most", "programs", "scale", "rank", "site", "packets_half"])
def lamb_packets(
    words, buckets, rates, m_of, v_of, master_of, packets, state,
    most, programs, scale, rank, site, packets_half,
    W: tl.constexpr, GRAD: tl.constexpr, PARAM: tl.constexpr, UNIT: tl.constexpr, MASTER: tl.constexpr,
    SOURCES: tl.constexpr,
):  # fmt: skip
    """Grid: `programs`, one a multiprocessor.

    words, buckets, rates, states: as `measure_updates` of `lamb_update` has them; all else: as
    `update_packets` has it. Behind the parameters, a half of the packets has u [buckets of the longest run,
    1024] and sums [W, buckets of the longest run, WORDS].
    """
    grads: tl.constexpr = tl.float32 if GRAD == FP32 else (tl.float16 if GRAD == FP16 else tl.bfloat16)
    params: tl.constexpr = tl.float32 if PARAM == FP32 else (tl.float16 if PARAM == FP16 else tl.bfloat16)
    program = tl.program_id(0)
    start(state)
    epoch = begin(state)
    base = half_of(epoch) * packets_half
    send_buckets(words, buckets, packets, most, rank, program, base, epoch, programs, W, grads, UNIT)
    mark(state, A, program, epoch)
    if program == 0:
        announce(state, rank, W, epoch)
    own = peer(packets, rank, tl.int64) + base
    kept = own + 2 * W * most * LENGTH  # directions
    sums = (2 * W + 1) * most * LENGTH
    source = tl.arange(0, SOURCES)[:, None]
    run = tl.load(words + rank)
    count = (tl.load(words + rank + 1) - run).to(tl.int32)
    copies = (W - 1) * most
    adding = firm(state, programs)
    code = site * CODES_PER_SITE + REDUCING
    item = count
    unit = tl.full((), ENDLESS, tl.int32)
    copy = copies
    if program < adding:
        copy = program
        ticket = draw(state + STATE_TICKETS)
        before = tl.atomic_xchg(marks_of(state, B) + program, tag_of(epoch), sem="relaxed", scope="gpu")
        unit = drawn(ticket)
        item = tl.where(before == tag_of(epoch), count, program)
    share = tl.full((), -1, tl.int32)  # of another program
    left = tl.full((), 0, tl.int32)  # no program leaves what peers wait for
    last = tl.full((), 0, tl.int32)
    going = tl.full((), 1, tl.int32)
    while going != 0:
        if share >= 0:
            send_buckets(words, buckets, packets, most, rank, share, base, epoch, programs, W, grads, UNIT)
            if share == 0:
                announce(state, rank, W, epoch)
            share = tl.full((), -1, tl.int32)
        seen = look(state, programs, epoch)
        while (item < count) & (share < 0):
            word = buckets_of(words, buckets, rank, item, 0, most, 1)
            _, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
            given = at(tl.load(tensor, mask=inside, other=0), bucket * LENGTH, grads)
            mine = tl.load(given, mask=mask, other=0.0).to(tl.float32)
            _, place, row, p = parameters_of(tensor, bucket, inside, mask, master_of, params, UNIT, MASTER)
            m = tl.load(m_of + place, mask=mask, other=0.0)
            v = tl.load(v_of + place, mask=mask, other=0.0)
            where = (source * most + item) * LENGTH + lanes()
            wanted = (source < W) & (source != rank) & (lanes() >= 0)
            parts, share, _, _ = take_or_help(
                own + where, epoch, wanted, state, code, source, item, program, programs, adding, rank, W, 1,
                LEAVES=False, ADDS=False,
            )  # fmt: skip
            if share < 0:
                there = tl.min(has_arrived(parts, epoch).to(tl.int32), 0)[None, :] != 0
                mask &= there
                found = tl.where(source == rank, mine, values_of(parts, grads).to(tl.float32))
                g = in_order(found, source, W)[None, :] * (scale * ratio(rates, row, 10))
                u = direction_of(p, g, m, v, rates, row, m_of, v_of, place, mask)
                put_packets(kept + item * LENGTH + lanes(), bits_of(u), epoch, there)
                wide = p.to(tl.float64)
                of_p = tl.sum(wide * wide)
                wide = tl.where(mask, u, 0.0).to(tl.float64)  # 0 / 0 where nothing is, if eps is 0
                all_there = tl.min(there.to(tl.int32)) != 0
                send_squares(packets, base + sums, run + item, of_p, tl.sum(wide * wide), epoch, all_there, W)
                item += adding
        while (unit < count) & (share < 0) & (item >= count):
            word = buckets_of(words, buckets, rank, unit, 0, most, 1)
            number, tensor, bucket, inside, mask = elements_of(words, word, W, UNIT)
            param, place, _, p = parameters_of(tensor, bucket, inside, mask, master_of, params, UNIT, MASTER)
            which = tl.sum(number)
            first, end = span_of(words, buckets, which, W)
            wanted = inside[:, None] & (lanes() >= 0)
            u, share, other, _ = take_or_help(
                kept + unit * LENGTH + lanes(), epoch, wanted, state, code, rank, unit, program, programs,
                adding, rank, W, 1,
                LEAVES=False, ADDS=True,
            )  # fmt: skip
            there = has_arrived(u, epoch)
            squares = tl.zeros((2,), tl.float64)
            while (first < end) & (share < 0) & (other < 0):
                found, arrived, share, other = take_squares(
                    words, own + sums, first, end, state, program, programs, adding, rank, site, epoch, W
                )
                squares += found
                there &= arrived != 0
                first += TAKEN
            if other >= 0:
                item = other
            if (share < 0) & (other < 0):
                ticket = draw(state + STATE_TICKETS)
                mask &= there
                of_p = tl.sum(tl.where(tl.arange(0, 2) == 0, squares, 0.0))
                of_u = tl.sum(tl.where(tl.arange(0, 2) == 1, squares, 0.0))
                p -= step_of(words, rates, which, of_p, of_u, W) * values_of(u, tl.float32)
                if MASTER:
                    tl.store(master_of + place, p, mask=mask)
                new = p.to(params)
                tl.store(param, new, mask=mask)
                send_parameters(packets, base, new, unit, most, rank, epoch, there, W)
                unit = drawn(ticket)
        while (copy < copies) & (share < 0) & (item >= count):
            share, other, ended = take_parameters(
                words, buckets, own, state, copy, most, rank, site, program, programs, adding, epoch, W,
                params, UNIT,
            )  # fmt: skip
            if other >= 0:
                item = other
            if ended != 0:
                copy += adding
        if (share < 0) & (item >= count) & (copy >= copies):
            share = further(seen, programs, state, A, programs, epoch)
            if (share < 0) & any_thread(seen):
                other = unmarked(state, B, adding, epoch)
                if other >= 0:
                    item = other
                    if unit == ENDLESS:  # of the margin, in the place of programs that draw
                        unit = drawn(draw(state + STATE_TICKETS))
            if (share < 0) & (item >= count) & (unit >= count):
                last, _ = through(state, B, program, left, programs, epoch)
                going = tl.full((), 0, tl.int32)
    if last != 0:
        end_packets(state, epoch)


def launch_lamb_packets(
    memory: PeerMemory,
    words: Tensor,
    buckets: Tensor,
    rates: Tensor,
    states: Sequence[Tensor],
    master: Tensor | None,
    most: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    unit: int,
    mean: bool,
    config: UpdatePacketsConfig,
    site: int = 0,
    compile_only: bool = False,
) -> None:
    """A step. Arguments are those of `launch_update_packets`. memory: at least `lamb_packets_needs`."""
    tensors = words, buckets, rates, *states, rates if master is None else master
    launch_packets(
        lamb_packets, memory, tensors, most, dtypes, unit, mean, config, site, compile_only,
        MASTER=master is not None,
    )  # fmt: skip
