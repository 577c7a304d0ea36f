"""Fused ops of tensor-parallel groups inside of FSDP2 and DDP, 2 x 2 CPU ranks."""

from collections.abc import Callable

import pytest

from tests.ranks import RankPool
from tests.robustness.data_parallel import train

STEPS = 50


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_losses(ranks: Callable[[int], RankPool], wrapper: str) -> None:
    for eager, compiled, fused in ranks(4).run(train, wrapper, STEPS, "cpu", 32, timeout=250):
        assert fused == 4  # an all_reduce of the forward and one of the backward, of each of two blocks
        assert compiled == pytest.approx(eager, rel=1e-5)
