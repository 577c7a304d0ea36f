"""The dense ops on GPUs: every way to run them, and what may happen round them."""

from collections.abc import Callable

import pytest
import torch

from autofuse.timeline import Kind
from tests.ranks import RankPool

from . import compiled_on_gpus, dense_on_gpus
from .conftest import WORLDS, a_gpu_each
from .expected import MOST_ERROR

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

Pools = Callable[[int], RankPool]

NO_COPIES = a_gpu_each("copy engines are left out")
NO_TIMES = a_gpu_each("kernels run in turns, which takes other times")

OPS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_gather")

# (op, m, k, n, outer, dim)
CASES = [
    ("matmul_all_reduce", 1, 1024, 2048, 1, 0),
    ("matmul_all_reduce", 13, 264, 1000, 1, 0),
    ("matmul_all_reduce", 45, 520, 4360, 1, 0),
    ("matmul_all_reduce", 96, 1024, 2048, 1, 0),
    ("matmul_all_reduce", 333, 520, 2056, 1, 0),
    ("matmul_all_reduce", 512, 2048, 4096, 1, 0),
    ("matmul_all_reduce", 1023, 520, 1528, 1, 0),
    ("matmul_all_reduce", 2049, 520, 1528, 1, 0),
    ("matmul_all_reduce", 4096, 1024, 4096, 1, 0),
    ("matmul_all_reduce", 16, 64, 18440, 1, 0),
    ("matmul_all_reduce", 500, 200, 5128, 1, 0),
    ("matmul_all_reduce", 1000, 136, 3064, 1, 0),
    ("matmul_reduce_scatter", 8, 1024, 2048, 1, 0),
    ("matmul_reduce_scatter", 72, 264, 1000, 1, 0),
    ("matmul_reduce_scatter", 120, 520, 4360, 1, 0),
    ("matmul_reduce_scatter", 264, 520, 1528, 1, 0),
    ("matmul_reduce_scatter", 512, 2048, 4096, 1, 0),
    ("matmul_reduce_scatter", 640, 264, 2056, 1, 0),
    ("matmul_reduce_scatter", 1000, 520, 1528, 1, 0),
    ("matmul_reduce_scatter", 1008, 520, 1024, 2, 0),
    ("matmul_reduce_scatter", 512, 512, 2048, 1, 1),
    ("matmul_reduce_scatter", 2056, 520, 1528, 1, 0),
    ("matmul_reduce_scatter", 2064, 520, 1024, 2, 0),
    ("matmul_reduce_scatter", 8192, 1024, 4096, 1, 0),
    ("all_gather_matmul", 8, 1024, 2048, 1, 0),
    ("all_gather_matmul", 24, 2056, 1000, 1, 0),
    ("all_gather_matmul", 72, 2056, 1000, 1, 0),
    ("all_gather_matmul", 200, 2056, 1000, 1, 0),
    ("all_gather_matmul", 512, 2048, 2048, 1, 0),
    ("all_gather_matmul", 1000, 520, 1528, 1, 0),
    ("all_gather_matmul", 1008, 520, 1024, 2, 0),
    ("all_gather_matmul", 1024, 264, 8968, 1, 0),
    ("all_gather_matmul", 1000, 264, 2552, 1, 0),
    ("all_gather_matmul", 500, 264, 7160, 1, 0),
    ("all_gather_matmul", 4096, 2048, 1024, 1, 0),
    ("matmul_all_gather", 1, 1024, 2048, 1, 1),
    ("matmul_all_gather", 13, 264, 1000, 1, 1),
    ("matmul_all_gather", 24, 520, 4360, 2, 0),
    ("matmul_all_gather", 45, 520, 4360, 1, 0),
    ("matmul_all_gather", 100, 1024, 2048, 1, 1),
    ("matmul_all_gather", 128, 1024, 16032, 1, 1),
    ("matmul_all_gather", 512, 2048, 4096, 1, 1),
    ("matmul_all_gather", 1008, 520, 1024, 3, 0),
    ("matmul_all_gather", 1023, 520, 1528, 1, 0),
    ("matmul_all_gather", 2049, 520, 1528, 1, 1),
    ("matmul_all_gather", 2048, 1024, 16032, 1, 1),
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("op", "m", "k", "n", "outer", "dim"), CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_all_ways(
    gpu_ranks: Pools, world: int, op: str, m: int, k: int, n: int, outer: int, dim: int, transposed: bool
) -> None:
    dtype = torch.float16 if transposed else torch.bfloat16
    for found in gpu_ranks(world).run(
        dense_on_gpus.all_ways, op, m, k, n, outer, dim, transposed, dtype, timeout=300
    ):
        for way, (error, same) in found.items():
            assert error < MOST_ERROR, way
            # cuBLAS and NCCL promise no bits.
            assert same or way.startswith("cublas"), way


@pytest.mark.parametrize("terms", [(520, 264), (1024, 128, 128), (256, 8, 64, 512)])
@pytest.mark.parametrize("m", [16, 96, 1000, 4096])
@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter"])
@pytest.mark.parametrize("world", WORLDS)
def test_sums(gpu_ranks: Pools, world: int, op: str, m: int, terms: tuple[int, ...]) -> None:
    """Of several matmuls, in every way. Kernels take several wherever they take one."""
    pool, n, transposed = gpu_ranks(world), 1528, len(terms) == 3
    for found in pool.run(
        dense_on_gpus.all_ways, op, m, sum(terms), n, 1, 0, transposed, torch.bfloat16, terms, timeout=300
    ):
        fused = {way.split()[0] for way in found} & {"packets", "words", "clusters", "tiles"}
        assert fused or m < 64 * world, found
        for way, (error, same) in found.items():
            assert error < MOST_ERROR, way
            assert same or way.startswith("cublas"), way
    assert max(pool.run(dense_on_gpus.sums, op, m, n, terms, timeout=200)) < MOST_ERROR


@pytest.mark.parametrize("m", [8, 16, 96, 1000, 4096])
@pytest.mark.parametrize("text", ["addmm %0", "mm; div 3"])
@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_bias_or_a_scale_before_the_sum(gpu_ranks: Pools, world: int, op: str, text: str, m: int) -> None:
    for found in gpu_ranks(world).run(dense_on_gpus.staged, op, text, m, 520, 1528, timeout=200):
        assert {way.split()[0] for way in found} & {"words", "clusters"} or m % world, found
        assert {way: error for way, error in found.items() if error > MOST_ERROR} == {}


MADE = {
    "scaled": dense_on_gpus.Made("mm; mul 0.5; to float32"),
    "read elsewhere": dense_on_gpus.Made("mm; add %0", keep=True, tail="mul %0; keep; relu"),
    "read before the epilogue": dense_on_gpus.Made("mm; keep; mul %0; to float32", keep=True),
    "float32": dense_on_gpus.Made("mm", dtype=torch.float32, keep=True),
    "many terms": dense_on_gpus.Made("mm", terms=5),
    "rows of a table": dense_on_gpus.Made("rows; masked_fill %0 0.0"),
    "float8": dense_on_gpus.Made("scaled_mm %0 %1 bfloat16"),
    "float8 by rows": dense_on_gpus.Made("scaled_mm %0 %1 bfloat16", by_rows=True),
}


@pytest.mark.parametrize("of", MADE.values(), ids=list(MADE))
@pytest.mark.parametrize(("op", "m"), [(OPS[0], 16), (OPS[0], 1000), (OPS[1], 32), (OPS[1], 1024)])
@pytest.mark.parametrize("world", WORLDS)
def test_products_that_torch_computes(
    gpu_ranks: Pools, world: int, op: str, m: int, of: dense_on_gpus.Made
) -> None:
    for found in gpu_ranks(world).run(dense_on_gpus.made, op, m, of, timeout=200):
        kernels = {"tokens"} if of.text.startswith("rows") else {"rows", "sums"}
        assert {way.split()[0] for way in found} & kernels, found
        assert {way: error for way, error in found.items() if error > MOST_ERROR} == {}


@pytest.mark.parametrize("world", WORLDS)
def test_a_vocabulary_that_ranks_share(gpu_ranks: Pools, world: int) -> None:
    for error, fused in gpu_ranks(world).run(compiled_on_gpus.vocabulary, timeout=200):
        assert fused == ["autofuse::matmul_all_reduce"] * 2
        assert error < MOST_ERROR


@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter"])
@pytest.mark.parametrize("world", WORLDS)
def test_orders(gpu_ranks: Pools, world: int, op: str) -> None:
    for found in gpu_ranks(world).run(dense_on_gpus.orders, op, 1024, 512, 1024, timeout=200):
        assert max(found.values()) < MOST_ERROR


@pytest.mark.parametrize("straggler", [0, 1])
@pytest.mark.parametrize("world", WORLDS)
def test_a_thousand_calls(gpu_ranks: Pools, world: int, straggler: int) -> None:
    sizes = 1, 8, 136, 1000
    found = gpu_ranks(world).run(dense_on_gpus.many_calls, 1000, straggler, sizes, 520, False, timeout=300)
    assert max(found) < MOST_ERROR


@NO_COPIES
@pytest.mark.parametrize("straggler", [0, 1])
@pytest.mark.parametrize("world", WORLDS)
def test_copy_engines_in_many_calls(gpu_ranks: Pools, world: int, straggler: int) -> None:
    """Reductions and gathers by turns, which share memory and credit, of one slice a chunk and of several."""
    sizes = 1024, 2056, 4104
    found = gpu_ranks(world).run(dense_on_gpus.many_calls, 500, straggler, sizes, 2056, True, timeout=300)
    assert max(found) < MOST_ERROR


@pytest.mark.parametrize(
    ("sizes", "copied"),
    [
        pytest.param((8, 1024), False, id="all ways"),
        pytest.param((2048,), True, id="copy engines", marks=NO_COPIES),
    ],
)
@pytest.mark.parametrize("world", WORLDS)
def test_captured_graph(gpu_ranks: Pools, world: int, sizes: tuple[int, ...], copied: bool) -> None:
    problems = [(op, max(m, 32) if "gather" in op else m) for op in OPS for m in sizes]
    found = gpu_ranks(world).run(dense_on_gpus.replayed, 20, problems, copied, timeout=200)
    assert max(found) < MOST_ERROR


@pytest.mark.parametrize("world", WORLDS)
def test_updates(gpu_ranks: Pools, world: int) -> None:
    assert max(gpu_ranks(world).run(dense_on_gpus.updated, 60, timeout=200)) < MOST_ERROR


@pytest.mark.parametrize("world", WORLDS)
def test_streams(gpu_ranks: Pools, world: int) -> None:
    assert max(gpu_ranks(world).run(dense_on_gpus.on_streams, timeout=200)) < MOST_ERROR


@pytest.mark.parametrize("world", WORLDS)
def test_pairs(gpu_ranks: Pools, world: int) -> None:
    assert max(gpu_ranks(world).run(dense_on_gpus.in_pairs, timeout=200)) < MOST_ERROR


@pytest.mark.parametrize("world", WORLDS)
def test_sizes_without_tma(gpu_ranks: Pools, world: int) -> None:
    assert max(gpu_ranks(world).run(dense_on_gpus.tma_less)) < MOST_ERROR


@pytest.mark.parametrize("m", [8, 64, 1024, 2048])
@pytest.mark.parametrize("world", WORLDS)
def test_biases(gpu_ranks: Pools, world: int, m: int) -> None:
    assert max(gpu_ranks(world).run(compiled_on_gpus.with_biases, m, timeout=200)) < MOST_ERROR


@pytest.mark.parametrize(("mode", "dynamic"), [(None, False), ("reduce-overhead", False), (None, True)])
@pytest.mark.parametrize("world", WORLDS)
def test_compiled(gpu_ranks: Pools, world: int, mode: str | None, dynamic: bool) -> None:
    for error, fused in gpu_ranks(world).run(compiled_on_gpus.compiled, mode, dynamic, timeout=300):
        assert fused == 1
        assert error < 2 * MOST_ERROR  # two matmuls


@pytest.mark.parametrize("world", WORLDS)
def test_training_with_checkpoints(gpu_ranks: Pools, world: int) -> None:
    assert max(gpu_ranks(world).run(compiled_on_gpus.trained, timeout=300)) < 4 * MOST_ERROR


@NO_TIMES
@pytest.mark.parametrize("world", WORLDS)
def test_measured_ways(gpu_ranks: Pools, world: int) -> None:
    results = gpu_ranks(world).run(dense_on_gpus.measured, timeout=200)
    for times, way in results:
        assert times == results[0][0]
        assert way == times[0][0]


@NO_TIMES
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", WORLDS)
def test_trace(gpu_ranks: Pools, world: int, op: str) -> None:
    for timeline in gpu_ranks(world).run(dense_on_gpus.traced, op, timeout=200):
        assert {Kind.BEGUN, Kind.COMPUTED, Kind.ENDED} <= {event.kind for event in timeline.events}
        assert not timeline.cut
        assert timeline.ended < 1000  # microseconds: ranks that begin apart would wait for longer
