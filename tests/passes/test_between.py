"""Graphs of matmuls between collectives, and of what is gathered for several matmuls."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from . import between
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
