"""The expert ops on GPUs: every way to run them, and what may happen round them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.ranks import RankPool

from . import dropless_on_gpus, experts_on_gpus, layers_on_gpus
from .conftest import WORLDS
from .dropless_on_gpus import Ragged
from .experts_on_gpus import COMBINE, DISPATCH, Case
from .telling import complaints

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

Pools = Callable[[int], RankPool]

SIZES = {  # experts, run, k, n, and more
    "whole tiles": Case(COMBINE, 2, 256, 512, 1024),
    "many tiles": Case(COMBINE, 4, 512, 256, 4096, transposed=True),
    "one expert": Case(COMBINE, 1, 384, 264, 520, biased=True),
    "ragged": Case(COMBINE, 3, 200, 328, 776, transposed=True, dtype=torch.float16),
    "two stretches": Case(COMBINE, 3, 130, 520, 264, outer=2, biased=True),
    "tiles span ranks": Case(COMBINE, 5, 32, 512, 1024),
    "ragged, spanning": Case(COMBINE, 3, 37, 264, 520, transposed=True, biased=True),
    "stretches, spanning": Case(COMBINE, 2, 12, 200, 328, outer=3, dtype=torch.float16),
    "one row": Case(COMBINE, 4, 1, 512, 1024, biased=True),
}

TWO = {  # dispatches of gate and up
    name: replace(of, op=DISPATCH, weights=2)
    for name, of in {
        **SIZES,
        "ragged, biased": Case(COMBINE, 3, 200, 328, 776, biased=True),
        "tiles of 16 rows": Case(COMBINE, 3, 2, 264, 520, transposed=True),
        "tiles of 32 or 64 rows": Case(COMBINE, 3, 16, 264, 520, biased=True),
        "odd columns": Case(COMBINE, 2, 128, 512, 264, transposed=True, biased=True),
    }.items()
}


def case(op: str, name: str) -> Case:
    return replace(SIZES[name], op=op)


SOME = ("ragged", "two stretches", "tiles span ranks", "one row")


def some(op: str) -> list[Case]:
    return [case(op, name) for name in SOME]


def every() -> list[Case]:
    """Some of both ops, and of dispatches of two weights."""
    return some(COMBINE) + some(DISPATCH) + [TWO[name] for name in SOME]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("op", [COMBINE, DISPATCH])
@pytest.mark.parametrize("world", WORLDS)
def test_all_ways(gpu_ranks: Pools, world: int, op: str, name: str) -> None:
    found = gpu_ranks(world).run(experts_on_gpus.all_ways, case(op, name), timeout=90)
    assert all(found), "no way"
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("world", WORLDS)
def test_a_combine_of_a_sum(gpu_ranks: Pools, world: int, name: str) -> None:
    found = gpu_ranks(world).run(experts_on_gpus.sums, case(COMBINE, name), timeout=90)
    assert all(found), "no way"
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("name", ["whole tiles", "tiles span ranks"])
@pytest.mark.parametrize("world", WORLDS)
def test_orders(gpu_ranks: Pools, world: int, name: str) -> None:
    found = gpu_ranks(world).run(experts_on_gpus.orders, case(COMBINE, name), timeout=60)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("world", WORLDS)
def test_two_weights_in_one_kernel(gpu_ranks: Pools, world: int, name: str) -> None:
    found = gpu_ranks(world).run(experts_on_gpus.all_ways, TWO[name], timeout=90)
    assert all(found), "no way"
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("name", ["whole tiles", "ragged", "tiles span ranks"])
@pytest.mark.parametrize("world", WORLDS)
def test_more_weights_share_an_exchange(gpu_ranks: Pools, world: int, name: str) -> None:
    found = gpu_ranks(world).run(experts_on_gpus.weights_afterwards, case(DISPATCH, name), timeout=90)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("name", ["whole tiles", "two stretches", "tiles span ranks"])
@pytest.mark.parametrize("world", WORLDS)
def test_gradients(gpu_ranks: Pools, world: int, name: str) -> None:
    plain = replace(case(COMBINE, name), biased=False)
    found = gpu_ranks(world).run(experts_on_gpus.trained, plain, timeout=60)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("name", ["whole tiles", "two stretches", "tiles span ranks"])
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_of_two_weights(gpu_ranks: Pools, world: int, name: str) -> None:
    plain = replace(TWO[name], biased=False)
    found = gpu_ranks(world).run(experts_on_gpus.trained_dispatch, plain, timeout=60)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("kind", layers_on_gpus.LAYERS)
@pytest.mark.parametrize("world", WORLDS)
def test_training_of_a_compiled_layer(gpu_ranks: Pools, world: int, kind: str) -> None:
    found = gpu_ranks(world).run(layers_on_gpus.trained, kind, timeout=150)
    assert not (text := complaints(found)), text


KINDS = {
    "random": Ragged("random"),
    "shuffled": Ragged("random", shuffled=True, transposed=True, dtype=torch.float16),
    "large": Ragged("random", rows=5000, k=512, n=1024, biased=True),
    "empty experts": Ragged("empty experts", biased=True),
    "hot expert": Ragged("hot expert", transposed=True),
    "to one rank": Ragged("to one rank"),
    "one rank has all": Ragged("one rank has all", biased=True),
    "nothing": Ragged("nothing"),
    "rows of none": Ragged("rows of none", biased=True, shuffled=True),
    "few": Ragged("random", rows=9),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_dropless_combine(gpu_ranks: Pools, world: int, name: str) -> None:
    found = gpu_ranks(world).run(dropless_on_gpus.all_ways, KINDS[name], timeout=120)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_dropless_combine_of_a_sum(gpu_ranks: Pools, world: int, name: str) -> None:
    found = gpu_ranks(world).run(dropless_on_gpus.sums, KINDS[name], timeout=120)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_dropless_dispatch(gpu_ranks: Pools, world: int, name: str) -> None:
    found = gpu_ranks(world).run(dropless_on_gpus.all_dispatches, KINDS[name], timeout=120)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("name", ["random", "rows of none"])
@pytest.mark.parametrize("world", WORLDS)
def test_dropless_ops_that_are_not_fused(gpu_ranks: Pools, world: int, name: str) -> None:
    found = gpu_ranks(world).run(dropless_on_gpus.unfused, KINDS[name], timeout=60)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("world", WORLDS)
def test_captured_graph(gpu_ranks: Pools, world: int) -> None:
    found = gpu_ranks(world).run(experts_on_gpus.replayed, every(), 5, timeout=180)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("world", WORLDS)
def test_a_captured_dropless_combine(gpu_ranks: Pools, world: int) -> None:
    found = gpu_ranks(world).run(dropless_on_gpus.replayed, KINDS["random"], 4, timeout=60)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("world", WORLDS)
def test_a_captured_dropless_dispatch(gpu_ranks: Pools, world: int) -> None:
    found = gpu_ranks(world).run(dropless_on_gpus.replayed_dispatches, KINDS["random"], 4, timeout=90)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("world", WORLDS)
def test_a_hundred_calls(gpu_ranks: Pools, world: int) -> None:
    found = gpu_ranks(world).run(experts_on_gpus.many_calls, every(), 100, timeout=180)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("world", WORLDS)
def test_a_hundred_dropless_calls_of_changing_splits(gpu_ranks: Pools, world: int) -> None:
    cases = [
        KINDS[name] for name in ("random", "hot expert", "to one rank", "one rank has all", "nothing", "few")
    ]
    found = gpu_ranks(world).run(dropless_on_gpus.many_calls, cases, 100, timeout=180)
    assert not (text := complaints(found)), text


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("dispatches", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_a_lost_peer_is_named(gpu_ranks: Pools, world: int, dispatches: bool, captured: bool) -> None:
    case = KINDS["random"], dispatches, captured
    found = gpu_ranks(world).run(dropless_on_gpus.lost_peer, *case, timeout=60)
    said = f"rank {world - 1} did not come" if captured else f"waited 2 s for rank {world - 1}"
    assert all(said in text for text in found[:-1]), found
