import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import autofuse
from autofuse.backend import FusionPass, JointPass, fusion_pass
from autofuse.options import settings
from tests.frontend.models import both_ways, one_way, operands

pytestmark = pytest.mark.usefixtures("kept")


class CountingPass(CustomGraphPass):
    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.graphs += 1

    def uuid(self) -> str:
        return "counting"


def kinds(report: autofuse.Report) -> list[str]:
    return [graph.kind for graph in report.graphs]


def test_forward_and_backward_pass(group: str) -> None:
    x, w = operands(requires_grad=True)
    with autofuse.debug() as report:
        y = torch.compile(both_ways, backend="autofuse", fullgraph=True)(x, w, group)
        y.sum().backward()
    assert kinds(report) == ["forward", "backward"]
    assert [site.collective for site in report.sites] == ["all_reduce", "all_reduce"]
    torch.testing.assert_close(y, (x @ w).detach())  # the fake group leaves values as they are


def test_inference_passes(group: str) -> None:
    with autofuse.debug() as report:
        torch.compile(one_way, backend="autofuse")(*operands(), group)
    assert kinds(report) == ["inference"]


def test_options_reach_the_lazily_compiled_backward(group: str) -> None:
    x, w = operands(requires_grad=True)
    with autofuse.debug() as report:
        y = torch.compile(both_ways, backend="autofuse", options={"policy": "always"})(x, w, group)
        with autofuse.config.patch(policy="never"):
            y.sum().backward()
    assert [site.detail for site in report.sites] == ["always", "always"]


def test_mode_and_dynamic(group: str) -> None:
    compiled = torch.compile(one_way, backend="autofuse", mode="max-autotune-no-cudagraphs", dynamic=True)
    x, w = operands()
    with autofuse.debug() as report:
        for rows in (2, 5, 6):
            torch.testing.assert_close(compiled(x[:rows], w, group), (x[:rows] @ w).relu())
    assert kinds(report) == ["inference"]


def test_an_answer_from_the_compile_cache_is_reported(group: str) -> None:
    reports = []
    x, w = operands(requires_grad=True)
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            with autofuse.debug() as report:
                torch.compile(both_ways, backend="autofuse")(x, w, group).sum().backward()
            reports.append(report)
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == 2
    cold, warm = reports
    assert kinds(warm) == kinds(cold) == ["forward", "backward"]
    assert [s.collective for s in warm.sites] == [s.collective for s in cold.sites] == ["all_reduce"] * 2
    assert [g.before for g in warm.graphs] == [g.before for g in cold.graphs]
    assert all("all_reduce" in str(g.before) for g in cold.graphs)


def test_an_answer_from_the_compile_cache_for_a_graph_with_a_constant(group: str) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return one_way(x, w, group) * torch.tensor([0.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])

    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            with autofuse.debug() as report:
                torch.compile(fn, backend="autofuse")(*operands())
            assert [site.collective for site in report.sites] == ["all_reduce"]
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == 1


def test_a_backward_that_keeps_its_graph_takes_no_code_that_overwrites_what_was_saved(group: str) -> None:
    """Whether code may overwrite what was saved for it, the first backward decides."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(both_ways(x, w, group)) * 2

    x, w = operands(requires_grad=True)
    with fresh_cache():
        for keeps in (False, True):
            torch._dynamo.reset()
            loss = torch.compile(fn, backend="autofuse")(x, w).square().sum()
            first = torch.autograd.grad(loss, (x, w), retain_graph=keeps)
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] >= 1
    for again, once in zip(torch.autograd.grad(loss, (x, w)), first, strict=True):
        torch.testing.assert_close(again, once)


@pytest.mark.parametrize("where", ["options", "global", "list"])
def test_a_pass_of_the_user_keeps_running(group: str, where: str) -> None:
    mine = CountingPass()
    configured: Any = [mine] if where == "list" else mine
    options = {} if where == "global" else {"post_grad_custom_pre_pass": configured}
    patches = {"post_grad_custom_pre_pass": configured} if where == "global" else {"dce": True}
    with torch._inductor.config.patch(patches), fresh_cache(), autofuse.debug() as report:
        torch.compile(one_way, backend="autofuse", options=options)(*operands(), group)
    assert mine.graphs == 1
    assert kinds(report) == ["inference"]


def test_a_joint_pass_of_the_user_keeps_running(group: str) -> None:
    mine = CountingPass()
    x, w = operands(requires_grad=True)
    options = {"joint_custom_post_pass": mine}
    with fresh_cache(), autofuse.debug() as report:
        torch.compile(both_ways, backend="autofuse", options=options)(x, w, group).sum().backward()
    assert mine.graphs == 1
    assert kinds(report) == ["forward", "backward"]
    fusion = FusionPass(settings(), (), 0)
    assert JointPass((mine,), fusion).uuid() not in (None, JointPass((), fusion).uuid())


def test_bad_options_raise_through_torch_compile(group: str) -> None:
    with pytest.raises(Exception, match=r"unknown option 'polcy'.*'policy'"):
        torch.compile(one_way, backend="autofuse", options={"polcy": "auto"})(*operands(), group)


def test_identity_covers_settings_and_other_passes() -> None:
    def uuid(other: Any = None, **changes: Any) -> str | None:
        return FusionPass(settings(**changes), (other,) if other else (), 0).uuid()

    distinct = {uuid(), uuid(policy="never"), uuid(order="ring"), uuid(patterns=["matmul_all_reduce"])}
    assert len(distinct | {uuid(CountingPass())}) == 5
    assert uuid(lambda graph: None) is None
    assert FusionPass(settings(), (), 7).uuid() == uuid()


def test_identity_is_the_same_in_every_process() -> None:
    names = ["matmul_all_reduce", "all_gather_matmul", "matmul_reduce_scatter"]
    code = f"from autofuse.backend import *; print(fusion_pass(0, settings_of(patterns={names}))[0].uuid())"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == fusion_pass(0, settings(patterns=names))[0].uuid()


def test_the_backend_needs_no_import_and_logs() -> None:
    code = (
        "import torch, sys; assert 'autofuse.backend' not in sys.modules\n"
        "print(torch.compile(lambda x: x + 1, backend='autofuse')(torch.zeros(2)).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TORCH_LOGS": "+autofuse"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == "[1.0, 1.0]"
    assert "inference 0: 0 fused, 0 kept" in done.stderr
