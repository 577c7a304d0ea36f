"""What the compiler makes of exchange_rows, exchange_row_packets and tails for sm_90; no GPU is needed. The
rules are those of test_ptx.py and test_ptx_embedding.py."""

import re
from pathlib import Path

import pytest
import torch

from autofuse.lowering.gpu.dense.tails import tail_of
from autofuse.native_kernels.triton.exchange_row_packets import (
    RowPacketsConfig,
    launch_exchange_row_packets,
    row_packets_fit,
    row_packets_needs,
)
from autofuse.native_kernels.triton.exchange_rows import (
    WARPS_PER_SM,
    RowsConfig,
    launch_exchange_rows,
    rows_needs,
)
from autofuse.native_kernels.triton.tail_alone import launch_tail
from tests.kernels import test_ptx
from tests.kernels.calls import BF16, FP16
from tests.kernels.test_interpreted_rows import (
    DROPOUT,
    FP32,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    NORM,
    POINTWISE,
    QUANTISED,
    RMS_BACKWARD,
)
from tests.kernels.test_ptx import ACQUIRE, GPU_SCOPE, Kernel, compile_launch
from tests.kernels.test_ptx_embedding import SIGNAL, check_signals, check_waits, memory_for, used

M, N = 256, 8192


def is_vectorised(kernel: Kernel, stored: str = "v4") -> bool:
    """Whether rows are read 16 bytes at a time, and written in vectors of words."""
    text = "\n".join(kernel.lines)
    single = any(f"{what}.global.b16" in text for what in ("ld", "st"))
    return not single and "ld.global.v4.b32" in text and f"st.global.{stored}.b32" in text


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("columns", "all_ranks", "once", "world", "dtype"),
    [
        (8192, True, True, 2, BF16),
        (3072, True, False, 4, BF16),
        (8192, True, True, 2, FP32),
        pytest.param(16384, True, True, 8, BF16, marks=pytest.mark.full),
        pytest.param(16384, True, False, 8, FP32, marks=pytest.mark.full),
        pytest.param(1024, False, False, 4, BF16, marks=pytest.mark.full),
    ],
)
def test_the_exchange(
    columns: int, all_ranks: bool, once: bool, world: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With a residual and a norm; hardly a register is spilled."""
    config = RowsConfig(once=once)
    rows = M if all_ranks else M // world
    product, residual = torch.empty(M, columns, dtype=dtype), torch.empty(rows, columns, dtype=BF16)
    operands = [residual, torch.empty(columns, dtype=BF16)]
    tail = tail_of(NORM, dtype, rows, operands)
    need = rows_needs(M, columns, dtype.itemsize, world, all_ranks, config, sum(tail.row_bytes(columns)))
    kernel, cubin = compile_launch(
        lambda: launch_exchange_rows(
            memory_for(need, world), product, tail.empty(product, rows, columns), False, all_ranks, config,
            operands=operands, tail=tail,
        )
    )  # fmt: skip
    assert kernel.find(SIGNAL)
    assert kernel.find(ACQUIRE)
    check_signals(kernel, str(config))
    check_waits(kernel, str(config))
    for at in kernel.find(GPU_SCOPE):
        assert not kernel.is_from_memory(kernel.lines[at]), kernel.lines[at]
    found = used(cubin, tmp_path)
    assert found["REG"] <= 65536 // (32 * WARPS_PER_SM)
    assert found["STACK"] <= 64, f"{found['STACK']} bytes are spilled"
    assert is_vectorised(kernel)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("columns", "all_ranks", "world"),
    [
        (8192, True, 2),
        (2048, False, 4),
        pytest.param(16384, True, 2, marks=pytest.mark.full),
        pytest.param(8192, True, 4, marks=pytest.mark.full),
        pytest.param(4096, True, 8, marks=pytest.mark.full),
    ],
)
def test_packets_of_rows(columns: int, all_ranks: bool, world: int, tmp_path: Path) -> None:
    """With a residual and a norm; hardly a register is spilled."""
    config, m = RowPacketsConfig(), 16
    assert row_packets_fit(columns, world)
    rows = m if all_ranks else m // world
    product, residual = torch.empty(m, columns, dtype=BF16), torch.empty(rows, columns, dtype=BF16)
    operands = [residual, torch.empty(columns, dtype=BF16)]
    tail = tail_of(NORM, BF16, rows, operands)
    kernel, cubin = compile_launch(
        lambda: launch_exchange_row_packets(
            memory_for(row_packets_needs(m, columns, world, all_ranks), world), product,
            tail.empty(product, rows, columns), False, all_ranks, config, operands=operands, tail=tail,
        )
    )  # fmt: skip
    for rule in ("check_signals", "check_waits", "check_scopes", "check_packets", "check_decisions"):
        getattr(test_ptx, rule)(kernel, str(config))
    found = used(cubin, tmp_path)
    assert found["STACK"] <= 40, f"{found['STACK']} bytes are spilled"
    text = "\n".join(kernel.lines)
    assert "st.global.v2.b64" in text
    assert "ld.volatile.global.v2.b64" in text
    assert "ld.global.b16" not in text


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        (NORM, [((M, N), BF16), ((N,), BF16)]),
        (LAYER_NORM, [((M, N), FP16), ((N,), FP32), ((M, 1), FP32)]),
        (DROPOUT, [((M, N), torch.bool), ((M, 1), torch.bool), ((), FP32)]),
        (POINTWISE, [((N,), BF16)]),
        (QUANTISED, [((N,), BF16)]),
        (RMS_BACKWARD, [((N,), BF16), ((M, N), BF16), ((M, 1), FP32)]),
        (LAYER_NORM_BACKWARD, [((N,), FP32), ((M, N), FP32), ((M, 1), FP32)]),
    ],
    ids=["norm", "layer norm", "dropout", "pointwise", "quantised", "rms backward", "layer norm backward"],
)
def test_a_tail_alone(text: str, operands: list[tuple[tuple[int, ...], torch.dtype]], tmp_path: Path) -> None:
    given = [torch.empty(shape, dtype=dtype) for shape, dtype in operands]
    value = torch.empty(M, N, dtype=FP16 if text == LAYER_NORM else BF16)
    tail = tail_of(text, value.dtype, M, given)
    results = tail.empty(value, *value.shape)
    kernel, cubin = compile_launch(lambda: launch_tail(value, given, results, tail))
    assert used(cubin, tmp_path)["STACK"] == 0
    (wait,) = kernel.find(re.compile("griddepcontrol.wait"))
    for at in kernel.find(re.compile(r"ld\.global")):
        sum_is_read = any("param_0]" in source for source in kernel.sources(kernel.lines[at]))
        assert sum_is_read == (at > wait), "operands are read before the wait, the sum behind it"
    assert is_vectorised(kernel, "v2" if text == QUANTISED else "v4")
