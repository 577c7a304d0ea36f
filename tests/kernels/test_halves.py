"""No byte of one half of a region is in the other, whatever two kinds of calls use it in turn.

A rank may be one call ahead: it stores for its call while a peer still reads what arrived for the one before.
Two calls are drawn, with their shapes, dtypes and ranks. The regions grow as for both, the launchers compute
their parameters, and what these say of the two halves is compared.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autofuse.native_kernels.gpu.memory import Need, Region, grown
from tests.kernels.launched import peer_memory
from tests.kernels.uses import BF16, FP32, Use, dense, experts, few

EIGHTS = st.integers(1, 700).map(lambda n: 8 * n)


@st.composite
def uses(draw: Callable[[Any], Any], world: int) -> Use:
    k, n = draw(EIGHTS), draw(EIGHTS)
    kind = draw(st.sampled_from(("dense", "few", "experts")))
    if kind == "dense":
        found = dense(world, draw(st.integers(1, 600)), k, n, draw(st.sampled_from((BF16, FP32))))
    elif kind == "few":
        found = few(world, draw(st.integers(1, 128 // world)), k, n)
    else:
        found = experts(world, draw(st.integers(1, 300)), k, n)
    every = list(found)
    use: Use = every[draw(st.integers(0, len(every) - 1))]
    return use


def check(first: Use, second: Use, world: int) -> None:
    need = first.need | second.need | Need(copies=16, outbox=16, gathers=1 << 12)
    memory = peer_memory(world, need)
    a, b = first.used(memory), second.used(memory)
    for region in a.keys() & b.keys():
        whole = getattr(memory, region).views[0].numel()
        for i, j in product(range(len(a[region])), range(len(b[region]))):
            (begin, end), (there, ended) = a[region][i], b[region][j]
            assert max(end, ended) <= whole, (first.name, second.name, region, whole)
            assert i == j or end <= there or ended <= begin, (first.name, second.name, region, i, j)


@given(st.data())
@settings(max_examples=150, suppress_health_check=list(HealthCheck), derandomize=True)
def test_halves_are_apart(data: st.DataObject) -> None:
    world = data.draw(st.sampled_from((2, 4, 8)))
    check(data.draw(uses(world)), data.draw(uses(world)), world)


def test_every_pair_of_kinds() -> None:
    """Of shapes with which halves are full to their last byte, where there are such."""
    world = 2
    every = [
        *dense(world, 512, 4104, 4104, FP32),
        *few(world, 64, 4104, 4104),
        *experts(world, 256, 4096, 4096),
    ]
    for first, second in product(every, every):
        check(first, second, world)


def test_growth_wastes_at_most_a_quarter() -> None:
    for size in (*range(1, 5000), *(2**i + d for i in range(12, 40) for d in (-1, 0, 1, 77, 2 ** (i - 1)))):
        found = grown(Need(inbox=size)).inbox
        assert found >= size
        assert found <= max(size + size // 4, 4096)
        assert found % 1024 == 0
        assert grown(Need(inbox=found)).inbox == found
    assert grown(Need()) == Need()


def test_a_row_of_any_length_fits() -> None:
    """The second half begins less than a row behind the middle, and never before it."""
    for size, row in product((4096, 5120, 1 << 20), (1, 3, 8, 129)):
        region = Region.of([torch.empty(size, dtype=torch.uint8)])
        for dtype in (BF16, FP32):
            begin, middle = region.half(dtype, row) * dtype.itemsize, size // 2
            assert middle <= begin < middle + row * dtype.itemsize
            assert begin % (row * dtype.itemsize) == 0
