"""As `update_exchange`, for few buckets: packets instead of signals.

A packet is an element, zero-extended to 32 bits, and the epoch. No rank stores to parameters of another one.

A. Send the gradients of each bucket to its owner.
B. Take the packets of a bucket from all ranks, add in rank order in fp32, update states and parameters, and
   send the parameters to all peers.
C. Take the packets of a bucket from its owner, and store them to the parameters.

    rank 0    A: gradients ---+     +---> B: sum, update ---+     +---> C: store
                              | swap|                       | swap|
    rank 1    A: gradients ---+     +---> B: sum, update ---+     +---> C: store

There is no signal, and nothing to reset: a packet with another epoch has not arrived. A bucket is sent whole,
whatever its length, so that every rank hears from every other one in each call.

Shares of the programs are those of `matmul_packets` (`packet_shares.py`). A share of B changes states, so a
program takes its own by an exchange of the mark, as others do: no share of B is done twice. Programs of the
margin have part A only, since peers wait for B.

`update_packet_parts.py` has the layout of the packets.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import Need, PeerMemory

from .comm import CODES_PER_SITE, REDUCING, begin, half_of, peer, tag_of
from .packet_shares import end_packets, further, look, mark, marks_of, take_or_help, through, unmarked
from .patience import any_thread
from .payloads import in_order
from .shares import A, B, announce, firm, start
from .update_packet_parts import (
    UpdatePacketsConfig,
    has_arrived,
    launch_packets,
    send_buckets,
    send_parameters,
    take_parameters,
    values_of,
)
from .update_parts import (
    FP16,
    FP32,
    LENGTH,
    at,
    buckets_of,
    elements_of,
    lanes,
    parameters_of,
    states_of,
    updated,
)


def update_packets_needs(most: int, world: int) -> Need:
    """The memory that a call needs. most: the buckets of the rank that owns the most of them."""
    return Need(packets=2 * 2 * world * max(most, 1) * LENGTH.value * 8)


@triton.jit(do_not_specialize=["most", "programs", "scale", "rank", "site", "packets_half"])
def update_packets(
    words, buckets, rates, m_of, v_of, most_of, master_of, packets, state,
    most, programs, scale, rank, site, packets_half,
    W: tl.constexpr, GRAD: tl.constexpr, PARAM: tl.constexpr, UNIT: tl.constexpr, RULE: tl.constexpr,
    MASTER: tl.constexpr, SOURCES: tl.constexpr,
):  # fmt: skip
    """Grid: `programs`, one a multiprocessor.

    words, buckets, rates, states: as `update_exchange` has them; most: buckets of the longest run; packets:
    int64 [W], addresses of the packet memory of all ranks; SOURCES: the power of two above W.
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
    source = tl.arange(0, SOURCES)[:, None]
    count = (tl.load(words + rank + 1) - tl.load(words + rank)).to(tl.int32)
    copies = (W - 1) * most
    adding = firm(state, programs)
    item = count
    copy = copies
    if program < adding:
        copy = program
        before = tl.atomic_xchg(marks_of(state, B) + program, tag_of(epoch), sem="relaxed", scope="gpu")
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
            param, place, row, p = parameters_of(
                tensor, bucket, inside, mask, master_of, params, UNIT, MASTER
            )
            m, v, greatest = states_of(m_of, v_of, most_of, place, mask, RULE)
            where = (source * most + item) * LENGTH + lanes()
            wanted = (source < W) & (source != rank) & (lanes() >= 0)
            code = site * CODES_PER_SITE + REDUCING
            parts, share, _, _ = take_or_help(
                own + where, epoch, wanted, state, code, source, item, program, programs, adding, rank, W, 1,
                LEAVES=False, ADDS=False,
            )  # fmt: skip
            if share < 0:
                there = tl.min(has_arrived(parts, epoch).to(tl.int32), 0)[None, :] != 0
                mask &= there
                found = tl.where(source == rank, mine, values_of(parts, grads).to(tl.float32))
                g = in_order(found, source, W)[None, :]
                p = updated(p, g, m, v, greatest, rates, row, scale, m_of, v_of, most_of, place, mask, RULE)
                if MASTER:
                    tl.store(master_of + place, p, mask=mask)
                new = p.to(params)
                tl.store(param, new, mask=mask)
                send_parameters(packets, base, new, item, most, rank, epoch, there, W)
                item += adding
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
            if (share < 0) & (item >= count):
                last, _ = through(state, B, program, left, programs, epoch)
                going = tl.full((), 0, tl.int32)
    if last != 0:
        end_packets(state, epoch)


def launch_update_packets(
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
    config: UpdatePacketsConfig,
    site: int = 0,
    compile_only: bool = False,
) -> None:
    """A step. Arguments are those of `launch_update_exchange`, with at most MOST_BUCKETS buckets in a run.
    memory: at least `update_packets_needs`."""
    none = [rates] * (3 - len(states))
    tensors = words, buckets, rates, *states, *none, rates if master is None else master
    launch_packets(
        update_packets, memory, tensors, most, dtypes, unit, mean, config, site, compile_only,
        RULE=rule, MASTER=master is not None,
    )  # fmt: skip
