"""What the compiler makes of the kernels of all_reduce_update for sm_90; no GPU is needed."""

from pathlib import Path

import pytest
import torch

from autofuse.lowering.update_rules import RULES
from autofuse.native_kernels.triton.whole_update_packets import (
    WholePacketsConfig,
    launch_whole_update_packets,
    whole_packets_needs,
)
from tests.kernels.test_ptx import POLL, PUT, check_decisions, compile_launch
from tests.kernels.test_ptx_embedding import memory_for, used

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("rule", "dtypes", "world", "unit"),
    [
        ("adam", (BF16, BF16), 2, 4),
        ("adam", (FP32, FP32), 4, 4),
        ("amsgrad", (BF16, BF16), 8, 1),
        pytest.param("amsgrad", (FP16, FP16), 3, 4, marks=pytest.mark.full),
        pytest.param("momentum", (BF16, FP32), 4, 4, marks=pytest.mark.full),
        pytest.param("sgd", (FP32, FP32), 2, 4, marks=pytest.mark.full),
        pytest.param("adam", (FP32, FP32), 8, 4, marks=pytest.mark.full),
    ],
)
def test_packets(
    rule: str, dtypes: tuple[torch.dtype, torch.dtype], world: int, unit: int, tmp_path: Path
) -> None:
    """A payload and its epoch are one access, and states are read and written 16 bytes at a time."""
    memory = memory_for(whole_packets_needs(200, dtypes[0].itemsize, world), world)
    words, rates = torch.empty(256, dtype=torch.int64), torch.empty(1024)
    given = words, words, rates, 200, dtypes, unit, RULES[rule].code, True
    kernel, cubin = compile_launch(lambda: launch_whole_update_packets(memory, *given, WholePacketsConfig()))
    where = f"{rule}, {dtypes}, {world}"
    polls, puts = (
        [m["type"] for line in kernel.lines if (m := kind.search(line)) and kernel.is_from_memory(line)]
        for kind in (POLL, PUT)
    )
    packets = {"b64", "v2.b64"}
    assert {"b32"} < set(polls) <= {"b32", *packets}, f"{where}: {polls}"  # b32: Record.STOP
    assert packets & set(puts), f"{where}: {puts}"  # besides parameters
    check_decisions(kernel, where)
    assert used(cubin, tmp_path)["STACK"] <= 32, where
    text = "\n".join(kernel.lines)
    if unit == 4 and RULES[rule].states:
        assert "ld.global.v4.b32" in text
        assert "st.global.v4.b32" in text
