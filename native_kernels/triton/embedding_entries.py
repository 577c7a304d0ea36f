"""The entries of a rank's tables, sorted by row, from which the gradients of the tables are added up.

Entry k of table t is `indices[t][k]`. Its key is its row, counted through all tables; each table has one more
row, for entries without effect. Entries of one key keep their order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autofuse.native_kernels.gpu.memory import PeerMemory, cdiv, launch

from .embedding_bags import TABLE, bags_of, report_faults
from .embedding_exchange import FP16, FP32, SOURCE
from .embedding_tables import WORDS_WORK, Tables

BAGS, LANES, WARPS, PER_SM = 32, 128, 4, 4

# Words of the work before a table.
ENTRY, KEY, FIRST_BLOCK, FIRST_CHUNK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
WORK = tl.constexpr(WORDS_WORK)
NEVER = tl.constexpr((1 << 63) - 1)


@dataclass(frozen=True)
class Entries:
    """The entries of all tables, `[N]`, sorted. keys: int32, or int64 where there are too many rows; bags:
    int32; scales: fp32, factors of the gradients of the bags, empty if all are 1."""

    keys: Tensor
    bags: Tensor
    scales: Tensor


@triton.jit(do_not_specialize=["count", "bags", "blocks", "padding", "site"])
def list_entries(
    words, keys, bag_of, scales, state, count, bags, blocks, padding, site,
    PROGRAMS: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr, LAST: tl.constexpr, BB: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Grid: PROGRAMS. Store the key, bag and scale of every entry, in the order of tables and indices.

    words: `backward_words`; bags: of all ranks; blocks: of BB bags; KIND: dtype of samples.
    """
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    DTYPE: tl.constexpr = tl.float32 if KIND == FP32 else (tl.float16 if KIND == FP16 else tl.bfloat16)
    tables = words + W * SOURCE
    work = tables + count * TABLE
    lanes = tl.arange(0, LANES)
    in_block = tl.arange(0, BB)
    broken = tl.zeros((BB,), tl.int32)
    faults = tl.zeros((LANES,), tl.int32)
    for item in range(tl.program_id(0), count * blocks, PROGRAMS):
        table = tables + item % count * TABLE
        block = item // count
        first_entry = tl.load(work + item % count * WORK + ENTRY)
        first_key = tl.load(work + item % count * WORK + KEY)
        rows = tl.load(table + 1)
        indices = tl.load(table + 2).to(tl.pointer_type(INDEX))
        entries = tl.load(table + 3)
        offsets = tl.load(table + 4).to(tl.pointer_type(INDEX))
        samples = tl.load(table + 5).to(tl.pointer_type(DTYPE))
        _, _, bad, inside = bags_of(table, 0, block, bags, bags, INDEX, LAST, BB)
        broken |= bad.to(tl.int32)
        starts = tl.load(offsets + block * BB + in_block, mask=inside, other=0).to(tl.int64)
        starts = tl.where(inside, starts, NEVER)
        end = entries
        if LAST:
            end = tl.minimum(end, tl.load(offsets + bags).to(tl.int64))
        # Entries before the first bag and behind the last one are listed, too, and have no effect.
        after = (block + 1) * BB
        start = tl.load(offsets + block * BB).to(tl.int64)
        start = tl.where(block == 0, 0, tl.maximum(start, 0))
        stop = tl.load(offsets + after, mask=after < bags, other=0).to(tl.int64)
        stop = tl.where(after < bags, tl.minimum(stop, entries), entries)
        rounds = tl.cdiv(tl.maximum(stop - start, 0), LANES).to(tl.int32)
        used = tl.zeros((BB,), tl.int32)
        if MEAN:
            for j in range(rounds):
                at = start + (j * LANES + lanes)
                index = tl.load(indices + at, mask=at < stop, other=-1).to(tl.int64)
                keep = (at < end) & (index.to(tl.uint64) < rows.to(tl.uint64)) & (index != padding)
                bag = tl.sum((starts[None, :] <= at[:, None]).to(tl.int32), axis=1) - 1
                mine = (bag[:, None] == in_block[None, :]) & keep[:, None]
                used += tl.sum(mine.to(tl.int32), axis=0)
        share = 1.0 / tl.maximum(used, 1).to(tl.float32)
        for j in range(rounds):
            at = start + (j * LANES + lanes)
            here = at < stop
            index = tl.load(indices + at, mask=here, other=0).to(tl.int64)
            bag = tl.sum((starts[None, :] <= at[:, None]).to(tl.int32), axis=1) - 1
            known = index.to(tl.uint64) < rows.to(tl.uint64)
            in_bag = here & (at < end) & (bag >= 0)
            faults |= (in_bag & (known == 0)).to(tl.int32)
            keep = in_bag & known & (index != padding)
            to = first_entry + at
            key = first_key + tl.where(keep, index, rows)
            tl.store(keys + to, key.to(keys.dtype.element_ty), mask=here)
            tl.store(bag_of + to, block * BB + bag, mask=here)
            scale = tl.full((LANES,), 1.0, tl.float32)
            if MEAN:
                scale = tl.sum(tl.where(bag[:, None] == in_block[None, :], share[None, :], 0.0), axis=1)
            if WEIGHTED:
                scale *= tl.load(samples + at, mask=keep, other=0.0).to(tl.float32)
            if MEAN or WEIGHTED:
                tl.store(scales + to, scale, mask=here)
    if (tl.max(broken, axis=0) | tl.max(faults, axis=0)) != 0:
        report_faults(
            tables, state, site, 0, bags, count, tl.program_id(0), count * blocks, count * blocks, PROGRAMS,
            1, INDEX, LAST, BB, 1, False,
        )  # fmt: skip


def is_scaled(tables: Tables) -> bool:
    """Whether the gradients of bags have factors."""
    return tables.mode == 1 or bool(tables.samples)


def sorted_entries(
    memory: PeerMemory, words: Tensor, tables: Tables, bags: int, site: int = 0, compile_only: bool = False
) -> Entries:
    """The entries of `bags` bags of every table; words: `backward_words`, on the device.

    compile_only: compile, and neither list nor sort them.
    """
    device, count = tables.indices[0].device, sum(i.shape[0] for i in tables.indices)
    rows = sum(w.shape[0] + 1 for w in tables.weights)
    keys = torch.empty(count, dtype=torch.int32 if rows < 1 << 31 else torch.int64, device=device)
    bag_of = torch.empty(count, dtype=torch.int32, device=device)
    scaled = is_scaled(tables)
    scales = torch.empty(count if scaled else 0, dtype=torch.float32, device=device)
    programs = memory.programs * PER_SM
    launch(
        list_entries, programs, compile_only,
        words, keys, bag_of, scales, memory.state, len(tables.weights), bags, cdiv(bags, BAGS),
        tables.padding, site,
        PROGRAMS=programs, W=memory.world, KIND=tables.kinds(), WIDE=tables.indices[0].dtype == torch.int64,
        MEAN=tables.mode == 1, WEIGHTED=bool(tables.samples), LAST=int(tables.last), BB=BAGS, LANES=LANES,
        num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    if compile_only:
        return Entries(keys, bag_of, scales)
    keys, order = torch.sort(keys, stable=True)
    return Entries(keys, bag_of[order], scales[order] if scaled else scales)
