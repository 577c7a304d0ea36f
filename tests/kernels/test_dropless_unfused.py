"""Dropless expert ops with grouped_mm, on CPU ranks: as the references of the ops, which read the offsets."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist

from autofuse import config
from autofuse.lowering.gpu.experts import dropless, unfused
from autofuse.lowering.gpu.experts.dropless import Counts, told_by_all
from autofuse.lowering.gpu.experts.kernels import Rows
from autofuse.lowering.gpu.experts.ways import COMBINE, DISPATCH, DROPLESS, DroplessProblem
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.torch_internals import has_grouped_mm
from tests.ops.tokens import Case, close
from tests.ranks import RankPool

if not has_grouped_mm():
    pytest.skip("this torch has no grouped_mm", allow_module_level=True)

BF16 = torch.bfloat16
PROBLEM = DroplessProblem(COMBINE + DROPLESS, 4, 24, 16, 2, BF16)
CASES = [
    Case(2, 4, sends=((9, 5), (7, 11)), dtype=BF16, n=16),
    Case(2, 4, sends=((9, 0), (30, 0)), dtype=BF16, n=16, bias=True, shuffled=True),
    Case(2, 3, sends=((0, 1), (0, 2)), dtype=BF16, n=16, bias=True),
]
NONE = 3
"""Rows behind the last expert."""


def _reference(op: str, *given: Any) -> list[torch.Tensor]:
    fused_op = FUSED_OPS[op]
    found: list[torch.Tensor] = fused_op.reference(fused_op.parse(given))
    return found


def _compare(rank: int, world: int, case: Case) -> None:
    group, site = dist.group.WORLD.group_name, (1, 1, False, dist.group.WORLD.group_name, "direct", "test")
    (w,), bias, offsets = case.weights(rank), case.biases(rank), case.offsets(rank)
    b, (sends, receives) = bias[0] if bias else None, case.splits(rank)
    # Tokens of the last rank have rows of no expert, as many at every rank.
    receives[-1] += NONE
    sends = [n + NONE * (rank == world - 1) for n in sends]
    positions = torch.cat([case.positions(rank), torch.arange(NONE) + sum(receives) - NONE])

    x = case.randn(rank, 1, sum(sends), case.k)
    rows = Rows(offsets, positions, receives, sends)
    product, exchanged = unfused.dispatch_unfused(x, [w], [b], rows, True, "", group)
    (wanted,) = _reference(DISPATCH, x, [w], bias, "", 0, *rows, *site)
    assert exchanged.shape == (sum(receives), case.k)
    used = int(offsets[-1])
    close(product[:used], wanted[:used].double(), case.k, BF16)
    assert not product[used:].any()
    (product,) = unfused.dispatch_unfused(x, [w, -w], [b, b], rows, False, "silu", group)
    (wanted,) = _reference(DISPATCH, x, [w, -w], bias * 2, "silu", 0, *rows, *site)
    close(product[:used], wanted[:used].double(), 2 * case.k, BF16)

    x = case.randn(rank, 2, sum(receives), case.k)
    rows = Rows(offsets, positions, sends, receives)
    y = unfused.combine_unfused([x], [w], b, rows, group)
    (wanted,) = _reference(COMBINE, [x], [w], bias, [], "mm", 0, *rows, *site)
    close(y, wanted.double(), case.k, BF16)
    more = case.randn(rank, 3, sum(receives), case.k)
    y = unfused.combine_unfused([x, more], [w, -w], None, rows, group)
    (wanted,) = _reference(COMBINE, [x, more], [w, -w], [], [], "mm", 0, *rows, *site)
    close(y, wanted.double(), 2 * case.k, BF16)


@pytest.mark.parametrize("case", CASES)
def test_as_the_references(ranks: Callable[[int], RankPool], case: Case) -> None:
    ranks(2).run(_compare, case)


def test_who_has_no_rows() -> None:
    w, offsets = torch.ones(4, 24, 16, dtype=BF16), torch.zeros(4, dtype=torch.int32)
    assert unfused.grouped_product(w.new_empty(0, 24), w, None, offsets).shape == (0, 16)
    assert not unfused.grouped_product(w.new_ones(2, 24), w, w[:, 0], offsets).any()


@pytest.mark.parametrize("odd", [{"dtype": torch.float16}, {"aligned": False}, {"k": 20}, {"columns": 12}])
def test_what_it_does_not_take(odd: dict[str, object]) -> None:
    assert unfused.can_group(PROBLEM)
    assert not unfused.can_group(replace(PROBLEM, **odd))  # type: ignore[arg-type]


def _most(rank: int, world: int) -> list[list[int]]:
    group = SimpleNamespace(group=dist.group.WORLD)
    counts = (rank, 5), (100 - rank, 6 + rank), (7, 7)
    return [told_by_all(group, COMBINE, "a.py:1", each) for each in counts]  # type: ignore[arg-type]


def test_ranks_tell_how_many_rows_they_have(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_most) == [[[1, 5], [100, 7], [7, 7]]] * 2


class Group:
    rank, group_name = 1, "tp"


def test_room_for_the_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks bring equally many rows, hosts do not meet, unless the worst case takes too much memory."""
    met: list[tuple[int, ...]] = []
    monkeypatch.setattr(dropless, "told_by_all", lambda group, op, site, rows: met.append(rows) or rows)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    group, huge = Group(), 1 << 20

    def room(columns: int, rows: int, worst: int) -> tuple[int, int]:
        counts = Counts(rows, rows // 2, worst // 2, worst)
        return dropless._room_for(group, DISPATCH, "a.py:1", columns, counts)  # type: ignore[arg-type]

    assert room(64, 1500, 6000) == (2048, 1024)
    assert met == [(1500, 750)]
    with config.patch(equal_rows=True):
        assert [room(64, rows, 6000) for rows in (0, 1500, 6000)] == [(8192, 4096)] * 3
        assert met == [(1500, 750)], "hosts have met"
        assert room(huge, 1500, 6000) == (2048, 1024)
        assert met == [(1500, 750)] * 2
        with pytest.raises(RuntimeError, match="rank 1 gets 6001 rows, more than 6000"):
            room(64, 6001, 6000)
    assert room(64, 10, 40) == (8192, 128), "few rows are prepared as so many"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert room(64, 1000, 6000) == (8192, 128), "a graph is captured as the last call was run"
    with pytest.raises(RuntimeError, match="9000 rows are captured, and there is room for 8192"):
        room(64, 9000, 36000)
