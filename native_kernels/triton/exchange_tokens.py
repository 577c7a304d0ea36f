"""Sums over the ranks of the rows of experts that are added up token by token.

    P[t] = A[t] + sum over j < K of f[r] * X[r] * g[i],  r = index[i]      in fp32, rounded once
    Y    = sum over ranks of P, fp32, in rank order, rounded once          P: [tokens, columns]

`X: [R, columns]` is what a grouped matmul has made, or an embedding table; i is entry `t * K + j`, or
`j * tokens + t`. P is cut into items and chunks as the matrix of `exchange_sums` is, whose parts B and C
these are:

A. A program computes an item of P and sends it to its owner, its own too, with ONCE to every rank. Owners
   come from the next rank on, this rank last.

The memory for words is that of `exchange_sums`.

`token_sums` is the sum of a rank alone, for collectives of libraries.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import PeerMemory, cdiv, launch

from .by_turns import firm_program, first_unit, next_share
from .comm import BAD_INDEX, BAD_INPUT, CODES_PER_SITE, STATE_RECORD, begin, half_of, is_last
from .exchange_sums import UNIT, SumsConfig, take_turn
from .shares import A, announce, claim, end_shares, start
from .words import LINE, place_of_words, word_of


@dataclass(frozen=True)
class TokensConfig(SumsConfig):
    """`SumsConfig` with items of fewer elements: a program has K times as many on their way."""

    length: int = 1024
    per_sm: int = 4


@dataclass(frozen=True)
class TokenRows:
    """The rows of this rank. rows: [R, columns], adjacent columns; index: int64 [tokens * k], None: row i is
    entry i; before, behind: factors of rows and of entries, or one for all; added: [tokens, columns]; all are
    contiguous; k: entries of a token, which with `fold` are `j * tokens + t`, else `t * k + j`.

    A behind of bool, one for each entry, is no factor: an entry where it is not `counts` is 0."""

    rows: Tensor
    index: Tensor | None
    before: Tensor | None
    behind: Tensor | None
    added: Tensor | None
    tokens: int
    k: int
    fold: bool
    counts: bool = True

    @property
    def columns(self) -> int:
        return self.rows.shape[1]

    def pointers(self) -> tuple[Tensor, ...]:
        """As kernels take them; those that are missing are not read."""
        others = (self.index, self.before, self.behind, self.added)
        return self.rows, *(self.rows if t is None else t for t in others)

    def numbers(self) -> tuple[int, ...]:
        """Rows, tokens, units of a row of P, and units between rows."""
        unit = UNIT.value
        return self.rows.shape[0], self.tokens, self.columns // unit, self.rows.stride(0) // unit

    def options(self) -> dict[str, int]:
        """constexprs. STEP: rows that are read at once. Of factors: 0 none, 1 one for all, 2 one for each;
        3, 4: entries count where it is true, or false."""
        step = max(n for n in range(1, 9) if self.k % n == 0)
        counts = [0 if t is None else 1 if t.numel() == 1 else 2 for t in (self.before, self.behind)]
        if self.behind is not None and self.behind.dtype == torch.bool:
            counts[1] = 3 if self.counts else 4
        return {
            "K": self.k, "STEP": step, "FOLD": self.fold, "TAKEN": self.index is not None,
            "BEFORE": counts[0], "BEHIND": counts[1], "ADDED": self.added is not None,
        }  # fmt: skip


@triton.jit
def sum_of_tokens(
    x, index, before, behind, added, begun, count, rows, tokens, width, stride,
    K: tl.constexpr, STEP: tl.constexpr, FOLD: tl.constexpr, TAKEN: tl.constexpr, BEFORE: tl.constexpr,
    BEHIND: tl.constexpr, ADDED: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """`count` units of P from unit `begun` on, at most LENGTH elements: [LENGTH // UNIT, UNIT]; which units
    exist; and which have an index that names no row, whose row counts as 0."""
    lane = tl.arange(0, UNIT)
    local = tl.arange(0, LENGTH // UNIT)
    inside = local < count
    unit = begun + local
    token = unit // width
    column = (unit - token * width) * UNIT
    total = tl.zeros((LENGTH // UNIT, UNIT), tl.float32)
    wrong = tl.full((LENGTH // UNIT,), False, tl.int1)
    for first in range(0, K, STEP):
        for step in tl.static_range(STEP):
            j = first + step
            entry = j * tokens + token if FOLD else token * K + j
            row = entry.to(tl.int64)
            there = inside
            if TAKEN:
                row = tl.load(index + entry, mask=inside, other=0)
                there = inside & (row >= 0) & (row < rows)
                wrong |= inside & ~there
            if BEHIND >= 3:
                there &= (tl.load(behind + entry, mask=inside, other=0) != 0) == (BEHIND == 3)
            at = row * stride * UNIT + column
            part = tl.load(x + at[:, None] + lane[None, :], mask=there[:, None], other=0.0).to(tl.float32)
            if BEFORE == 2:
                part *= tl.load(before + row, mask=there, other=0.0).to(tl.float32)[:, None]
            if BEHIND == 2:
                part *= tl.load(behind + entry, mask=inside, other=0.0).to(tl.float32)[:, None]
            total += part
    if BEFORE == 1:
        total *= tl.load(before).to(tl.float32)
    if BEHIND == 1:
        total *= tl.load(behind).to(tl.float32)
    if ADDED:
        at = unit.to(tl.int64) * UNIT
        total += tl.load(added + at[:, None] + lane[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    return total, inside, wrong


@triton.jit
def report_index(index, state, site, tokens, K: tl.constexpr, rows, LENGTH: tl.constexpr):
    """Search all entries for an index that names no row, and record one.

    One store of 8 bytes holds the record, code << 48 | index, so that two never mix.
    """
    record = tl.load(state + STATE_RECORD).to(tl.pointer_type(tl.int64)) + BAD_INPUT
    for first in range(0, tokens * K, LENGTH):
        entry = first + tl.arange(0, LENGTH)
        row = tl.load(index + entry, mask=entry < tokens * K, other=0)
        wrong = (row < 0) | (row >= rows)
        if tl.max(wrong.to(tl.int32), axis=0) != 0:
            shown = tl.minimum(tl.maximum(row, -(1 << 31)), (1 << 31) - 1)
            one = tl.max(tl.where(wrong, shown, -(1 << 31)), axis=0)
            code = (site * CODES_PER_SITE + BAD_INDEX).to(tl.int64)
            tl.store(record, (code << 48) | (one & 0xFFFFFFFF))


@triton.jit(
    do_not_specialize=[
        "rows", "tokens", "width", "stride", "elements", "chunk", "items", "rank", "site", "inbox_half",
    ]
)  # fmt: skip
def exchange_tokens(
    x, index, before, behind, added, out, inboxes, state,
    rows, tokens, width, stride, elements, chunk, items, rank, site, inbox_half,
    PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, W: tl.constexpr, ALL: tl.constexpr, ONCE: tl.constexpr,
    MEAN: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr, FOLD: tl.constexpr, TAKEN: tl.constexpr,
    BEFORE: tl.constexpr, BEHIND: tl.constexpr, ADDED: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS, PER_SM a multiprocessor.

    x, index, before, behind, added and their numbers: `TokenRows`; out: [tokens, columns], without ALL the
    own chunk; inboxes: int64 [W], addresses of the memory for words of all ranks; chunk: elements of an
    owner; items: of a chunk. width, stride, elements and chunk count in units, inbox_half in LINE bytes.
    """
    WIRE: tl.constexpr = out.dtype.element_ty
    program = tl.program_id(0)
    asked = claim(state, A, program, program)
    start(state)
    epoch = begin(state)
    half = half_of(epoch) * tl.cast(inbox_half, tl.int64) * LINE
    within = tl.arange(0, LENGTH // UNIT)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    faults = tl.full((), 0, tl.int32)
    end = items * (1 if ONCE else W)  # of part A
    units = tl.cast(items * (W if ALL and not ONCE else 1), tl.int32)
    unit = first_unit(asked, end, state, A, PROGRAMS, program)
    is_firm = firm_program(state, PROGRAMS, PER_SM)
    ticket, undrawn = units, tl.full((), True, tl.int1)
    while (unit < end) | (ticket < units) | undrawn:
        if unit < end:
            if unit == 0:
                announce(state, rank, W, epoch)
            item, owner = unit, rank
            if not ONCE:
                item, owner = unit // W, (rank + 1 + unit % W) % W
            skipped = item * (LENGTH // UNIT)
            begun = (0 if ONCE else owner) * chunk + skipped
            count = tl.minimum(chunk - skipped, elements - begun)
            total, inside, wrong = sum_of_tokens(
                x, index, before, behind, added, begun, count, rows, tokens, width, stride,
                K, STEP, FOLD, TAKEN, BEFORE, BEHIND, ADDED, LENGTH,
            )  # fmt: skip
            words = word_of(total.to(WIRE))
            sent = (inside | (tl.arange(0, LENGTH // UNIT) == 0))[:, None]
            for p in tl.static_range(W if ONCE else 1):
                to = place_of_words(tl.load(inboxes + (owner + p) % W), half, WIRE)
                tl.store(to + (rank * items + item).to(tl.int64) * LENGTH + within, words, mask=sent)
            faults |= tl.max(wrong.to(tl.int32), axis=0)
            unit += PROGRAMS
            if unit >= end:
                unit = next_share(end, state, A, PROGRAMS, program)
        ticket, undrawn = take_turn(
            ticket, undrawn, units, unit < end, is_firm, out, out, inboxes, state, elements, chunk, items,
            rank, site, half, epoch, PROGRAMS, PER_SM, W, ALL, ONCE, MEAN, LENGTH, True,
        )  # fmt: skip
    if TAKEN:
        if faults != 0:  # one of all indices is told
            report_index(index, state, site, tokens, K, rows, LENGTH)
    tl.debug_barrier()
    if is_last(state, PROGRAMS):
        end_shares(state, epoch, PROGRAMS)


@triton.jit(do_not_specialize=["rows", "tokens", "width", "stride", "elements"])
def token_sums(
    x, index, before, behind, added, out, rows, tokens, width, stride, elements,
    K: tl.constexpr, STEP: tl.constexpr, FOLD: tl.constexpr, TAKEN: tl.constexpr, BEFORE: tl.constexpr,
    BEHIND: tl.constexpr, ADDED: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Any grid. out: P; a token with an index that names no row is NaN."""
    lane = tl.arange(0, UNIT)
    for item in range(tl.program_id(0), tl.cdiv(elements, LENGTH // UNIT), tl.num_programs(0)):
        begun = item * (LENGTH // UNIT)
        total, inside, wrong = sum_of_tokens(
            x, index, before, behind, added, begun, elements - begun, rows, tokens, width, stride,
            K, STEP, FOLD, TAKEN, BEFORE, BEHIND, ADDED, LENGTH,
        )  # fmt: skip
        total = tl.where(wrong[:, None], float("nan"), total)
        at = (begun + tl.arange(0, LENGTH // UNIT)).to(tl.int64) * UNIT
        tl.store(out + at[:, None] + lane[None, :], total.to(out.dtype.element_ty), mask=inside[:, None])


def launch_exchange_tokens(
    memory: PeerMemory,
    of: TokenRows,
    out: Tensor,
    mean: bool,
    all_ranks: bool,
    config: TokensConfig,
    site: int = 0,
    compile_only: bool = False,
) -> None:
    """`out = sum (mean) over ranks of P`: all of it, or this rank's chunk of equally many tokens.

    out: contiguous, of the dtype that is exchanged; rows of it and of `of.rows` begin at multiples of 8
    elements. Every rank of the group makes the same calls, on as many tokens and columns, and may have
    another number of rows. memory.programs: multiprocessors.
    """
    world, elements, unit = memory.world, of.tokens * of.columns, UNIT.value
    items, programs = config.items(elements, world, all_ranks), memory.programs * config.per_sm
    launch(
        exchange_tokens, programs, compile_only,
        *of.pointers(), out, memory.words.addresses, memory.state,
        *of.numbers(), elements // unit, config.chunk(elements, world, all_ranks) // unit, items,
        memory.rank, site,
        memory.words.half(torch.uint8) // LINE.value,
        PROGRAMS=programs, PER_SM=config.per_sm, W=world, ALL=all_ranks, ONCE=config.once, MEAN=mean,
        **of.options(), LENGTH=config.length, num_warps=config.warps, num_stages=1,
        maxnreg=config.registers,
    )  # fmt: skip


def launch_token_sums(of: TokenRows, out: Tensor, programs: int, compile_only: bool = False) -> None:
    """`out = P`, [tokens, columns], contiguous. programs: multiprocessors. No rank waits for another."""
    config, elements = TokensConfig(), of.tokens * of.columns
    count = min(cdiv(elements, config.length), programs * 16)
    launch(
        token_sums, count, compile_only,
        *of.pointers(), out, *of.numbers(), elements // UNIT.value,
        **of.options(), LENGTH=config.length, num_warps=config.warps, num_stages=1,
    )  # fmt: skip
