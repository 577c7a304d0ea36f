"""What the compiler makes of embedding_backward and list_entries for sm_90, in every way; no GPU is needed.

The rules are those of test_ptx_embedding.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import pytest
import torch

from autofuse.lowering.gpu.choice.kernel import ways_of
from autofuse.lowering.gpu.embedding.kernels import MERGED_NCCL
from autofuse.lowering.gpu.embedding.places import backward_places
from autofuse.lowering.gpu.embedding.ways import BACKWARD, ExchangeProblem
from autofuse.native_kernels.gpu.memory import EVENTS
from autofuse.native_kernels.triton.embedding_backward import launch_embedding_backward
from autofuse.native_kernels.triton.embedding_entries import PER_SM, WARPS, Entries, sorted_entries
from autofuse.native_kernels.triton.embedding_tables import BackwardConfig, Tables, backward_needs
from tests.kernels.test_ptx import ACQUIRE, Kernel, compile_launch
from tests.kernels.test_ptx_embedding import (
    COUNT,
    SIGNAL,
    B,
    check_resources,
    check_scopes,
    check_signals,
    check_waits,
    memory_for,
)
from tests.subsets import EVERY, each_value

BF16, FP16, FP32, INT32, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64


def ways(world: int) -> dict[str, BackwardConfig]:
    problem = ExchangeProblem(B, (1024,) * world, "bsc", BF16, op=BACKWARD)
    return {name: way.config for name, way in ways_of(problem).items() if way.fused}


def tables_of(dtype: torch.dtype, index: torch.dtype, mode: int, weighted: bool, world: int) -> Tables:
    """4 of 256 columns."""
    return Tables(
        [torch.empty(8, 256, dtype=dtype)] * 4,
        [torch.empty(8, dtype=index)] * 4,
        [torch.empty(B * world, dtype=index)] * 4,
        [torch.empty(8, dtype=dtype)] * 4 if weighted else [],
        mode,
    )


def compiled(
    config: BackwardConfig,
    push: bool = True,
    dtype: torch.dtype = BF16,
    index: torch.dtype = INT64,
    mode: int = 0,
    weighted: bool = False,
    keep: bool = False,
    trace: bool = False,
    world: int = 4,
    update: int = 0,
) -> tuple[Kernel, bytes]:
    """As `lowering.gpu.embedding.run` launches it on rank 0; update: `Tables.update`."""
    columns = (1024,) * world
    memory = memory_for(backward_needs(B, columns, BF16.itemsize), world)
    tables = tables_of(dtype, index, mode, weighted, world)
    if update:
        states = [torch.empty(8)] * 4 if update == 2 else ()
        tables = replace(tables, rates=[torch.empty(2)] * 4, states=states)
    places = backward_places("bsc", 0, B, columns, tables.dims)
    keys, scales, words = torch.empty(32, dtype=INT32), torch.empty(32), torch.empty(256, dtype=INT64)
    grad, exchanged = torch.empty(B, 1024 * world, dtype=BF16), torch.empty(B * world, 1024, dtype=BF16)
    events = torch.empty(132 * config.per_sm, EVENTS, 2, dtype=INT64) if trace else None
    return compile_launch(
        lambda: launch_embedding_backward(
            memory, words, tables, places, Entries(keys, keys, scales), grad if push else None,
            exchanged if keep or not push else None, config, trace=events,
        )
    )  # fmt: skip


def cases() -> Iterator[tuple[str, BackwardConfig, dict[str, object]]]:
    """Every way for 2, 4 and 8 ranks; dtypes, modes, weights, what is kept and updates by turns."""
    turns = cycle(product([BF16, FP16, FP32], [0, 1], [False, True]))
    updates = cycle([0, 1, 0, 2, 2])
    for world in (2, 4, 8):
        for way, config in ways(world).items():
            dtype, mode, keep = next(turns)
            weighted, trace = mode == 0 and keep, not keep
            yield way, config, {
                "dtype": dtype, "mode": mode, "keep": keep, "weighted": weighted, "trace": trace,
                "world": world, "push": way != MERGED_NCCL, "update": next(updates),
            }  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", EVERY)
def test_rules(every: bool) -> None:
    given = list(cases())
    for way, config, settings in (
        given if every else each_value(given, lambda case: {"way": case[0], **case[2]})
    ):
        kernel, _ = compiled(config, **settings)  # type: ignore[arg-type]
        where = f"{way}, {settings}"
        assert bool(kernel.find(SIGNAL)) == settings["push"], where
        assert kernel.find(COUNT), where
        assert kernel.find(ACQUIRE), where
        check_signals(kernel, where)
        check_waits(kernel, where)
        check_scopes(kernel, where)


PUSHED = [way for way in ways(4) if way != MERGED_NCCL]


@pytest.mark.parametrize(
    ("way", "dtype", "update"),
    [
        pytest.param(way, dtype, update, marks=[] if i == number % 3 else pytest.mark.full)
        for number, way in enumerate(PUSHED)
        for i, (dtype, update) in enumerate([(BF16, 0), (FP32, 0), (BF16, 2)])
    ],
)
def test_registers_and_vectors(way: str, dtype: torch.dtype, update: int, tmp_path: Path) -> None:
    """Rows of gradients, and of tables, are read and written 16 bytes at a time."""
    config = ways(4)[way]
    kernel, cubin = compiled(config, dtype=dtype, update=update)
    check_resources(kernel, cubin, config, tmp_path)
    text = "\n".join(kernel.lines)
    assert text.count("ld.global.v4.b32") >= 4 * max(1, config.tile // (8 * 32 * config.warps))
    assert "st.global.v4.b32" in text
    assert "ld.global.b16" not in text
    assert "st.global.b16" not in text


@pytest.mark.parametrize("index", [INT32, INT64])
@pytest.mark.parametrize("mode", [0, 1])
def test_entries(index: torch.dtype, mode: int, tmp_path: Path) -> None:
    memory = memory_for(backward_needs(B, (1024,) * 4, 2), 4)
    tables = tables_of(BF16, index, mode, True, 4)
    words = torch.empty(256, dtype=INT64)
    kernel, cubin = compile_launch(lambda: sorted_entries(memory, words, tables, 4 * B, compile_only=True))
    check_resources(kernel, cubin, BackwardConfig(warps=WARPS, per_sm=PER_SM), tmp_path)
    assert not kernel.find(SIGNAL)
