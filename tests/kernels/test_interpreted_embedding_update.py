"""embedding_backward with updates on ranks that interpret it, against entry by entry in fp64."""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from autofuse.lowering.gpu.embedding.kernels import MERGED_NCCL
from tests.kernels.backward_calls import CONFIG, Backward
from tests.kernels.embedding_calls import Exchange
from tests.kernels.test_interpreted_embedding import even, mixed
from tests.kernels.update_calls import Update, run_update_way, run_updates, same_rows
from tests.ranks import RankPool

Interpreters = Callable[[int], RankPool]

FP16, FP32, INT32 = torch.float16, torch.float32, torch.int32
MEAN = 1


def cases(world: int) -> dict[str, Update]:
    one = even(world, 1)
    few: dict[str, tuple[Exchange, dict[str, Any]]] = {
        "plain": (Exchange(even(world)), {}),
        "mixed dims": (Exchange(mixed(world), b=3), {"keep": True}),
        "fp16": (Exchange(even(world, 3), dtypes=(FP16,), wire=FP16, index=INT32), {"keep": True}),
        "fp32, bf16 on the wire": (Exchange(even(world), dtypes=(FP32,), padding=0), {}),
        "mean": (Exchange(one, mode=MEAN, pooling=2, b=20, padding=3, index=INT32, last=True), {}),
        "weighted": (Exchange(even(world), weighted=True, padding=4, last=True, dtypes=(FP32,)), {}),
        "no row twice": (Exchange(one, rows=5000, pooling=2), {}),
        "one row": (Exchange(even(world), rows=1, b=17, dtypes=(FP32,)), {}),
        "strips of 4": (Exchange(one, rows=3, b=13), {"config": replace(CONFIG, strip=4, tile=16)}),
        "long bags": (Exchange(one, b=2, pooling=23), {}),
        "empty bags": (Exchange(even(world), pooling=0), {}),
        "a table without rows": (Exchange(even(world, 3), bare=2, padding=4), {}),
        "no rows at all": (Exchange(even(world), bare=9), {"keep": True}),
        "wider than a tile": (Exchange(even(world, 1, 200), dtypes=(FP32,), rows=5), {}),
        "one program": (Exchange(even(world)), {"config": replace(CONFIG, per_sm=1, adding=0)}),
        "merged": (Exchange(mixed(world), b=3, weighted=True), {"push": False}),
    }
    rules = cycle([True, False, True])  # how rows are found is the same for both
    return {name: Update(of, rowwise=next(rules), **options) for name, (of, options) in few.items()}


@pytest.mark.parametrize("part", range(3))
def test_exact(interpreters: Interpreters, part: int) -> None:
    """Calls use the halves of the memory by turns."""
    interpreters(2).run(run_updates, list(cases(2).values())[part::3], timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("name", list(cases(2)))
def test_exact_in_both_halves(interpreters: Interpreters, name: str) -> None:
    """Every call in either half of the memory."""
    interpreters(2).run(run_updates, [cases(2)[name]] * 2, timeout=120)


@pytest.mark.parametrize(("world", "step"), [(3, 3), pytest.param(4, 1, marks=pytest.mark.full)])
def test_back_to_back(interpreters: Interpreters, world: int, step: int) -> None:
    """Every `step`-th call, with gradients that are stored between them."""
    calls: list[Backward] = [*cases(world).values()][::step]
    calls[1::3] = [Backward(call.of, config=call.config) for call in calls[1::3]]
    interpreters(world).run(run_updates, calls, timeout=300)


@pytest.mark.parametrize(
    "layout", ["bstd", *(pytest.param(each, marks=pytest.mark.full) for each in ("sbc", "stbd", "sbtd"))]
)
def test_layouts(interpreters: Interpreters, layout: str) -> None:
    call = Update(Exchange(even(2, 3, 8), b=9, pooling=2, layout=layout), keep=True, rowwise=True)
    interpreters(2).run(run_updates, [call], timeout=120)


@pytest.mark.parametrize(("way", "rowwise"), [("strips", True), (MERGED_NCCL, False)])
def test_as_the_op_runs_it(interpreters: Interpreters, way: str, rowwise: bool) -> None:
    """With the workspace of CPU ranks, and gloo in place of NCCL."""
    call = Update(Exchange(mixed(2), b=3, last=True), keep=True, rowwise=rowwise)
    interpreters(2).run(run_update_way, way, call)


@pytest.mark.parametrize("rowwise", [False, True])
def test_the_same_bits_in_every_run(interpreters: Interpreters, rowwise: bool) -> None:
    of = Exchange(even(2), pooling=9, padding=1, dtypes=(FP32,))
    interpreters(2).run(same_rows, Update(of, rowwise=rowwise), timeout=120)
