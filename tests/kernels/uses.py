"""What calls use of the regions of a group, by their needs and by the parameters of their launches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.gpu.dense.tails import tail_of
from autofuse.lowering.gpu.embedding.places import backward_places, places_of
from autofuse.native_kernels.cuda.kernels import (
    dropless_combine,
    dropless_dispatch,
    expert_combine,
    expert_dispatch,
    gather_words,
    matmul_words,
)
from autofuse.native_kernels.cuda.kernels import gather_matmul as cuda_gather
from autofuse.native_kernels.cuda.kernels import matmul_reduce as cuda_reduce
from autofuse.native_kernels.gpu.memory import Need, PeerMemory
from autofuse.native_kernels.gpu.state import TAIL_UNIT
from autofuse.native_kernels.triton import (
    embedding_backward,
    embedding_exchange,
    embedding_tables,
    exchange_bags,
    exchange_row_packets,
    exchange_rows,
    exchange_sums,
    exchange_tokens,
    gather_matmul,
    gather_matmul_few,
    matmul_gather,
    matmul_gather_packets,
    matmul_packets,
    matmul_reduce,
)
from tests.kernels.launched import launched

BF16, FP32 = torch.bfloat16, torch.float32
Used = dict[str, list[tuple[int, int]]]
"""By region, the bytes of each of its parts that a call uses: first, and behind the last."""


@dataclass(frozen=True)
class Use:
    """A kind of call: what it says that it needs, and what its launch parameters say that it uses."""

    name: str
    need: Need
    used: Callable[[PeerMemory], Used]


def matrix(rows: int, cols: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(rows, cols, dtype=dtype)


def halves(begin: int, nbytes: int) -> list[tuple[int, int]]:
    return [(0, nbytes), (begin, begin + nbytes)]


def rows(world: int, m: int, n: int) -> Iterator[Use]:
    """With a tail that returns a matrix and two columns."""
    full, gamma = matrix(m * world, n), matrix(1, n)
    for everywhere, once in ((True, True), (True, False), (False, False)):
        config = exchange_rows.RowsConfig(once=once)
        have = m * (world if everywhere else 1)
        tail = tail_of("mul %0; to float32; standardize 1e-05 keep", BF16, have, [gamma])
        written = sum(tail.row_bytes(n))

        def used(
            memory: PeerMemory, config: Any = config, everywhere: bool = everywhere, tail: Any = tail,
            have: int = have,
        ) -> Used:  # fmt: skip
            results = tail.empty(full, have, n)
            p = launched(
                exchange_rows.launch_exchange_rows, memory, full, results, False, everywhere, config,
                operands=[gamma], tail=tail,
            )  # fmt: skip
            owners = everywhere and not config.once
            count = world * p["items"] * p["ROWS"]
            end = 0
            for offset, nbytes in zip((p["f0"], p["f1"], p["f2"]), tail.row_bytes(n), strict=True):
                assert offset * 16 >= end, "results overlap"
                end = offset * 16 + count * nbytes
            return {
                "inbox": halves(p["inbox_half"] * TAIL_UNIT * 2, count * n * 2),
                "finished": halves(p["finished_half"] * 16, end * owners),
                "signals": halves(p["signals_half"] * 4, 2 * world * p["items"] * 4),
            }

        needs = exchange_rows.rows_needs(m * world, n, 2, world, everywhere, config, written)
        yield Use("rows", needs, used)

    for everywhere in (True, False):

        def packets(memory: PeerMemory, everywhere: bool = everywhere) -> Used:
            out = matrix(m * (world if everywhere else 1), n)
            p = launched(
                exchange_row_packets.launch_exchange_row_packets, memory, full, [out], False, everywhere,
                exchange_row_packets.RowPacketsConfig(),
            )  # fmt: skip
            return {"packets": halves(p["packets_half"] * 8, world * p["owned"] * n // 2 * 8)}

        needs = exchange_row_packets.row_packets_needs(m * world, n, world, everywhere)
        yield Use("row_packets", needs, packets)


def dense(world: int, m: int, k: int, n: int, dtype: torch.dtype) -> Iterator[Use]:
    """m: rows of a rank; dtype: of embeddings."""
    x, w, full, part = matrix(m * world, k), matrix(k, n), matrix(m * world, n), matrix(m, k)

    for by_rows, everywhere in product((True, False), (True, False)):
        reduce = matmul_reduce.ReduceConfig(by_rows=by_rows, bt=32)

        def used(memory: PeerMemory, config: Any = reduce, everywhere: bool = everywhere) -> Used:
            p = launched(
                matmul_reduce.launch_matmul_reduce, memory, [x], [w], full, False, everywhere, 1, 0, config
            )
            chunk = p["rows"] * config.bm * p["pitch"]
            counters = world * p["rows"] * p["cols"]
            counters += counters * config.bm // config.bt * everywhere
            return {
                "inbox": halves(p["inbox_half"] * p["pitch"] * 2, world * chunk * 2),
                "finished": halves(p["finished_half"] * 2, world * chunk * 2 * everywhere),
                "signals": halves(p["signals_half"] * 4, counters * 4),
            }

        needs = matmul_reduce.reduce_needs(m * world, n, 1, 2, world, everywhere, reduce)
        yield Use("tiles", needs, used)

    for everywhere, once in ((True, True), (True, False), (False, False)):
        sums = exchange_sums.SumsConfig(once=once)

        def used(memory: PeerMemory, config: Any = sums, everywhere: bool = everywhere) -> Used:
            p = launched(
                exchange_sums.launch_exchange_sums, memory, full, full, False, everywhere, config
            )  # fmt: skip
            regions = 2 if everywhere and not config.once else 1
            return {"words": halves(p["inbox_half"] * 16, regions * world * p["items"] * config.length * 2)}

        yield Use("sums", exchange_sums.sums_needs(full.numel(), 2, world, everywhere, sums), used)

    if n % TAIL_UNIT == 0:
        yield from rows(world, m, n)

    for config in (cuda_reduce.ClusterReduceConfig(), cuda_reduce.ClusterReduceConfig(bn=128, update=True)):

        def used(memory: PeerMemory, config: Any = config) -> Used:
            run, everywhere = cuda_reduce.launch_cluster_reduce, not config.update
            p = launched(run, memory, [x], [w], full, False, everywhere, 1, 0, config)
            tiles = world * p["rows"] * p["cols"]
            nbytes, words = tiles * 128 * config.bn * 2, 0
            if not config.update:
                words = nbytes
            return {
                "words" if config.update else "inbox": halves(
                    p["inbox_half"], nbytes // (world if config.update else 1)
                ),
                "signals": halves(p["signals_half"] * 4, tiles * 4),
            } | ({"words": halves(p["words_half"], words)} if words else {})

        needs = cuda_reduce.cluster_reduce_needs(m * world, n, 1, 2, world, not config.update, config)
        yield Use("clusters", needs, used)

    for through in (False, True):

        def used(memory: PeerMemory, through: bool = through) -> Used:
            config, outer = matmul_gather.PublishConfig(), 2 if through else 1
            out = matrix(2 * m * world, n)
            p = launched(
                matmul_gather.launch_matmul_gather, memory, matrix(2 * m, k), w, out, 0, outer, config
            )
            slot = p["rows"] * config.bm * p["pitch"]
            return {
                "inbox": halves(p["inbox_half"] * p["pitch"] * 2, (world - 1 + through) * slot * 2),
                "signals": halves(p["signals_half"] * 4, world * p["rows"] * p["cols"] * 4),
            }

        outer = 2 if through else 1
        yield Use(
            "publish",
            matmul_gather.publish_needs(2 * m, n, outer, 2, world, matmul_gather.PublishConfig()),
            used,
        )

    for movers in (2, 96):

        def used(memory: PeerMemory, movers: int = movers) -> Used:
            config = gather_matmul.GatherConfig(movers=movers, slices=4)
            p = launched(gather_matmul.launch_gather_matmul, memory, part, [w], [full], 1, config)
            return {
                "inbox": halves(p["gathered_half"] * k * 2, world * m * k * 2),
                "signals": halves(p["signals_half"] * 4, world * p["slices"] * 4),
            }

        config = gather_matmul.GatherConfig(movers=movers, slices=4)
        yield Use("parts", gather_matmul.gather_needs(m, k, [n], 1, 2, world, config), used)

    def gathered(memory: PeerMemory) -> Used:
        config = cuda_gather.ClusterGatherConfig(within=True, k_slices=8)
        p = launched(cuda_gather.launch_cluster_gather, memory, part, [w], [full], 1, config)
        return {
            "inbox": halves(p["half_rows"] * k * 2, world * m * k * 2),
            "signals": halves(p["signals_half"] * 4, world * p["slices"] * p["k_slices"] * 4),
        }

    clusters = cuda_gather.ClusterGatherConfig(within=True, k_slices=8)
    yield Use("gather", cuda_gather.cluster_gather_needs(m, k, 2, world, clusters), gathered)

    columns = [n // 8] * world
    places = places_of("bsc", 0, m, columns, [columns[0]])
    bags = embedding_tables.BagsConfig()

    def tables() -> embedding_tables.Tables:
        index = torch.zeros(0, dtype=torch.int64)
        return embedding_tables.Tables([matrix(4, columns[0], dtype)], [index], [torch.zeros(m * world)], [])

    def pooled(memory: PeerMemory) -> Used:
        out = torch.empty(m, sum(columns), dtype=dtype)
        p = launched(
            embedding_exchange.launch_embedding_exchange, memory, torch.empty(0), tables(), places, out, bags
        )
        return {
            "inbox": halves(p["inbox_half"] * dtype.itemsize, m * sum(columns) * dtype.itemsize),
            "signals": halves(p["signals_half"] * 4, world * p["slices"] * 4),
        }

    yield Use("bags", embedding_tables.exchange_needs(places, dtype.itemsize, world, bags), pooled)

    for everywhere, once in ((True, True), (True, False), (False, False)):
        pooling = exchange_bags.BagSumsConfig(once=once)

        def summed(memory: PeerMemory, config: Any = pooling, everywhere: bool = everywhere) -> Used:
            of, out = embedding_tables.Places(m * world, (0,), n, ()), torch.empty(m * world, n, dtype=dtype)
            run = exchange_bags.launch_exchange_bags
            p = launched(run, memory, torch.empty(0), tables(), of, out, False, everywhere, config)
            nbytes = world * p["items"] * config.tile * dtype.itemsize
            return {
                "inbox": halves(p["inbox_half"] * 8 * dtype.itemsize, nbytes),
                "finished": halves(
                    p["finished_half"] * 8 * dtype.itemsize, nbytes * (everywhere and not config.once)
                ),
                "signals": halves(p["signals_half"] * 4, 2 * world * p["slices"] * 4),
            }

        needs = exchange_bags.bag_sums_needs(m * world, n, dtype.itemsize, world, everywhere, pooling)
        yield Use("bag sums", needs, summed)

        adding = exchange_tokens.TokensConfig(once=once)

        def added(memory: PeerMemory, config: Any = adding, everywhere: bool = everywhere) -> Used:
            rows, out = matrix(m * world, n, dtype), torch.empty(m * world, n, dtype=dtype)
            of = exchange_tokens.TokenRows(rows, None, None, None, None, m * world, 1, False)
            run = exchange_tokens.launch_exchange_tokens
            p = launched(run, memory, of, out, False, everywhere, config)
            nbytes = world * p["items"] * config.length * dtype.itemsize
            regions = 2 if everywhere and not config.once else 1
            return {"words": halves(p["inbox_half"] * 16, regions * nbytes)}

        elements = m * world * n
        needs = exchange_sums.sums_needs(elements, dtype.itemsize, world, everywhere, adding)
        yield Use("token sums", needs, added)

    def strips(memory: PeerMemory) -> Used:
        back = backward_places("bsc", 0, m, columns, [columns[0]])
        none = torch.empty(0, dtype=torch.int64)
        entries: Any = type("Entries", (), {"keys": none, "bags": none, "scales": none})()
        grad = torch.empty(m, sum(columns), dtype=dtype)
        p = launched(
            embedding_backward.launch_embedding_backward, memory, none, tables(), back, entries, grad, None,
            embedding_tables.BackwardConfig(),
        )  # fmt: skip
        return {
            "inbox": halves(p["inbox_half"] * dtype.itemsize, world * m * columns[0] * dtype.itemsize),
            "signals": halves(p["signals_half"] * 4, world * 4),
        }

    yield Use("strips", embedding_tables.backward_needs(m, columns, dtype.itemsize), strips)


def few(world: int, chunk: int, k: int, n: int) -> Iterator[Use]:
    """`chunk` rows of a rank, at most 128 in all."""
    m = world * chunk
    x, w, out, part = matrix(m, k), matrix(k, n), matrix(m, n), matrix(chunk, k)

    for once in (False, True):

        def used(memory: PeerMemory, once: bool = once) -> Used:
            config = matmul_packets.PacketsConfig(once=once)
            p = launched(matmul_packets.launch_matmul_packets, memory, [x], [w], out, False, True, config)
            return {"packets": halves(p["packets_half"] * 8, (1 if once else 2) * world * p["slot"] * 8)}

        config = matmul_packets.PacketsConfig(once=once)
        yield Use("packets", matmul_packets.packets_needs(m, n, world, config), used)

        def worded(memory: PeerMemory, once: bool = once) -> Used:
            config = matmul_words.WordsConfig(once=once)
            p = launched(matmul_words.launch_matmul_words, memory, [x], [w], out, False, True, config)
            return {"words": halves(p["half"], (1 if once else 2) * world * p["height"] * n * 2)}

        needs = matmul_words.words_needs(m, n, 2, world, True, matmul_words.WordsConfig(once=once))
        yield Use("words", needs, worded)

    def published(memory: PeerMemory) -> Used:
        config = matmul_gather_packets.PublishPacketsConfig()
        p = launched(matmul_gather_packets.launch_matmul_gather_packets, memory, part, w, out, 0, 1, config)
        return {"packets": halves(p["packets_half"] * 8, (world - 1) * chunk * p["pitch"] * 8)}

    needs = matmul_gather_packets.publish_packets_needs(
        chunk, n, world, matmul_gather_packets.PublishPacketsConfig()
    )
    yield Use("publish packets", needs, published)

    def gathered(memory: PeerMemory) -> Used:
        config = gather_matmul_few.FewConfig(pieces=1, movers=1)
        p = launched(gather_matmul_few.launch_gather_matmul_few, memory, part, w, out, config)
        return {
            "inbox": halves(p["gathered_half"] * k * 2, m * k * 2),
            "signals": halves(p["signals_half"] * 4, world * 4),
        }

    config = gather_matmul_few.FewConfig(pieces=1, movers=1)
    yield Use("few", gather_matmul_few.few_needs(chunk, k, n, 2, world, config), gathered)

    def thirds(memory: PeerMemory) -> Used:
        config = gather_words.WordsGatherConfig()
        p = launched(gather_words.launch_gather_words, memory, part, w, out, config)
        sums = p["tiles"] * config.groups * 64 * gather_words.tokens_of(m) * 4 * config.pieces
        begin = gather_words.HEAD
        return {
            "gathers": [(begin + i * p["third"], begin + i * p["third"] + m * k * 2) for i in range(3)],
            "words": halves(p["half"], sums),
            "signals": halves(p["signals_half"] * 4, world * 4 * (m > 64)),
        }

    words = gather_words.WordsGatherConfig()
    yield Use("gather words", gather_words.words_gather_needs(m, k, n, 2, world, words), thirds)


def experts(world: int, run: int, k: int, n: int) -> Iterator[Use]:
    """`run` rows of each of two experts for each rank; as many without a capacity."""
    count, rows = 2, run * world
    x, w = torch.empty(count, rows, k, dtype=BF16), torch.empty(count, k, n, dtype=BF16)

    def combined(memory: PeerMemory) -> Used:
        config = expert_combine.CombineConfig(across=1)
        out = torch.empty(world, count, run, n, dtype=BF16)
        p = launched(expert_combine.launch_expert_combine, memory, [x], [w], out, 1, 0, config)
        return {
            "inbox": halves(p["inbox_half"], world * p["part_rows"] * p["cols"] * config.bn * 2),
            "signals": halves(p["signals_half"] * 4, world * p["rows"] * p["cols"] * 4),
        }

    yield Use(
        "combine",
        expert_combine.combine_needs(count, rows, n, 1, world, expert_combine.CombineConfig(across=1)),
        combined,
    )

    def dispatched(memory: PeerMemory) -> Used:
        sent = torch.empty(world, count, run, k, dtype=BF16)
        out = torch.empty(count, rows, n, dtype=BF16)
        config = expert_dispatch.DispatchConfig(across=1)
        p = launched(expert_dispatch.launch_expert_dispatch, memory, sent, [w], [out], 1, config)
        return {
            "inbox": halves(p["half"], count * rows * k * 2),
            "signals": halves(p["signals_half"] * 4, world * p["slices"] * 4),
        }

    yield Use(
        "dispatch",
        expert_dispatch.dispatch_needs(count, rows, k, world, expert_dispatch.DispatchConfig(across=1)),
        dispatched,
    )
    splits, config = [count * run] * world, dropless_combine.DroplessConfig()
    total = sum(splits)

    def any_combined(memory: PeerMemory) -> Used:
        p = launched(
            dropless_combine.launch_dropless_combine, memory, [x.flatten(0, 1)], [w], matrix(total, n), None,
            None, splits, splits, config,
        )  # fmt: skip
        assert p["slots"] * dropless_combine.SLICE >= total
        return {
            "inbox": halves(p["inbox_half"], total * n * 2),
            "signals": halves(p["signals_half"] * 4, (dropless_combine.STARTS + world * p["slots"]) * 4),
        }

    yield Use("dropless combine", dropless_combine.dropless_combine_needs(total, n, world), any_combined)

    def any_dispatched(memory: PeerMemory) -> Used:
        p = launched(
            dropless_dispatch.launch_dropless_dispatch, memory, matrix(total, k), [w], [matrix(total, n)],
            None, None, splits, splits, config,
        )  # fmt: skip
        blocks = -(-total // dropless_dispatch.SLICE)
        assert p["slot"] >= total
        return {
            "inbox": halves(p["half"], total * k * 2),
            "finished": halves(p["places_half"] * 4, world * p["slot"] * 4),
            "signals": halves(p["signals_half"] * 4, (dropless_dispatch.STARTS + blocks) * 4),
        }

    yield Use("dropless dispatch", dropless_dispatch.dropless_dispatch_needs(total, k, world), any_dispatched)
