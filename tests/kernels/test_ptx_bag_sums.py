"""What the compiler makes of exchange_bags for sm_90; no GPU is needed. The rules are those of
test_ptx_embedding.py."""

from pathlib import Path

import pytest
import torch

from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.dense.ways import REDUCE, SCATTER
from autofuse.lowering.gpu.embedding.reduced import ReducedProblem
from autofuse.native_kernels.triton.embedding_tables import Places, Tables
from autofuse.native_kernels.triton.exchange_bags import (
    FEW_RANKS,
    HELD,
    bag_sums_needs,
    launch_exchange_bags,
)
from tests.kernels.test_ptx import ACQUIRE, GPU_SCOPE, compile_launch
from tests.kernels.test_ptx_embedding import (
    COUNT,
    SIGNAL,
    check_resources,
    check_signals,
    check_waits,
    memory_for,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BAGS, DIM, TABLES = 512, 256, 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("op", "table", "wire", "mode", "weighted", "world"),
    [
        (REDUCE, BF16, BF16, 0, False, 2),
        (SCATTER, FP32, FP32, 1, False, 4),
        pytest.param(SCATTER, BF16, BF16, 1, False, 4, marks=pytest.mark.full),
        pytest.param(REDUCE, FP32, FP16, 0, True, 8, marks=pytest.mark.full),
        pytest.param(SCATTER, FP16, FP16, 2, False, 8, marks=pytest.mark.full),
    ],
)
def test_configurations(
    op: str, table: torch.dtype, wire: torch.dtype, mode: int, weighted: bool, world: int, tmp_path: Path
) -> None:
    """Memory is read and written 16 bytes at a time, hardly a register is spilled, and all programs fit."""
    columns, index = TABLES * DIM, torch.int64
    ways = ways_of(ReducedProblem(op, BAGS, columns, world, wire, 132, True)).values()
    configs = [way.config for way in ways if way.fused]
    assert len(configs) >= 3
    tables = Tables(
        [torch.empty(8, DIM, dtype=table)] * TABLES,
        [torch.empty(8, dtype=index)] * TABLES,
        [torch.empty(BAGS, dtype=index)] * TABLES,
        [torch.empty(8, dtype=table)] * TABLES if weighted else [],
        mode,
    )
    places = Places(BAGS, tuple(range(0, columns, DIM)), columns, ())
    words = torch.empty(256, dtype=torch.int64)
    out = torch.empty(BAGS if op == REDUCE else BAGS // world, columns, dtype=wire)
    for config in configs:
        need = bag_sums_needs(BAGS, columns, wire.itemsize, world, op == REDUCE, config)
        memory = memory_for(need, world)
        kernel, cubin = compile_launch(
            lambda memory=memory, config=config: launch_exchange_bags(
                memory, words, tables, places, out, False, op == REDUCE, config
            )
        )
        where = f"{op}, {table}, {wire}, {world} ranks, {config}"
        for each in (SIGNAL, ACQUIRE) if config.once else (SIGNAL, COUNT, ACQUIRE):
            assert kernel.find(each), f"{where}: {each}"
        check_signals(kernel, where)
        check_waits(kernel, where)
        for at in kernel.find(GPU_SCOPE):
            assert not kernel.is_from_memory(kernel.lines[at]), f"{where}: {kernel.lines[at]}"
        # What is spilled is read once an item, not in the loop over rows.
        check_resources(kernel, cubin, config, tmp_path, 0 if (table, mode) == (BF16, 0) else 24)
        text = "\n".join(kernel.lines)
        assert "ld.global.b16" not in text, where
        assert "st.global.b16" not in text, where
        threads, wide = 32 * config.warps, 16 // table.itemsize
        rows = config.unroll * max(1, config.tile // (wide * threads))
        ranks = world if world <= FEW_RANKS.value else HELD.value * threads // config.tile
        parts = ranks * max(1, config.tile * wire.itemsize // (16 * threads))
        assert text.count("ld.global.v4.b32") >= rows + parts, where
        assert "st.global.v4.b32" in text, where
