"""What the compiler makes of the kernels of optimizers for sm_90; no GPU is needed. The rules are those of
test_ptx_embedding.py."""

from functools import partial
from pathlib import Path

import pytest
import torch

from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.optimizer.ways import UpdateProblem
from autofuse.lowering.update_rules import RULES
from autofuse.native_kernels.triton.clipped_update import Clipping, launch_clipped_update
from autofuse.native_kernels.triton.lamb_packets import lamb_packets_needs, launch_lamb_packets
from autofuse.native_kernels.triton.lamb_update import launch_lamb_update
from autofuse.native_kernels.triton.update_exchange import launch_update_exchange
from autofuse.native_kernels.triton.update_launch import UpdateConfig, update_needs
from autofuse.native_kernels.triton.update_numbers import launch_update_numbers
from autofuse.native_kernels.triton.update_packet_parts import UpdatePacketsConfig
from autofuse.native_kernels.triton.update_packets import launch_update_packets, update_packets_needs
from tests.kernels.test_ptx import (
    GPU_SCOPE,
    PACKET,
    PUT,
    Kernel,
    check_decisions,
    check_polls,
    compile_launch,
    compile_launches,
    types_of,
)
from tests.kernels.test_ptx_embedding import (
    SIGNAL,
    check_signals,
    check_waits,
    check_words,
    memory_for,
    used,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MOST = 1000


def compiled(
    rule: str, dtypes: tuple[torch.dtype, torch.dtype], master: bool, world: int, config: UpdateConfig,
    clips: bool,
) -> list[tuple[Kernel, bytes]]:  # fmt: skip
    grad, param = dtypes
    memory = memory_for(update_needs(config, MOST, grad.itemsize, param.itemsize, world), world)
    words, state = torch.empty(256, dtype=torch.int64), torch.empty(1024)
    states = [state] * len(RULES[rule].states)
    given = words, words, state, states, state if master else None
    how, code = (MOST, dtypes, 4), RULES[rule].code
    kept, clipping = (state.double(), state), Clipping(state[:1], 1.0, lambda: None)
    if rule == "lamb":
        given_norm = clipping if clips else None
        launch = partial(launch_lamb_update, memory, *given, *kept, state, *how, True, given_norm, config)
    elif clips:
        launch = partial(launch_clipped_update, memory, *given, *kept, *how, code, True, clipping, config)
    else:
        launch = partial(launch_update_exchange, memory, *given, *how, code, True, config)
    return compile_launches(launch)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rule", "dtypes", "master", "world", "clips"),
    [
        ("adam", (BF16, BF16), False, 4, False),
        pytest.param("adam", (BF16, BF16), False, 2, False, marks=pytest.mark.full),
        pytest.param("adam", (FP32, FP32), False, 4, False, marks=pytest.mark.full),
        ("adam", (BF16, BF16), False, 2, True),
        ("lamb", (BF16, BF16), False, 2, False),
        pytest.param("adam", (BF16, BF16), True, 8, False, marks=pytest.mark.full),
        pytest.param("amsgrad", (FP16, FP16), True, 8, False, marks=pytest.mark.full),
        pytest.param("momentum", (BF16, FP32), False, 2, False, marks=pytest.mark.full),
        pytest.param("sgd", (FP32, FP32), False, 8, False, marks=pytest.mark.full),
        pytest.param("adam", (FP32, FP32), True, 4, True, marks=pytest.mark.full),
        pytest.param("sgd", (BF16, FP32), False, 8, True, marks=pytest.mark.full),
        pytest.param("lamb", (FP32, FP32), True, 8, False, marks=pytest.mark.full),
        pytest.param("lamb", (BF16, BF16), True, 4, True, marks=pytest.mark.full),
        pytest.param("lamb", (FP32, FP32), False, 2, True, marks=pytest.mark.full),
    ],
)
def test_rules(
    rule: str, dtypes: tuple[torch.dtype, torch.dtype], master: bool, world: int, clips: bool, tmp_path: Path
) -> None:
    problem = UpdateProblem(1 << 20, MOST, rule, dtypes, len(RULES[rule].states) + master, world, clips=clips)
    configs = [way.config for way in ways_of(problem).values() if way.fused]
    config = configs[world % 4 // 2 % len(configs)]
    kernels = compiled(rule, dtypes, master, world, config, clips)
    assert len(kernels) == 1 + clips + (rule == "lamb")
    for kernel, cubin in kernels:
        check(kernel, cubin, f"{kernel.name}, {rule}, {dtypes}, {config}", config, tmp_path)
        text = "\n".join(kernel.lines)
        sent = {"sum_gradients": dtypes[0], "update_parameters": dtypes[1]}.get(kernel.name, dtypes[0])
        if sent.itemsize == 2 and not (clips and kernel.name == "measure_updates"):  # which sends nothing
            assert "st.global.v2.b32" in text
            check_words(kernel, kernel.name)
        if rule != "sgd" and kernel.name != "sum_gradients":
            assert "ld.global.v4.b32" in text
            if (rule, kernel.name) != ("lamb", "update_parameters"):  # which has no states
                assert "st.global.v4.b32" in text


@pytest.mark.parametrize(
    ("rule", "dtypes", "master", "world"),
    [
        ("adam", (BF16, BF16), False, 2),
        pytest.param("adam", (FP32, FP32), False, 4, marks=pytest.mark.full),
        pytest.param("amsgrad", (FP16, FP16), True, 8, marks=pytest.mark.full),
        pytest.param("momentum", (BF16, FP32), False, 3, marks=pytest.mark.full),
        pytest.param("sgd", (FP32, FP32), True, 2, marks=pytest.mark.full),
        ("lamb", (BF16, BF16), False, 2),
        pytest.param("lamb", (FP32, FP32), True, 4, marks=pytest.mark.full),
        pytest.param("lamb", (FP16, FP32), False, 8, marks=pytest.mark.full),
    ],
)
def test_packets(
    rule: str, dtypes: tuple[torch.dtype, torch.dtype], master: bool, world: int, tmp_path: Path
) -> None:
    most, config = 200, UpdatePacketsConfig()
    needs = (lamb_packets_needs if rule == "lamb" else update_packets_needs)(most, world)
    memory = memory_for(needs, world)
    words, state = torch.empty(256, dtype=torch.int64), torch.empty(1024)
    states = [state] * len(RULES[rule].states)
    given = memory, words, words, state, states, state if master else None, most, dtypes, 4
    if rule == "lamb":
        kernel, cubin = compile_launch(lambda: launch_lamb_packets(*given, True, config))
    else:
        code = RULES[rule].code
        kernel, cubin = compile_launch(lambda: launch_update_packets(*given, code, True, config))
    where = f"{rule}, {dtypes}, {world}"
    check_polls(kernel, where)
    puts = types_of(kernel, PUT)
    assert PACKET & puts, f"{where}: {puts}"  # besides parameters
    check_decisions(kernel, where)
    # The packets of all ranks are in registers at once. LAMB has more values besides.
    most_bytes = {"lamb": (64, 256)}.get(rule, (16, 128))[world > 4]
    assert used(cubin, tmp_path)["STACK"] <= most_bytes


def check(kernel: Kernel, cubin: bytes, where: str, config: UpdateConfig, tmp_path: Path) -> None:
    """Memory is read and written 8 bytes or more at a time, and hardly a register is spilled. Ranks signal
    that they have stored sums of squares."""
    assert bool(kernel.find(SIGNAL)) == (kernel.name in ("sum_gradients", "measure_updates")), where
    check_signals(kernel, where)
    check_waits(kernel, where)
    for at in kernel.find(GPU_SCOPE):  # `signal_all` has registers of its own, and no such scope
        assert not kernel.is_from_memory(kernel.lines[at]), f"{where}: {kernel.lines[at]}"
    found = used(cubin, tmp_path)
    assert found["REG"] <= config.registers
    assert found["STACK"] <= 16, f"{where}: {found['STACK']} bytes are spilled"
    text = "\n".join(kernel.lines)
    assert "ld.global.b16" not in text
    assert "st.global.b16" not in text


@pytest.mark.parametrize("counted", [True, False])
def test_numbers(counted: bool, tmp_path: Path) -> None:
    counts, options = torch.empty(100, dtype=torch.float64), torch.empty(3, 61, dtype=torch.float64)
    order, numbers = torch.empty(100, dtype=torch.int32), torch.empty(100, 12)
    added = counts if counted else None
    _, cubin = compile_launch(lambda: launch_update_numbers(counts, added, order, options, numbers))
    assert used(cubin, tmp_path)["STACK"] == 0
