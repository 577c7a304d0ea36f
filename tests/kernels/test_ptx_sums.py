"""What the compiler makes of exchange_sums for sm_90; no GPU is needed. The rules are those of
test_ptx_embedding.py."""

from pathlib import Path

import pytest
import torch

from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.dense.factors import MADE
from autofuse.lowering.gpu.dense.ways import REDUCE, SCATTER, DenseProblem
from autofuse.native_kernels.triton.exchange_sums import launch_exchange_sums, sums_needs
from tests.kernels.test_ptx import GPU_SCOPE, check_dependent, compile_launch
from tests.kernels.test_ptx_embedding import (
    SIGNAL,
    check_waits,
    check_words,
    memory_for,
    used,
)

M, N = 256, 1024


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("op", "dtype", "world"),
    [
        (REDUCE, torch.bfloat16, 2),
        (REDUCE, torch.float32, 4),
        pytest.param(REDUCE, torch.float16, 8, marks=pytest.mark.full),
        pytest.param(SCATTER, torch.bfloat16, 4, marks=pytest.mark.full),
    ],
)
def test_configurations(op: str, dtype: torch.dtype, world: int, tmp_path: Path) -> None:
    """Memory is read and written 16 bytes at a time, and hardly a register is spilled."""
    ways = ways_of(DenseProblem(op, M, 64, N, world, dtype, product=MADE)).values()
    configs = [way.config for way in ways if way.kernel is not None and way.kernel.kind == "sums"]
    assert configs
    product = torch.empty(M, N, dtype=dtype)
    out = product if op == REDUCE else product.chunk(world)[0]
    for config in configs:
        memory = memory_for(sums_needs(M * N, dtype.itemsize, world, op == REDUCE, config), world)
        kernel, cubin = compile_launch(
            lambda memory=memory, config=config: launch_exchange_sums(
                memory, product, out, True, op == REDUCE, config
            )
        )
        assert not kernel.find(SIGNAL), str(config)
        check_words(kernel, str(config))
        check_waits(kernel, str(config))
        check_dependent(kernel.lines, str(config))
        for at in kernel.find(GPU_SCOPE):
            assert not kernel.is_from_memory(kernel.lines[at]), f"{config}: {kernel.lines[at]}"
        found = used(cubin, tmp_path)
        assert found["REG"] <= config.registers
        assert found["STACK"] <= 16, f"{config}: {found['STACK']} bytes are spilled"
        text = "\n".join(kernel.lines)
        assert "ld.global.b16" not in text
        assert "st.global.b16" not in text
        assert "ld.global.v4.b32" in text
        assert "st.global.v4.b32" in text
