"""As `exchange_tokens`, for few tokens: packets instead of signals, and one exchange.

    P[t] = the sum of rows of `exchange_tokens`          Y = sum over ranks of P, fp32, in rank order

A. A program computes an item of P and sends it to the ranks that add it up, as packets of 4 bytes of values
   and the epoch: for an all_reduce to every rank, for a reduce_scatter to its owner. A rank also sends its
   own part to itself. So the program that adds up an item may be another one than the program that computed
   it.
B. A program takes the packets of one item from all ranks, adds them up and stores the sum.

There is no signal, and nothing to reset: a packet with another epoch has not arrived. Shares of the programs
are those of `exchange_row_packets`.

A rank has two halves of packets [W, items, packets of an item] (int64), by their source.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import Need, PeerMemory, cdiv, launch

from .comm import CODES_PER_SITE, REDUCING, begin, half_of, peer, put_packets
from .exchange_sums import UNIT
from .exchange_tokens import TokenRows, report_index, sum_of_tokens
from .packet_shares import end_packets, look, mark, next_item, take_or_help
from .payloads import sum_of_payloads
from .shares import A, announce, start

MOST_REGISTERS = 255
"""Of a thread. A multiprocessor has one program."""
PAYLOAD = tl.constexpr(4)
"""Bytes of values in a packet."""
MOST_ELEMENTS = 1 << 19
"""Of P. With more, the bytes of packets outweigh what signals cost."""


@dataclass(frozen=True)
class TokenPacketsConfig:
    """length: elements of an item. A thread computes 8 of them."""

    length: int = 512

    @property
    def warps(self) -> int:
        return self.length // UNIT.value // 32

    def items(self, elements: int, world: int, all_ranks: bool) -> int:
        """That a rank adds up."""
        return cdiv(elements if all_ranks else elements // world, self.length)


def token_packets_needs(
    elements: int, itemsize: int, world: int, all_ranks: bool, config: TokenPacketsConfig
) -> Need:
    """The memory of a call on a matrix P of so many elements."""
    packets = config.items(elements, world, all_ranks) * config.length * itemsize // PAYLOAD.value
    return Need(packets=2 * world * packets * 8)


@triton.jit
def payloads_of(values, LENGTH: tl.constexpr):
    """Values of 2 or 4 bytes, [LENGTH // UNIT, UNIT], as uint32, two of 2 bytes in one."""
    if values.dtype.primitive_bitwidth == 32:
        found = tl.reshape(values.to(tl.uint32, bitcast=True), (LENGTH,))
    else:
        bits = tl.reshape(values.to(tl.uint16, bitcast=True).to(tl.uint32), (LENGTH // 2, 2))
        low, high = tl.split(bits)
        found = low | (high << 16)
    return found


@triton.jit
def send_tokens(
    x, index, before, behind, added, packets, state,
    rows, tokens, width, stride, chunk, items, rank, site, share, base, epoch, programs,
    W: tl.constexpr, ALL: tl.constexpr, WIRE: tl.constexpr, PACKETS: tl.constexpr, K: tl.constexpr,
    STEP: tl.constexpr, FOLD: tl.constexpr, TAKEN: tl.constexpr, BEFORE: tl.constexpr, BEHIND: tl.constexpr,
    ADDED: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Part A: every `programs`-th item from number `share` on. An index that names no row is reported."""
    lane = tl.arange(0, PACKETS)
    faults = tl.full((), 0, tl.int32)
    for unit in range(share, items if ALL else W * items, programs):
        item = unit % items
        owner = (rank + 1 + unit // items) % W
        skipped = item * (LENGTH // UNIT)
        begun = (0 if ALL else owner * chunk) + skipped
        total, _, wrong = sum_of_tokens(
            x, index, before, behind, added, begun, chunk - skipped, rows, tokens, width, stride,
            K, STEP, FOLD, TAKEN, BEFORE, BEHIND, ADDED, LENGTH,
        )  # fmt: skip
        faults |= tl.max(wrong.to(tl.int32), axis=0)
        payloads = payloads_of(total.to(WIRE), LENGTH)
        to = base + (rank * items + item) * PACKETS + lane
        inside = lane * (LENGTH // PACKETS) < (chunk - skipped) * UNIT
        for p in tl.static_range(W if ALL else 1):
            put_packets(peer(packets, (owner + p) % W, tl.int64) + to, payloads, epoch, inside)
    if TAKEN:
        if faults != 0:  # one of all indices is told
            report_index(index, state, site, tokens, K, rows, LENGTH)


@triton.jit(
    do_not_specialize=[
        "rows", "tokens", "width", "stride", "chunk", "items", "programs", "rank", "site", "packets_half",
    ]
)  # fmt: skip
def exchange_token_packets(
    x, index, before, behind, added, out, packets, state,
    rows, tokens, width, stride, chunk, items, programs, rank, site, packets_half,
    W: tl.constexpr, ALL: tl.constexpr, MEAN: tl.constexpr, SOURCES: tl.constexpr, PACKETS: tl.constexpr,
    K: tl.constexpr, STEP: tl.constexpr, FOLD: tl.constexpr, TAKEN: tl.constexpr, BEFORE: tl.constexpr,
    BEHIND: tl.constexpr, ADDED: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Grid: `programs`, one a multiprocessor.

    x, index, before, behind, added and their numbers: `TokenRows`; out: [tokens, columns], without ALL the
    own chunk; packets: int64 [W], addresses of the packet memory of all ranks; chunk: units of an owner, with
    ALL of P; items: of a chunk; SOURCES: the power of two above W; PACKETS: of an item.
    """
    WIRE: tl.constexpr = out.dtype.element_ty
    program = tl.program_id(0)
    start(state)
    epoch = begin(state)
    base = half_of(epoch) * packets_half
    send_tokens(
        x, index, before, behind, added, packets, state,
        rows, tokens, width, stride, chunk, items, rank, site, program, base, epoch, programs,
        W, ALL, WIRE, PACKETS, K, STEP, FOLD, TAKEN, BEFORE, BEHIND, ADDED, LENGTH,
    )  # fmt: skip
    mark(state, A, program, epoch)
    if program == 0:
        announce(state, rank, W, epoch)
    own = peer(packets, rank, tl.int64) + base
    source = tl.arange(0, SOURCES)[:, None]
    lane = tl.arange(0, PACKETS)
    within = tl.arange(0, LENGTH)
    code = site * CODES_PER_SITE + REDUCING
    item = program
    share = tl.full((), -1, tl.int32)  # of another program
    left = tl.full((), 0, tl.int32)  # 1: the last program adds up in the place of this one
    last = tl.full((), 0, tl.int32)
    behind_last = tl.full((), 0, tl.int32)  # of the last program: whose items were left
    going = tl.full((), 1, tl.int32)
    while going != 0:
        if share >= 0:
            send_tokens(
                x, index, before, behind, added, packets, state,
                rows, tokens, width, stride, chunk, items, rank, site, share, base, epoch, programs,
                W, ALL, WIRE, PACKETS, K, STEP, FOLD, TAKEN, BEFORE, BEHIND, ADDED, LENGTH,
            )  # fmt: skip
            if share == 0:
                announce(state, rank, W, epoch)
            share = tl.full((), -1, tl.int32)
        seen = look(state, programs, epoch)
        while (item < items) & (share < 0):
            count = (chunk - item * (LENGTH // UNIT)) * UNIT
            where = (source * items + item) * PACKETS + lane[None, :]
            wanted = (source < W) & (lane * (LENGTH // PACKETS) < count)[None, :]
            parts, share, _, left = take_or_help(
                own + where, epoch, wanted, state, code, source, item, program, programs, programs, rank, W,
                last, LEAVES=True, ADDS=False,
            )  # fmt: skip
            if left != 0:
                item = items
            elif share < 0:
                total = sum_of_payloads(parts, source, W, WIRE)
                if MEAN:
                    total /= W
                tl.store(out + item * LENGTH + within, total.to(WIRE), mask=within < count)
                item += programs
        if (share < 0) & (item >= items):
            share, item, left, last, behind_last, going = next_item(
                seen, item, left, last, behind_last, going, program, programs, state, epoch
            )
    if last != 0:
        end_packets(state, epoch)


def launch_exchange_token_packets(
    memory: PeerMemory,
    of: TokenRows,
    out: Tensor,
    mean: bool,
    all_ranks: bool,
    config: TokenPacketsConfig,
    site: int = 0,
    compile_only: bool = False,
) -> None:
    """As `launch_exchange_tokens`, of at most MOST_ELEMENTS. memory: at least `token_packets_needs`."""
    world, elements, dtype = memory.world, of.tokens * of.columns, out.dtype
    items = config.items(elements, world, all_ranks)
    programs = min(memory.programs, triton.next_power_of_2(items if all_ranks else world * items))
    chunk = elements if all_ranks else elements // world
    launch(
        exchange_token_packets, programs, compile_only,
        *of.pointers(), out, memory.packets.addresses, memory.state,
        *of.numbers(), chunk // UNIT.value, items, programs, memory.rank, site,
        memory.packets.half(torch.int64),
        W=world, ALL=all_ranks, MEAN=mean, SOURCES=triton.next_power_of_2(world),
        PACKETS=config.length * dtype.itemsize // PAYLOAD.value, **of.options(), LENGTH=config.length,
        num_warps=config.warps, num_stages=1, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
