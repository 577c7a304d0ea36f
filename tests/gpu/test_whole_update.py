"""all_reduce_update on GPUs: by name beside the rules in float64, and in compiled programs beside eager."""

from collections.abc import Callable

import pytest
import torch

from tests.ranks import RankPool

from . import whole_update_on_gpus
from .conftest import WORLDS
from .whole_update_on_gpus import LONGEST, SIZES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

Pools = Callable[[int], RankPool]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("rule", "dtypes", "sizes", "mean"),
    [
        ("adam", (FP32, FP32), SIZES, True),
        ("adam", (BF16, BF16), SIZES, True),
        ("adam", (BF16, FP32), (LONGEST, 64), False),
        ("amsgrad", (FP16, FP16), SIZES, True),
        ("momentum", (FP32, FP32), (LONGEST, 64), True),
        ("sgd", (BF16, BF16), SIZES, False),
        ("sgd", (FP32, FP32), (8,), True),
    ],
)
def test_by_name(
    gpu_ranks: Pools, world: int, rule: str, dtypes: tuple[torch.dtype, torch.dtype], sizes: tuple[int, ...],
    mean: bool,
) -> None:  # fmt: skip
    """Uneven tensors, late ranks, launched and captured."""
    found = gpu_ranks(world).run(whole_update_on_gpus.by_name, rule, dtypes, sizes, mean, timeout=150)
    assert found == [["whole_packets", "whole_packets warps=16"]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_back_to_back(gpu_ranks: Pools, world: int) -> None:
    gpu_ranks(world).run(whole_update_on_gpus.back_to_back, 1000, timeout=120)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_compiled_steps(gpu_ranks: Pools, world: int, dtype: torch.dtype, captured: bool) -> None:
    """Sites of a program fuse to one op, which is a call in the kernel."""
    sizes = (1000, 70_000, 8)
    found = gpu_ranks(world).run(whole_update_on_gpus.compiled_steps, dtype, sizes, captured, timeout=180)
    ops = ["autofuse::all_reduce_update"] * len(sizes)
    assert found == [(ops, 5 if captured else 3)] * world
