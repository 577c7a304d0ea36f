"""all_to_all_embedding_bag_update on GPUs: every way to run it, captured graphs, compiled programs."""

from collections.abc import Callable

import pytest

from tests.ops.bags import Case
from tests.ranks import RankPool

from . import update_on_gpus
from .conftest import WORLDS
from .telling import complaints
from .test_embedding import backward_cases

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

Pools = Callable[[int], RankPool]
RULES = pytest.mark.parametrize("rowwise", [False, True], ids=["sgd", "adagrad"])


def cases(world: int) -> dict[str, Case]:
    """Those of the backward, and rows wider than any tile."""
    return {**backward_cases(world), "wide": Case(((3000,),) * world, b=20)}


@RULES
@pytest.mark.parametrize("world", WORLDS)
def test_all_ways(gpu_ranks: Pools, world: int, rowwise: bool) -> None:
    found = gpu_ranks(world).run(update_on_gpus.all_ways, cases(world)["plain"], rowwise, timeout=120)
    assert all(found), "no way"
    assert not (text := complaints(found)), text


@RULES
@pytest.mark.parametrize("name", list(cases(2))[1:])
@pytest.mark.parametrize("world", WORLDS)
def test_some_ways(gpu_ranks: Pools, world: int, name: str, rowwise: bool) -> None:
    number, case = list(cases(world)).index(name), cases(world)[name]
    found = gpu_ranks(world).run(update_on_gpus.all_ways, case, rowwise, number, timeout=60)
    assert not (text := complaints(found)), text


@RULES
@pytest.mark.parametrize("world", WORLDS)
def test_captured_graph(gpu_ranks: Pools, world: int, rowwise: bool) -> None:
    found = gpu_ranks(world).run(update_on_gpus.replayed, cases(world)["plain"], rowwise, 10, timeout=120)
    assert not (text := complaints(found)), text


@RULES
@pytest.mark.parametrize("name", ["plain", "mixed dims", "stbd"])
@pytest.mark.parametrize("world", WORLDS)
def test_the_op(gpu_ranks: Pools, world: int, name: str, rowwise: bool) -> None:
    found = gpu_ranks(world).run(update_on_gpus.op, cases(world)[name], rowwise, timeout=60)
    assert not (text := complaints(found)), text


@RULES
@pytest.mark.parametrize("world", WORLDS)
def test_compiled_steps(gpu_ranks: Pools, world: int, rowwise: bool) -> None:
    case = Case(((64, 32),) * world, b=40, rows=200)
    found = gpu_ranks(world).run(update_on_gpus.compiled_steps, case, rowwise, timeout=150)
    both = ["autofuse::all_to_all_embedding_bag_update", "autofuse::embedding_bag_all_to_all"]
    assert found == [("", both)] * world, found
