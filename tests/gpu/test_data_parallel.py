"""Fused ops of tensor-parallel groups beside NCCL of FSDP2 and DDP, 2 x 2 GPUs."""

from collections.abc import Callable

import pytest

from tests.ranks import RankPool
from tests.robustness.data_parallel import train

STEPS = 50


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_losses(gpu_ranks: Callable[[int], RankPool], wrapper: str) -> None:
    for eager, compiled, fused in gpu_ranks(4).run(train, wrapper, STEPS, "cuda", 1024, timeout=350):
        assert fused == 4
        assert compiled == pytest.approx(eager, rel=2e-2)
