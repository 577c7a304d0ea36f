"""Two ranks on one GPU, beside kernels that hold multiprocessors (docs/gpu.md, "Beside other kernels")."""

from collections.abc import Callable

import pytest
import torch

from autofuse.native_kernels.cuda.host.compiler import why_not

pytestmark = [pytest.mark.gpu]

if torch.cuda.is_available() and why_not() is None:
    from autofuse.native_kernels.cuda.kernels.dropless_combine import DroplessConfig
    from autofuse.native_kernels.cuda.kernels.expert_combine import CombineConfig
    from autofuse.native_kernels.cuda.kernels.expert_dispatch import DispatchConfig
    from autofuse.native_kernels.cuda.kernels.gather_matmul import ClusterGatherConfig
    from autofuse.native_kernels.cuda.kernels.gather_words import WordsGatherConfig
    from autofuse.native_kernels.cuda.kernels.matmul_reduce import ClusterReduceConfig
    from autofuse.native_kernels.cuda.kernels.matmul_words import WordsConfig
    from autofuse.native_kernels.triton.exchange_rows import RowsConfig
    from autofuse.native_kernels.triton.exchange_sums import SumsConfig
    from autofuse.native_kernels.triton.gather_matmul import GatherConfig
    from autofuse.native_kernels.triton.gather_matmul_few import FewConfig
    from autofuse.native_kernels.triton.matmul_gather import PublishConfig
    from autofuse.native_kernels.triton.matmul_gather_packets import PublishPacketsConfig
    from autofuse.native_kernels.triton.matmul_packets import PacketsConfig
    from autofuse.native_kernels.triton.matmul_reduce import ReduceConfig
    from tests.gpu.one_gpu import (
        GATHER,
        PUBLISH,
        REDUCE,
        SCATTER,
        Call,
        Dense,
        Dropless,
        Experts,
        Holder,
        Ranks,
    )

    CALLS: dict[str, Callable[[int], Call]]
    CALLS_OF_ANY: dict[str, Callable[[int], Call]]  # number of ranks
    CALLS = {
        "all_reduce": lambda w: Dense(w, REDUCE, 1024, 512, 2048, ClusterReduceConfig()),
        "all_reduce of few rows": lambda w: Dense(
            w, REDUCE, 256, 256, 1024, ClusterReduceConfig(bn=128, across=1, along=2, stages=5)
        ),
        "all_reduce of small tiles": lambda w: Dense(
            w, REDUCE, 200, 512, 1032, ClusterReduceConfig(bn=64, across=1, stages=8)
        ),
        "reduce_scatter": lambda w: Dense(w, SCATTER, 1024, 512, 2048, ClusterReduceConfig(across=1)),
        "gather": lambda w: Dense(w, GATHER, 1024, 512, 4096, ClusterGatherConfig()),
        "gather in slices": lambda w: Dense(
            w, GATHER, 1024, 1024, 4096, ClusterGatherConfig(across=1, slices=2, k_slices=2)
        ),
        "gather within": lambda w: Dense(w, GATHER, 2048, 512, 2048, ClusterGatherConfig(within=True)),
        "gather of few rows": lambda w: Dense(
            w, GATHER, 128, 512, 8192, ClusterGatherConfig(bn=64, across=1, along=2, stages=5)
        ),
        # Each cluster before the margin takes several of the pieces that the margin leaves.
        "gather in many pieces": lambda w: Dense(
            w, GATHER, 8192, 128, 8192, ClusterGatherConfig(bn=64, across=1, along=2, stages=7)
        ),
        "combine": lambda w: Experts(w, 8, 256, 512, 1024, CombineConfig()),
        "combine of few rows": lambda w: Experts(w, 8, 8, 512, 1024, CombineConfig(bn=64, across=1, along=2)),
        "dispatch": lambda w: Experts(w, 8, 256, 512, 1024, DispatchConfig()),
        "dispatch of few rows": lambda w: Experts(
            w, 8, 8, 512, 1024, DispatchConfig(bn=64, across=1, along=2)
        ),
        "combine of 192 columns": lambda w: Experts(w, 8, 256, 512, 1032, CombineConfig(bn=192)),
        "dispatch of 192 columns": lambda w: Experts(w, 8, 256, 512, 1032, DispatchConfig(bn=192)),
        "dropless combine": lambda w: Dropless(w, 5, 2000, 512, 1024, True, DroplessConfig(bn=128, along=2)),
        "dropless combine of 192 columns": lambda w: Dropless(
            w, 5, 8000, 128, 8200, True, DroplessConfig(bn=192, across=2)
        ),
        "dropless dispatch": lambda w: Dropless(
            w, 5, 2000, 512, 1024, False, DroplessConfig(bn=128, along=2)
        ),
        "dropless dispatch of 192 columns": lambda w: Dropless(
            w, 5, 8000, 128, 8200, False, DroplessConfig(bn=192)
        ),
        "gated dropless dispatch": lambda w: Dropless(
            w, 5, 2000, 512, 1032, False, DroplessConfig(across=2), gated=True
        ),
        "gated dropless dispatch that keeps products": lambda w: Dropless(
            w, 5, 2000, 512, 1032, False, DroplessConfig(across=2), gated=True, kept=True
        ),
        "gated dropless dispatch of transposed weights": lambda w: Dropless(
            w, 5, 2000, 512, 1032, False, DroplessConfig(along=2), gated=True, transposed=True
        ),
        "gated dropless dispatch of 128 columns": lambda w: Dropless(
            w, 60, 2000, 512, 1032, False, DroplessConfig(bn=128), gated=True, transposed=True
        ),
        "words": lambda w: Dense(w, REDUCE, 16, 1024, 8192, WordsConfig()),
        "words of a split K": lambda w: Dense(w, SCATTER, 40, 1024, 2048, WordsConfig(split=2)),
        "words once": lambda w: Dense(w, REDUCE, 8, 1024, 4096, WordsConfig(once=True)),
        "words of several tiles": lambda w: Dense(w, REDUCE, 300, 512, 4104, WordsConfig(once=True)),
        "words of a shared weight": lambda w: Dense(
            w, SCATTER, 520, 512, 2048, WordsConfig(bn=128, across=2)
        ),
        "words in two exchanges": lambda w: Dense(w, REDUCE, 333, 512, 2056, WordsConfig(split=2)),
        "packets": lambda w: Dense(w, REDUCE, 8, 1024, 4096, PacketsConfig()),
        "packets once": lambda w: Dense(w, REDUCE, 1, 1024, 4096, PacketsConfig(bn=32, once=True)),
        "packets of a scatter": lambda w: Dense(w, SCATTER, 16, 1024, 8192, PacketsConfig()),
        "packets of a matmul_all_gather": lambda w: Dense(w, PUBLISH, 8, 1024, 4096, PublishPacketsConfig()),
        # A program each on its multiprocessor: several would be spread over those of the other rank.
        "sums": lambda w: Dense(w, REDUCE, 1000, 64, 2056, SumsConfig(per_sm=1)),
        "sums once": lambda w: Dense(w, REDUCE, 300, 64, 2048, SumsConfig(once=True, length=1024, per_sm=1)),
        "sums of a scatter": lambda w: Dense(w, SCATTER, 2048, 64, 2048, SumsConfig(per_sm=1)),
        "rows": lambda w: Dense(w, REDUCE, 333, 64, 2048, RowsConfig()),
        "tiles": lambda w: Dense(w, REDUCE, 1024, 512, 2048, ReduceConfig(bt=32)),
        "tiles of a few rows": lambda w: Dense(
            w, REDUCE, 96, 512, 4096, ReduceConfig(bn=64, bk=128, warps=4, stages=4, bt=32, by_rows=False)
        ),
        "tiles of a scatter": lambda w: Dense(w, SCATTER, 1024, 512, 2048, ReduceConfig(bt=32, visit=8)),
        "tiles of a matmul_all_gather": lambda w: Dense(w, PUBLISH, 512, 512, 2048, PublishConfig()),
        "parts": lambda w: Dense(w, GATHER, 1024, 512, 4096, GatherConfig(movers=16)),
        "few": lambda w: Dense(w, GATHER, 32, 1024, 2048, FewConfig(bn=64, pieces=1, movers=16)),
        "words of a gather": lambda w: Dense(w, GATHER, 16, 2048, 1024, WordsGatherConfig()),
        "words of a signalled gather": lambda w: Dense(w, GATHER, 128, 1024, 1024, WordsGatherConfig()),
        "words of a gather of 200 rows": lambda w: Dense(
            w, GATHER, 200, 1024, 1032, WordsGatherConfig(groups=2, pieces=4)
        ),
        "words of a gather in two pieces": lambda w: Dense(
            w, GATHER, 256, 1032, 2048, WordsGatherConfig(pieces=2)
        ),
        "words of a gather of a whole K": lambda w: Dense(
            w, GATHER, 8, 1032, 4096, WordsGatherConfig(pieces=1)
        ),
    }
    CALLS_OF_ANY = {
        "all_reduce": lambda w: Dense(
            w, REDUCE, 128 * w + 9, 512, 2048, ClusterReduceConfig(across=1, along=2)
        ),
        "reduce_scatter": lambda w: Dense(
            w, SCATTER, 72 * w, 512, 2056, ClusterReduceConfig(bn=128, across=1, along=2, stages=5, part=32)
        ),
        "gather": lambda w: Dense(
            w, GATHER, 120 * w, 512, 2048, ClusterGatherConfig(bn=64, along=2, stages=7, across=1, k_slices=4)
        ),
        "gather within": lambda w: Dense(w, GATHER, 256 * w, 512, 2048, ClusterGatherConfig(within=True)),
        "words": lambda w: Dense(w, REDUCE, 5 * w + 1, 1024, 2048, WordsConfig(split=2)),
        "words of several tiles": lambda w: Dense(
            w, REDUCE, 70 * w + 3, 1024, 1032, WordsConfig(bn=128, across=2)
        ),
        "packets": lambda w: Dense(w, SCATTER, 2 * w, 1024, 2048, PacketsConfig()),
        "sums": lambda w: Dense(w, REDUCE, 70 * w + 1, 64, 2056, SumsConfig()),
        "sums of a scatter": lambda w: Dense(w, SCATTER, 64 * w, 64, 1032, SumsConfig(length=1024)),
        "words of a gather": lambda w: Dense(w, GATHER, 8 * w, 2048, 512, WordsGatherConfig(pieces=2)),
        "words of a long gather": lambda w: Dense(w, GATHER, 32 * w, 1024, 512, WordsGatherConfig(pieces=1)),
    }
else:
    CALLS = CALLS_OF_ANY = {}

WORLD, MARGIN = 2, 16


@pytest.fixture
def multiprocessors() -> int:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CALLS)
def test_beside_others(name: str, multiprocessors: int) -> None:
    """A call ends, with the right results, while others hold all multiprocessors but a few until it has.

    So does a call that has room.
    """
    programs = multiprocessors // WORLD // 8 * 8
    ranks, holder = Ranks(CALLS[name](WORLD), programs, MARGIN), Holder()
    for _ in range(3):
        for rank in range(WORLD):
            ranks.launch(rank)
        assert ranks.have_ended(10), "hangs with room for all"
        ranks.check()
    # A cluster lies within one of up to 8 groups of multiprocessors: one of them has room.
    most = multiprocessors - programs - 8 * (ranks.call.cluster - 1) - 1
    for held in range(most + 1):
        order = range(WORLD) if held % 2 else range(WORLD)[::-1]
        with holder.holding(held):
            for rank in order:
                ranks.launch(rank)
            ended = ranks.have_ended(10)
        assert ended, f"hangs while {held} multiprocessors are held"
        if held % 8 == 0 or held == most:
            ranks.check()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CALLS)
def test_leaves_room(name: str, multiprocessors: int) -> None:
    """Where a peer has not started, blocks of the margin leave; the call is right once the peer comes."""
    programs = multiprocessors // WORLD // 8 * 8
    ranks, holder = Ranks(CALLS[name](WORLD), programs, MARGIN), Holder()
    for late in (None, 0, 1, 0):
        for rank in range(WORLD):
            if rank != late:
                ranks.launch(rank)
        if late is not None:
            free = multiprocessors - (WORLD - 1) * (programs - MARGIN)
            placed = holder.place(free, timeout_s=1)
            holder.release()
            assert placed == free, "blocks of the margin wait"
            ranks.launch(late)
        assert ranks.have_ended(10), f"hangs after rank {late} was late"
        ranks.check()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [3, 5])
@pytest.mark.parametrize("name", CALLS_OF_ANY)
def test_odd_worlds(name: str, world: int, multiprocessors: int) -> None:
    ranks = Ranks(CALLS_OF_ANY[name](world), multiprocessors // world // 8 * 8, 8)
    for number in range(6):
        for rank in range(world):
            ranks.launch((rank + number) % world)
        assert ranks.have_ended(10), "hangs"
        ranks.check()
