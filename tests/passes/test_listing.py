"""Listings of graphs: what a line says, and which site it belongs to."""

import re

import torch
import torch.distributed._functional_collectives as funcol
from expecttest import assert_expected_inline
from torch import Tensor

import autofuse
from autofuse.lowering.orders import PlanShape
from autofuse.passes.report import GraphReport, Listing, Report

from .dense import group
from .harness import fake_group


def two_sites(x: Tensor, w: Tensor) -> Tensor:
    y = funcol.all_reduce(x @ w, "sum", group())
    return funcol.all_reduce(y.relu(), "max", group())


def explain(dynamic: bool = False) -> GraphReport:
    x, w = torch.zeros(8, 4), torch.zeros(4, 6)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with fake_group(4), torch.no_grad(), autofuse.config.patch(policy="always"):
        (graph,) = autofuse.explain(two_sites)(x, w).graphs
    return graph


def show(listing: Listing) -> str:
    """A line a node: its site, its text without paths."""
    numbers = ("-" if line.site is None else str(line.site) for line in listing)
    lines = [f"{n} {line.text}" for n, line in zip(numbers, listing, strict=True)]
    return re.sub(r", '0', 'direct', '[^']*\.py:\d+'", ", ...", "\n".join(lines))


def test_lines_know_their_site() -> None:
    graph = explain()
    assert_expected_inline(
        show(graph.before),
        """\
- arg0_1: f32[8, 4] = placeholder
- arg1_1: f32[4, 6] = placeholder
0 mm: f32[8, 6] = aten.mm(arg0_1, arg1_1)
0 all_reduce: f32[8, 6] = _c10d_functional.all_reduce(mm, 'sum', '0')
0 wait_tensor: f32[8, 6] = _c10d_functional.wait_tensor(all_reduce)
0 relu: f32[8, 6] = aten.relu(wait_tensor)
1 all_reduce_1: f32[8, 6] = _c10d_functional.all_reduce(relu, 'max', '0')
1 wait_tensor_1: f32[8, 6] = _c10d_functional.wait_tensor(all_reduce_1)
- return (wait_tensor_1,)""",
    )
    assert_expected_inline(
        show(graph.after),
        """\
- arg0_1: f32[8, 4] = placeholder
- arg1_1: f32[4, 6] = placeholder
0 matmul_all_reduce_default = autofuse.matmul_all_reduce([arg0_1], [arg1_1], [], 'mm', 'sum', False, [], '', '', ...)
0 getitem: f32[8, 6] = matmul_all_reduce_default[0]
0 relu: f32[8, 6] = aten.relu(getitem)
1 all_reduce_1: f32[8, 6] = _c10d_functional.all_reduce(relu, 'max', '0')
1 wait_tensor_1: f32[8, 6] = _c10d_functional.wait_tensor(all_reduce_1)
- return (wait_tensor_1,)""",
    )


def test_code_has_a_comment_where_the_source_changes() -> None:
    code = str(explain().before)
    sources = re.findall(r"^# .*test_listing\.py:(\d+)$", code, re.M)
    assert len(sources) == 2
    assert sources == sorted(sources)


def test_symbols_are_shown() -> None:
    assert re.search(r"f32\[s\d+, 6\] = aten\.mm\(", str(explain(dynamic=True).after)) is None
    assert re.search(r"f32\[s\d+, 6\] = aten\.mm\(", str(explain(dynamic=True).before))


def test_a_fused_site_has_the_plan_that_runs() -> None:
    fused, kept = explain().sites
    assert fused.plan == PlanShape(
        "matmul_all_reduce", "direct", 4, (((8, 6), *((8, 0),) * 3),), (8, 6), True
    )
    assert kept.plan is None
    assert explain(dynamic=True).sites[0].plan == fused.plan  # at the sizes seen while tracing


def test_a_report_of_real_graphs_survives_json() -> None:
    report = Report([explain()])
    assert Report.from_json(report.to_json()) == report
