"""all_reduce_update of few buckets: one kernel, one exchange, and packets instead of signals.

    sum[t] = round(sum over ranks of grads[t])              fp32, in rank order
    sum[t] = round(sum[t] * fp32(1 / W))                    of means; torch divides so on GPUs
    params[t], states of t = rule(params[t], sum[t], states of t, numbers of t)

Every rank has all parameters and states, and updates them all. A bucket is at most 1024 elements of one
tensor.

A. Send the gradients of each bucket to all peers.
B. Take the packets of a bucket from all peers, add in rank order, round, keep the sum where it is wanted, and
   update states and parameters.

    rank 0    A: gradients ---+     +---> B: sum, update
                              | swap|
    rank 1    A: gradients ---+     +---> B: sum, update

A packet is 4 bytes of gradients, two elements or one, and the epoch. There is no signal, and nothing to
reset: a packet with another epoch has not arrived. A bucket is sent whole, whatever its length, so that every
rank hears from every other one in each call.

Shares of the programs are those of `exchange_row_packets` (`packet_shares.py`), but a share of B changes
states: nobody else does it, unless its program has left it whole. A program of the margin leaves only while
it waits for its first bucket. Behind that every peer has started the call, so that what it waits for comes.

A rank has two halves of packets [W, buckets, LENGTH elements] (int64), by their source.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import Need, PeerMemory, launch

from .comm import CODES_PER_SITE, REDUCING, are_missing, begin, half_of, peer, put_packets, tag_of
from .packet_shares import end_packets, look, mark, next_item, take_or_help
from .payloads import sum_of_payloads
from .shares import A, announce, start
from .update_launch import KINDS
from .update_parts import FP16, FP32, LENGTH
from .whole_update_parts import (
    GRADIENT,
    elements_of,
    load_values,
    payload_of,
    places_of,
    pointers,
    store_values,
)


@dataclass(frozen=True)
class WholePacketsConfig:
    """The configuration of the kernel. A thread of 8 warps has 4 elements of a bucket."""

    warps: int = 8


def whole_packets_needs(buckets: int, grad_size: int, world: int) -> Need:
    """The memory that a call needs, of gradients whose elements have so many bytes."""
    return Need(packets=2 * world * buckets * LENGTH.value * grad_size // 4 * 8)


@triton.jit(do_not_specialize=["count", "programs", "scale", "rank", "site", "packets_half"])
def whole_update_packets(
    words, buckets, rates, packets, state, count, programs, scale, rank, site, packets_half,
    W: tl.constexpr, GRAD: tl.constexpr, PARAM: tl.constexpr, UNIT: tl.constexpr, RULE: tl.constexpr,
    SOURCES: tl.constexpr,
):  # fmt: skip
    """Grid: `programs`, one a multiprocessor.

    words: int64 [tensors, FIELDS]; buckets: int64 [count], words as `buckets_of` has them; rates: fp32
    [rows, NUMBERS]; packets: int64 [W], addresses of the packet memory of all ranks; SOURCES: the power of
    two above W.
    """
    grads: tl.constexpr = tl.float32 if GRAD == FP32 else (tl.float16 if GRAD == FP16 else tl.bfloat16)
    params: tl.constexpr = tl.float32 if PARAM == FP32 else (tl.float16 if PARAM == FP16 else tl.bfloat16)
    PACKETS: tl.constexpr = LENGTH // (32 // grads.primitive_bitwidth)
    program = tl.program_id(0)
    start(state)
    epoch = begin(state)
    base = tl.multiple_of(half_of(epoch) * packets_half, 16)  # halves begin at cache lines
    send_to_all(words, buckets, packets, count, rank, program, base, epoch, programs, W, grads, UNIT, PACKETS)
    mark(state, A, program, epoch)
    if program == 0:
        announce(state, rank, W, epoch)
    own = peer(packets, rank, tl.int64) + base
    source = tl.arange(0, SOURCES)[:, None]
    packet = tl.arange(0, PACKETS)[None, :]
    wanted = (source < W) & (source != rank) & (packet >= 0)
    code = site * CODES_PER_SITE + REDUCING
    item = program
    share = tl.full((), -1, tl.int32)  # of another program
    left = tl.full((), 0, tl.int32)  # 1: the last program does the buckets of this one
    last = tl.full((), 0, tl.int32)
    behind = tl.full((), 0, tl.int32)  # of the last program: whose buckets were left
    going = tl.full((), 1, tl.int32)
    while going != 0:
        if share >= 0:
            send_to_all(
                words, buckets, packets, count, rank, share, base, epoch, programs, W, grads, UNIT, PACKETS
            )
            if share == 0:
                announce(state, rank, W, epoch)
            share = tl.full((), -1, tl.int32)
        seen = look(state, programs, epoch)
        while (item < count) & (share < 0):
            tensor, first, mask = elements_of(words, tl.load(buckets + item), UNIT)
            given = pointers(tl.load(tensor + GRADIENT), first, grads)
            mine = payload_of(tl.load(given, mask=mask, other=0.0))
            places = places_of(tensor, first, params)
            values = load_values(places, mask, RULE)
            where = (source * count + item) * PACKETS + packet
            stays_on = last | (item >= programs).to(tl.int32)
            parts, share, _, left = take_or_help(
                own + where, epoch, wanted, state, code, source, item, program, programs, programs, rank, W,
                stays_on, LEAVES=True, ADDS=False,
            )  # fmt: skip
            if left != 0:
                item = count
            elif share < 0:
                # Some are missing if the wait has given up: then nothing of the bucket changes.
                if are_missing(parts, tag_of(epoch)) == 0:
                    found = tl.where(source == rank, mine, parts.to(tl.uint32))
                    total = sum_of_payloads(found, source, W, grads)[None, :]
                    store_values(places, values, total, scale, first, mask, rates, grads, UNIT, RULE)
                item += programs
        if (share < 0) & (item >= count):
            share, item, left, last, behind, going = next_item(
                seen, item, left, last, behind, going, program, programs, state, epoch
            )
    if last != 0:
        end_packets(state, epoch)


@triton.jit
def send_to_all(
    words, buckets, packets, count, rank, share, base, epoch, programs,
    W: tl.constexpr, GRADS: tl.constexpr, UNIT: tl.constexpr, PACKETS: tl.constexpr,
):  # fmt: skip
    """Send the gradients of every `programs`-th bucket from number `share` on to all peers."""
    packet = tl.arange(0, PACKETS)[None, :]
    for item in range(share, count, programs):
        tensor, first, mask = elements_of(words, tl.load(buckets + item), UNIT)
        given = pointers(tl.load(tensor + GRADIENT), first, GRADS)
        payload = payload_of(tl.load(given, mask=mask, other=0.0))
        to = base + (rank * count + item) * PACKETS + packet
        for step in tl.static_range(1, W):
            put_packets(peer(packets, (rank + step) % W, tl.int64) + to, payload, epoch, packet >= 0)


def launch_whole_update_packets(
    memory: PeerMemory,
    words: Tensor,
    buckets: Tensor,
    rates: Tensor,
    count: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    unit: int,
    rule: int,
    mean: bool,
    config: WholePacketsConfig,
    site: int = 0,
    compile_only: bool = False,
) -> None:
    """A step over `count` buckets, at least one.

    words, buckets, rates: as the kernel has them, on the device; dtypes: of gradients and of parameters;
    unit: 4, or less, that divides all lengths; rule: its code, not that of LAMB. memory: at least
    `whole_packets_needs`.
    """
    assert count > 0
    world, programs = memory.world, min(memory.programs, count)
    launch(
        whole_update_packets, programs, compile_only,
        words, buckets, rates, memory.packets.addresses, memory.state,
        count, programs, 1 / world if mean else 1.0, memory.rank, site, memory.packets.half(torch.int64),
        W=world, GRAD=KINDS[dtypes[0]], PARAM=KINDS[dtypes[1]], UNIT=unit, RULE=rule,
        SOURCES=triton.next_power_of_2(world), num_warps=config.warps, num_stages=1,
    )  # fmt: skip
