"""Graphs of matmuls between collectives, and of what is gathered for several matmuls."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed._functional_collectives as funcol
from expecttest import assert_expected_inline
from torch import Tensor

from autofuse.passes.matchers.match import Match

from . import between
from .dense import group
from .test_graphs import rewritten


def calls(fn: object, *shapes: tuple[int, ...]) -> str:
    """The collectives and the matmuls of the rewritten graph."""
    lines = rewritten(fn, *map(torch.zeros, shapes)).splitlines()  # type: ignore[arg-type]
    words = ("_c10d_functional.all", "autofuse.", "aten.mm", "convert")
    found = (line.partition(" = ")[2] for line in lines if any(word in line for word in words))
    return "\n".join(line.replace(".default", "").partition(", '0'")[0] for line in found)


def test_a_gather_without_a_matmul_of_its_own() -> None:
    assert_expected_inline(
        calls(between.one, (8, 16), (24, 16)),
        """\
autofuse.all_gather_matmul(arg0, [], [], 0, 1, True
autofuse.matmul_reduce_scatter([getitem_1], [permute], [], 'mm', 'sum', 0, 1, False, [], '', ''""",
    )


def test_what_is_gathered_twice() -> None:
    assert_expected_inline(
        calls(between.twice, (8, 16), (24, 16), (32, 5)),
        """\
prims.convert_element_type(sin, torch.bfloat16)
prims.convert_element_type(arg1, torch.bfloat16)
aten.permute(convert_element_type_1, [1, 0])
autofuse.all_gather_matmul(convert_element_type_default, [permute], [], 0, 1, True
prims.convert_element_type(arg2, torch.bfloat16)
aten.permute(convert_element_type_2, [1, 0])
aten.mm(permute_1, getitem)""",
    )
    assert_expected_inline(
        calls(between.twice_reduced, (8, 16), (24, 16), (32, 4)),
        """\
autofuse.all_gather_matmul(arg1, [permute], [], 0, 1, True
autofuse.matmul_reduce_scatter([permute_1], [getitem_1], [], 'mm', 'sum', 0, 1, False, [], '', ''""",
    )


def test_what_is_gathered_again_far_behind() -> None:
    found = calls(between.far_apart, (8, 16), (24, 16), (32, 4))
    assert found.count("autofuse.all_gather_matmul(") == 2, found


def test_sizes_that_ranks_may_not_have_in_common() -> None:
    """Two matmuls read a gathered tensor, and one of them feeds a reduction. Each rank has a width of its own
    for the other one, so this width must not decide whether the reduction takes the matmul."""

    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        whole = funcol.all_gather_tensor(x, 0, group())
        return funcol.reduce_scatter_tensor(whole @ w, "sum", 0, group()), whole @ v

    priced = []

    def saved(anchor: object, match: Match, *more: object) -> float:
        priced.append((match.pattern, match.work.matmuls))
        return 0.0

    with patch("autofuse.passes.between.saved_us", saved):
        for width in (5, 7):
            rewritten(fn, *map(torch.zeros, ((8, 16), (16, 24), (16, width))), policy="auto")
            torch._dynamo.reset()
    first, second = priced[: len(priced) // 2], priced[len(priced) // 2 :]
    assert first == second
    assert ("matmul_reduce_scatter", ((32, 16, 24),)) in first
    assert ("all_gather_matmul", ((32, 16, 24),) * 2) in first


def test_a_gathered_product_that_this_rank_does_not_read() -> None:
    """Its peers may read it: the fused op stays, and no collective beside it."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        funcol.all_gather_tensor(x @ w, 0, group())
        return x + 1

    assert_expected_inline(
        calls(fn, (4, 6), (6, 8)),
        """\
autofuse.matmul_all_gather([arg0], [arg1], [], 'mm', 0, 1, False, False""",
    )
