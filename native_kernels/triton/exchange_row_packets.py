"""As `exchange_rows`, for few rows: packets instead of signals, and one exchange.

    V = sum over ranks of P, fp32, in rank order, rounded once      results = tail(V), `tails.py`

cuBLAS computes P. A rank sends each row of P to the ranks that add it up, as packets of two values and the
epoch: for an all_reduce to every peer, for a reduce_scatter to the owner of the row. A program takes the
packets of one row from all ranks, adds them up, applies the tail and stores the results. There is no signal,
and nothing to reset: a packet with another epoch has not arrived.

Shares of the programs are those of `matmul_packets` (`packet_shares.py`): part A sends rows, part B adds up.

A rank has two halves of packets [W, owned, columns / 2] (int64), by their source.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import Need, PeerMemory, cdiv, launch

from .comm import CODES_PER_SITE, REDUCING, begin, half_of, peer, put_packets
from .packet_shares import end_packets, look, mark, next_item, take_or_help
from .payloads import sum_of_payloads
from .shares import A, announce, start
from .tails import NO_TAIL, UNIT, TailSpec, apply_tail, places, read_operands, rows_fit, write

MOST_TAKEN = 32
"""Packets that a thread can hold."""
MOST_WARPS = 16


@dataclass(frozen=True)
class RowPacketsConfig:
    """taken: packets of a row, from all ranks, that a thread takes at a time, if a program has so many
    threads."""

    taken: int = 16

    def warps(self, columns: int, world: int) -> int:
        """Of a program, which takes a row at a time."""
        return max(4, min(MOST_WARPS, _packets(columns, world) // (32 * self.taken)))


def _packets(columns: int, world: int) -> int:
    """Of a row from all ranks, padded."""
    return int(triton.next_power_of_2(world) * triton.next_power_of_2(columns) // 2)


def row_packets_fit(columns: int, world: int) -> bool:
    """Whether the threads of a program can hold the packets of a row from all ranks."""
    return rows_fit(columns) and _packets(columns, world) <= MOST_TAKEN * 32 * MOST_WARPS


def _owned(rows: int, world: int, all_ranks: bool) -> int:
    """Rows that a rank adds up."""
    return rows if all_ranks else cdiv(rows, world)


def row_packets_needs(rows: int, columns: int, world: int, all_ranks: bool) -> Need:
    """The memory of a call on `[rows, columns]`."""
    return Need(packets=2 * world * _owned(rows, world, all_ranks) * (columns // 2) * 8)


@triton.jit(do_not_specialize=["rows", "owned", "units", "programs", "rank", "site"])
def exchange_row_packets(
    product, o0, o1, o2, o3, o4, o5, r0, r1, r2, r3, packets, state, rows, owned, units, programs, rank,
    site, packets_half,
    W: tl.constexpr, ALL: tl.constexpr, MEAN: tl.constexpr, COLUMNS: tl.constexpr,
    SOURCES: tl.constexpr, STAGES: tl.constexpr, OPERANDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid: `programs`, one a multiprocessor.

    product: [rows, units * UNIT]; owned: rows that a rank adds up; r0 to r3: [owned rows, .]; packets: int64
    [W], addresses of the packet memory of all ranks; SOURCES: the power of two above W.
    """
    program = tl.program_id(0)
    start(state)
    epoch = begin(state)
    dtype: tl.constexpr = product.dtype.element_ty
    columns = units * UNIT
    pitch = units * (UNIT // 2)
    base = half_of(epoch) * packets_half
    pairs_of_product = product.to(tl.pointer_type(tl.uint32))
    send_rows(
        pairs_of_product, packets, rows, owned, rank, program, pitch, base, epoch, programs, W, ALL, COLUMNS
    )
    mark(state, A, program, epoch)
    if program == 0:
        announce(state, rank, W, epoch)
    operands, results = (o0, o1, o2, o3, o4, o5), (r0, r1, r2, r3)
    own = peer(packets, rank, tl.int64) + base
    source = tl.arange(0, SOURCES)[:, None]
    pair = tl.arange(0, COLUMNS // 2)
    column = tl.arange(0, COLUMNS)
    line = tl.arange(0, 1)
    first = 0 if ALL else rank * owned
    count = tl.minimum(owned, rows - first)
    item = program
    share = tl.full((), -1, tl.int32)  # of another program
    left = tl.full((), 0, tl.int32)  # 1: the last program adds up in the place of this one
    last = tl.full((), 0, tl.int32)
    behind = tl.full((), 0, tl.int32)  # of the last program: whose rows were left
    going = tl.full((), 1, tl.int32)
    while going != 0:
        if share >= 0:
            send_rows(
                pairs_of_product, packets, rows, owned, rank, share, pitch, base, epoch, programs, W, ALL,
                COLUMNS,
            )  # fmt: skip
            if share == 0:
                announce(state, rank, W, epoch)
            share = tl.full((), -1, tl.int32)
        seen = look(state, programs, epoch)
        while (item < count) & (share < 0):
            mine = tl.load(
                pairs_of_product + (first + item).to(tl.int64) * pitch + pair, mask=pair < pitch, other=0
            )
            where = (source * owned + item) * pitch + pair[None, :]
            wanted = (source < W) & (source != rank) & (pair < pitch)[None, :]
            code = site * CODES_PER_SITE + REDUCING
            parts, share, _, left = take_or_help(
                own + where, epoch, wanted, state, code, source, item, program, programs, programs, rank, W,
                last, LEAVES=True, ADDS=False,
            )  # fmt: skip
            if left != 0:
                item = count
            elif share < 0:
                found = tl.where(source == rank, mine[None, :], parts.to(tl.uint32))
                total = sum_of_payloads(found, source, W, dtype)[None, :]
                if MEAN:
                    total /= W
                at = item + line
                blocks = read_operands(operands, at, at < count, column, columns, OPERANDS)
                values = apply_tail(total.to(dtype), blocks, at < count, column, columns, STAGES)
                for i in tl.static_range(len(WHOLE)):
                    write(results[i], values[i], at, at < count, column, columns, WHOLE[i])
                item += programs
        if (share < 0) & (item >= count):
            share, item, left, last, behind, going = next_item(
                seen, item, left, last, behind, going, program, programs, state, epoch
            )
    if last != 0:
        end_packets(state, epoch)


@triton.jit
def send_rows(
    pairs_of_product, packets, rows, owned, rank, share, pitch, base, epoch,
    programs, W: tl.constexpr, ALL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Send every `programs`-th row from number `share` on to those that add it up."""
    pair = tl.arange(0, COLUMNS // 2)
    for unit in range(share, owned if ALL else (W - 1) * owned, programs):
        within = unit % owned
        owner = (rank + 1 + unit // owned) % W
        row = within if ALL else owner * owned + within
        inside = (pair < pitch) & (row < rows)
        pairs = tl.load(pairs_of_product + row.to(tl.int64) * pitch + pair, mask=inside, other=0)
        to = base + (rank * owned + within) * pitch + pair
        if ALL:
            for p in tl.static_range(1, W):
                put_packets(peer(packets, (rank + p) % W, tl.int64) + to, pairs, epoch, inside)
        else:
            put_packets(peer(packets, owner, tl.int64) + to, pairs, epoch, inside)


def launch_exchange_row_packets(
    memory: PeerMemory,
    product: Tensor,
    results: Sequence[Tensor],
    mean: bool,
    all_ranks: bool,
    config: RowPacketsConfig,
    site: int = 0,
    compile_only: bool = False,
    operands: Sequence[Tensor] = (),
    tail: TailSpec = NO_TAIL,
) -> None:
    """`results = tail(sum (mean) over ranks of product)`: all rows, or this rank's of equally many.

    Arguments are those of `launch_exchange_rows`, of 16 bits, with columns that `row_packets_fit`. memory: at
    least `row_packets_needs`.
    """
    (rows, columns), world = product.shape, memory.world
    tail = tail if tail.results else tail._replace(results=((product.dtype, True),))
    owned = _owned(rows, world, all_ranks)
    sent = owned if all_ranks else (world - 1) * owned
    programs = min(memory.programs, triton.next_power_of_2(sent))
    launch(
        exchange_row_packets, programs, compile_only,
        product, *places(operands, results), memory.packets.addresses, memory.state,
        rows, owned, columns // UNIT.value, programs, memory.rank, site, memory.packets.half(torch.int64),
        W=world, ALL=all_ranks, MEAN=mean, COLUMNS=triton.next_power_of_2(columns),
        SOURCES=triton.next_power_of_2(world), **tail.constants, num_warps=config.warps(columns, world),
        num_stages=1,
    )  # fmt: skip
