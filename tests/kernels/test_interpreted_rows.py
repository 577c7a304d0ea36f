"""exchange_rows and exchange_row_packets on ranks that interpret them: sums bit by bit, tails as their
reference."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autofuse.native_kernels.gpu.state import CODES_PER_SITE, Record, Wait
from tests.kernels.calls import BF16, FP16, SITE, give_up, run_calls
from tests.kernels.row_calls import CONFIG, RowPackets, Rows
from tests.ranks import RankPool

Interpreters = Callable[[int], RankPool]

FP32, MASK = torch.float32, torch.bool
ONCE = replace(CONFIG, once=True)
NORM = "add %0; keep; to float32; rms 1e-06; to bfloat16; mul %1"
"""A residual, and the norm of Hugging Face's Llama."""
TWICE = "add %0; keep; to float32; rms 1e-06; to bfloat16; mul %1; add %0"
STATISTICS = "add %0; to float32; rms 1e-06 keep; to bfloat16; mul %1"
RESIDUAL, GAMMA = (True, True, BF16), (False, True, BF16)
LAYER_NORM = "to float32; add %0; standardize 1e-05 keep; mul %1; add %2; to float16"
DROPOUT = "masked_fill %0 0.0; mul 1.25; where %1 %2; gelu tanh"
QUANTISED = "to float32; rms 1e-06; mul %0; clamp_min -448; clamp_max 448; to float8_e4m3fn"
RMS_BACKWARD = "mul %0; keep; to float32; project %1 %2; mul %2; to bfloat16; add %1"
LAYER_NORM_BACKWARD = "mul %0; to float32; centre %1; mul %2; to bfloat16"
EXACT = "clamp_min 0.5; clamp_max 0.5; mul %0; keep; to float8_e4m3fn"
"""In float8, to which the interpreter does not always round as GPUs do."""
POINTWISE = "relu; sub %0; rsub 1.0; div 3.0; neg; silu; gelu none"
CALLS = [
    Rows(24, 40, 16),
    Rows(13, 24, 16, mean=True, config=ONCE),
    Rows(1, 8, 16),  # the last ranks have no item
    Rows(
        24, 40, 16, dtype=FP32, config=ONCE, tail=LAYER_NORM,
        operands=((True, True, FP16), GAMMA, (True, False, FP32)),
    ),
    Rows(12, 40, 16, dtype=FP32, all_ranks=False),
    Rows(12, 40, 16, dtype=FP32, mean=True),
    Rows(24, 40, 16, tail=NORM, operands=(RESIDUAL, GAMMA)),
    Rows(5, 72, 16, tail=NORM, operands=(RESIDUAL, GAMMA), config=ONCE, programs=3),
    Rows(12, 40, 16, tail=NORM, operands=(RESIDUAL, GAMMA), all_ranks=False),
    Rows(
        7, 24, 16, dtype=FP16, tail=LAYER_NORM,
        operands=((True, True, FP16), (False, True, FP32), (True, False, FP32)),
    ),
    Rows(
        24, 16, 16, mean=True, all_ranks=False, tail=DROPOUT,
        operands=((True, True, MASK), (True, False, MASK), (False, False, FP32)),
    ),
    Rows(9, 40, 16, tail=POINTWISE, operands=(GAMMA,), config=ONCE),
    Rows(9, 40, 16, tail=NORM, operands=(RESIDUAL, GAMMA), config=ONCE, alone=True),
    *(
        Rows(9, 40, 16, tail=tail, operands=(RESIDUAL, GAMMA)[: 1 + ("%1" in tail)], config=ONCE, alone=True)
        for tail in (TWICE, STATISTICS, "add %0")
    ),
    Rows(9, 40, 16, tail=RMS_BACKWARD, operands=(GAMMA, RESIDUAL, (True, False, FP32))),
    Rows(5, 24, 16, tail=LAYER_NORM_BACKWARD, operands=(GAMMA, RESIDUAL, (True, False, FP32)), config=ONCE),
    Rows(9, 40, 16, tail=EXACT, operands=(RESIDUAL,)),
    RowPackets(1, 40, 16),
    RowPackets(12, 24, 16, mean=True, tail=NORM, operands=(RESIDUAL, GAMMA), programs=3),
    RowPackets(
        5, 72, 16, dtype=FP16, tail=LAYER_NORM,
        operands=((True, True, FP16), (False, True, FP32), (True, False, FP32)),
    ),
    RowPackets(12, 40, 16, tail=NORM, operands=(RESIDUAL, GAMMA), all_ranks=False),
]  # fmt: skip


@pytest.mark.parametrize("world", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 4))])
def test_back_to_back(interpreters: Interpreters, world: int) -> None:
    """Calls use the halves of the memory by turns."""
    calls = [call for call in CALLS if call.all_ranks or call.m % world == 0]
    interpreters(world).run(run_calls, [*calls, *calls[1:3]], timeout=120)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))])
def test_programs_that_are_placed_late(interpreters: Interpreters, seed: int) -> None:
    interpreters(2).run(run_calls, CALLS, 0, 1, seed, timeout=120)


@pytest.mark.parametrize(
    "call", [Rows(24, 40, 16), Rows(24, 40, 16, config=ONCE), RowPackets(24, 40, 16)], ids=repr
)
def test_a_lost_rank(interpreters: Interpreters, call: Rows) -> None:
    """It is named, and the kernel ends."""
    records = interpreters(3).run(give_up, call, 1, False, timeout=60)
    for rank in (0, 2):
        assert records[rank][Record.RAISED] == 1
        assert records[rank][Record.SOURCE] == 1
        assert records[rank][Record.CODE] in {
            SITE * CODES_PER_SITE + what for what in (Wait.REDUCING, Wait.COPYING)
        }
