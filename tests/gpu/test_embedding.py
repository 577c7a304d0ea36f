"""embedding_bag_all_to_all and its backward on GPUs: every way to run them, and what may happen then."""

from collections.abc import Callable

import pytest
import torch

from tests.ops.bags import Case
from tests.ranks import RankPool

from . import backward_on_gpus, embedding_on_gpus
from .conftest import WORLDS
from .telling import complaints

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

Pools = Callable[[int], RankPool]
BF16, FP16 = torch.bfloat16, torch.float16


def cases(world: int) -> dict[str, Case]:
    even = ((256,) * 4,) * world
    mixed = ((256, 64, 8), (48,), (130, 7), (64, 64), (16,), (8, 1024), (32,), (5,))[:world]
    return {
        "plain": Case(even, b=64, pooling=20, rows=5000, table=BF16, wire=BF16),
        "few bags": Case(even, b=1, pooling=3, table=BF16, wire=BF16),
        "many bags": Case(even, b=700, pooling=2, table=FP16, wire=FP16, index=torch.int32),
        "mixed dims": Case(mixed, b=33, table=BF16, wire=BF16, last_offset=True),
        "fp32": Case(even, b=40, mode="mean", padding=3),
        "cast": Case(even, b=40, wire=BF16, weighted=True),
        "a table without rows": Case(even, b=40, table=BF16, wire=BF16, bare=1),
        "max": Case(even, b=40, table=BF16, wire=BF16, mode="max"),
        **{
            layout: Case(((64,) * 3,) * world, layout, b=37, table=BF16, wire=BF16)
            for layout in ("sbc", "bstd", "stbd", "sbtd")
        },
    }


@pytest.mark.parametrize("world", WORLDS)
def test_all_ways(gpu_ranks: Pools, world: int) -> None:
    found = gpu_ranks(world).run(embedding_on_gpus.all_ways, cases(world)["plain"], timeout=120)
    assert all(found), "no way"
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("name", list(cases(2))[1:])
@pytest.mark.parametrize("world", WORLDS)
def test_some_ways(gpu_ranks: Pools, world: int, name: str) -> None:
    number = list(cases(world)).index(name)
    found = gpu_ranks(world).run(embedding_on_gpus.all_ways, cases(world)[name], number, timeout=60)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("world", WORLDS)
def test_the_op_is_fused_where_a_table_says_so(gpu_ranks: Pools, world: int) -> None:
    found = gpu_ranks(world).run(embedding_on_gpus.op, cases(world)["plain"], timeout=60)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("world", WORLDS)
def test_captured_graph(gpu_ranks: Pools, world: int) -> None:
    found = gpu_ranks(world).run(embedding_on_gpus.replayed, cases(world)["plain"], 20, timeout=120)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("world", WORLDS)
def test_a_thousand_calls(gpu_ranks: Pools, world: int) -> None:
    some = list(cases(world).values())
    found = gpu_ranks(world).run(embedding_on_gpus.many_calls, some, 1000, timeout=120)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("world", WORLDS)
def test_an_index_out_of_range_is_named(gpu_ranks: Pools, world: int) -> None:
    found = gpu_ranks(world).run(embedding_on_gpus.bad_index, cases(world)["plain"], timeout=60)
    assert all(
        "rank 1 of group" in text and "index 2147483647 of table 1 is outside" in text for text in found
    )


def backward_cases(world: int) -> dict[str, Case]:
    """Those of the forward that can be trained, and rows that many bags share."""
    found = {name: case for name, case in cases(world).items() if case.mode != "max"}
    hot = Case(((64,) * 2,) * world, b=300, pooling=20, rows=3, table=BF16, wire=BF16)
    return {**found, "hot rows": hot, "weighted": Case(((40, 24),) * world, b=50, weighted=True, padding=1)}


@pytest.mark.parametrize("world", WORLDS)
def test_all_ways_back(gpu_ranks: Pools, world: int) -> None:
    found = gpu_ranks(world).run(backward_on_gpus.all_ways, backward_cases(world)["plain"], timeout=120)
    assert all(found), "no way"
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("name", list(backward_cases(2))[1:])
@pytest.mark.parametrize("world", WORLDS)
def test_some_ways_back(gpu_ranks: Pools, world: int, name: str) -> None:
    number, case = list(backward_cases(world)).index(name), backward_cases(world)[name]
    found = gpu_ranks(world).run(backward_on_gpus.all_ways, case, number, timeout=60)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("name", ["plain", "mixed dims", "stbd"])
@pytest.mark.parametrize("world", WORLDS)
def test_training_step_back(gpu_ranks: Pools, world: int, name: str) -> None:
    found = gpu_ranks(world).run(backward_on_gpus.training_step, backward_cases(world)[name], timeout=60)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("world", WORLDS)
def test_captured_graph_back(gpu_ranks: Pools, world: int) -> None:
    case = backward_cases(world)["plain"]
    found = gpu_ranks(world).run(backward_on_gpus.replayed, case, 20, timeout=120)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("world", WORLDS)
def test_a_thousand_calls_back(gpu_ranks: Pools, world: int) -> None:
    some = list(backward_cases(world).values())
    found = gpu_ranks(world).run(backward_on_gpus.many_calls, some, 1000, timeout=120)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("world", WORLDS)
def test_an_index_out_of_range_is_named_back(gpu_ranks: Pools, world: int) -> None:
    found = gpu_ranks(world).run(backward_on_gpus.bad_index, backward_cases(world)["plain"], timeout=60)
    assert all(
        "rank 1 of group" in text and "index 2147483647 of table 1 is outside" in text for text in found
    )


@pytest.mark.parametrize("world", WORLDS)
def test_compiled_training_step_back(gpu_ranks: Pools, world: int) -> None:
    case = Case(((64,) * 4,) * world, "sbc", b=64, pooling=20, rows=5000, table=BF16, wire=BF16)
    both = ["autofuse::all_to_all_embedding_bag_backward", "autofuse::embedding_bag_all_to_all"]
    found = gpu_ranks(world).run(backward_on_gpus.compiled_step, case, timeout=120)
    assert not (text := complaints([wrong for wrong, _ in found])), text
    assert [ops for _, ops in found] == [both] * world
