"""What the compiler makes of exchange_tokens and exchange_token_packets for sm_90; no GPU is needed. The
rules are those of test_ptx_embedding.py."""

from pathlib import Path

import pytest
import torch

from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.dense.ways import REDUCE, SCATTER
from autofuse.lowering.gpu.experts.reduced import TokensProblem
from autofuse.native_kernels.triton.exchange_sums import sums_needs
from autofuse.native_kernels.triton.exchange_token_packets import (
    TokenPacketsConfig,
    launch_exchange_token_packets,
    token_packets_needs,
)
from autofuse.native_kernels.triton.exchange_tokens import (
    TokenRows,
    TokensConfig,
    launch_exchange_tokens,
    launch_token_sums,
)
from tests.kernels.test_ptx import check_decisions, check_packets, compile_launch
from tests.kernels.test_ptx_embedding import (
    SIGNAL,
    check_resources,
    check_waits,
    check_words,
    memory_for,
    used,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOKENS, COLUMNS = 512, 1024


def rows_of(k: int, dtype: torch.dtype, wire: torch.dtype, taken: bool = True) -> TokenRows:
    factors = torch.empty(TOKENS * k, 1, dtype=FP32)
    added = torch.empty(TOKENS, COLUMNS, dtype=wire)
    index = torch.empty(TOKENS * k, dtype=torch.int64) if taken else None
    return TokenRows(
        torch.empty(TOKENS * k, COLUMNS, dtype=dtype), index, None, factors, added, TOKENS, k, False
    )


MOST_STEP = 8
"""Rows that a program reads at once, at most."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("op", "k", "dtype", "wire", "world"),
    [
        (REDUCE, 8, BF16, BF16, 2),
        (SCATTER, 2, FP32, FP32, 4),
        pytest.param(REDUCE, 16, FP16, FP32, 8, marks=pytest.mark.full),
    ],
)
def test_configurations(
    op: str, k: int, dtype: torch.dtype, wire: torch.dtype, world: int, tmp_path: Path
) -> None:
    """Memory is read and written 16 bytes at a time, no register is spilled, and all programs fit."""
    problem = TokensProblem(op, TOKENS, COLUMNS, world, wire, 132, True, 8, k, 64)
    configs = [way.config for way in ways_of(problem).values() if isinstance(way.config, TokensConfig)]
    assert len(configs) >= 2
    out = torch.empty(TOKENS if op == REDUCE else TOKENS // world, COLUMNS, dtype=wire)
    for config in configs:
        need = sums_needs(TOKENS * COLUMNS, wire.itemsize, world, op == REDUCE, config)
        memory = memory_for(need, world)
        kernel, cubin = compile_launch(
            lambda memory=memory, config=config: launch_exchange_tokens(
                memory, rows_of(k, dtype, wire, op == REDUCE), out, False, op == REDUCE, config
            )
        )
        where = f"{op}, {dtype}, {wire}, {world} ranks, {config}"
        assert not kernel.find(SIGNAL), where
        check_words(kernel, where)
        check_waits(kernel, where)
        check_resources(kernel, cubin, config, tmp_path, 0)
        _check_width("\n".join(kernel.lines), min(k, MOST_STEP) * 8 * dtype.itemsize // 16, where)


@pytest.mark.parametrize(
    ("op", "k", "wire", "world"),
    [
        (REDUCE, 8, BF16, 2),
        (SCATTER, 1, FP32, 4),
        pytest.param(REDUCE, 1, BF16, 4, marks=pytest.mark.full),
        pytest.param(REDUCE, 2, FP32, 8, marks=pytest.mark.full),
        pytest.param(SCATTER, 6, FP16, 3, marks=pytest.mark.full),
    ],
)
def test_packets(op: str, k: int, wire: torch.dtype, world: int, tmp_path: Path) -> None:
    """Payload and epoch are one access, and no register is spilled."""
    problem = TokensProblem(op, TOKENS, COLUMNS, world, wire, 132, True, 8, k, 64)
    configs = [w.config for w in ways_of(problem).values() if isinstance(w.config, TokenPacketsConfig)]
    assert len(configs) == 2
    whole = op == REDUCE
    out = torch.empty(TOKENS if whole else TOKENS // world, COLUMNS, dtype=wire)
    for config in configs:
        need = token_packets_needs(TOKENS * COLUMNS, wire.itemsize, world, whole, config)
        memory = memory_for(need, world)
        kernel, cubin = compile_launch(
            lambda memory=memory, config=config: launch_exchange_token_packets(
                memory, rows_of(k, wire, wire), out, False, whole, config
            )
        )
        where = f"{op}, {wire}, {world} ranks, {config}"
        check_packets(kernel, where)
        check_decisions(kernel, where)
        assert "ld.global.v4.b32" in "\n".join(kernel.lines), where
        assert used(cubin, tmp_path)["STACK"] == 0, where


def _check_width(text: str, loads: int, where: str) -> None:
    assert text.count("ld.global.v4.b32") >= loads, where
    assert "st.global.v4.b32" in text, where
    assert "ld.global.b16" not in text, where
    assert "st.global.b16" not in text, where


def test_the_sums_of_one_rank() -> None:
    out = torch.empty(TOKENS, COLUMNS, dtype=BF16)
    kernel, _ = compile_launch(lambda: launch_token_sums(rows_of(8, BF16, BF16), out, 132))
    _check_width("\n".join(kernel.lines), 8, "token_sums")
