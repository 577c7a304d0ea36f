"""A fault in the pass breaks no compilation: the graph becomes what it was, and other sites are fused."""

import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.utils import fresh_cache
from torch.distributed import _functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx

import autofuse
from autofuse import Reason, passes
from autofuse.options import settings
from autofuse.passes import fuse_or_keep
from tests.passes.harness import fake_group


def program(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = funcol.all_reduce(x @ v, "sum", dist.group.WORLD)
    return funcol.reduce_scatter_tensor(y.relu() @ w, "sum", 0, dist.group.WORLD), y


def traced() -> fx.GraphModule:
    shapes = ((8, 6), (6, 4), (4, 10))
    gm = make_fx(program, tracing_mode="fake")(*(torch.ones(*shape) for shape in shapes))
    gm.graph.output_node().meta["user_visible_output_idxs"] = [1]
    return gm


def code(graph: fx.Graph) -> list[str]:
    """The nodes with names by position."""
    names = {node: f"n{i}" for i, node in enumerate(graph.nodes)}
    return [f"{n.op} {n.target} {fx.node.map_arg((n.args, n.kwargs), names.get)} {n.meta}" for n in names]


def spoil(graph: fx.Graph) -> None:
    """Leaves a node before its input, one more that reads both, and raises."""
    last = [n for n in graph.nodes if n.op == "call_function"][-1]
    next(iter(graph.nodes)).append(last)
    with graph.inserting_before(last):
        graph.call_function(torch.ops.aten.add.Tensor, (last, last))
    raise IndexError("a fault")


def spoil_of(kind: str) -> Callable[..., Any]:
    """Spoils the graph if the first argument, or one in its list, is of a collective of this kind."""

    def fault(first: Any, *rest: Any) -> Any:
        for node in first if isinstance(first, list) else [first.node]:
            if kind in str(node.target):
                spoil(node.graph)

    return fault


def before(fault: Callable[..., Any], name: str) -> Any:
    """A patch: `fault` gets the arguments of this function of the pass, before it runs."""
    module = importlib.import_module("autofuse.passes.fuse")
    real = getattr(module, name)

    def both(*args: Any) -> Any:
        fault(*args)
        return real(*args)

    return patch.object(module, name, both)


FAULTS = {
    "none": ("symbols_of", lambda graph: None, ["", ""]),
    "before sites are known": ("find_anchors", spoil, []),
    "choosing the first": ("choose", spoil_of("all_reduce"), ["IndexError: a fault", ""]),
    "rewriting the second": ("erase_unused", spoil_of("reduce_scatter"), ["", "IndexError: a fault"]),
    "both": ("check_place", spoil_of(""), ["IndexError: a fault"] * 2),
    "at the end": ("merge_fused", spoil, ["IndexError: a fault"] * 2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_keeps_a_site(name: str, caplog: pytest.LogCaptureFixture) -> None:
    function, fault, expected = FAULTS[name]
    with fake_group(2):
        gm = traced()
        nodes = code(gm.graph)
        with before(fault, function):
            report = fuse_or_keep(gm.graph, settings(policy="always"), "inference", "inference 0")
        assert [site.detail for site in report.sites] == expected
        assert all(site.fused != (site.reason is Reason.PASS_FAILED) for site in report.sites)
        gm.graph.lint()
        if any(expected) or not expected:
            assert "a fault in autofuse" in caplog.text
            assert "spoil" in caplog.text  # the traceback
        if not any(site.fused for site in report.sites):
            assert code(gm.graph) == nodes
        assert gm.graph.output_node().meta["user_visible_output_idxs"] == [1]
        gm.recompile()
        x, v, w = torch.rand(8, 6), torch.rand(6, 4), torch.rand(4, 10)
        for actual, wanted in zip(gm(x, v, w), program(x, v, w), strict=True):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("name", ["circumstances", "mark_inputs"])
def test_a_fault_beside_the_pass_breaks_no_compilation(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with fake_group(2), patch.object(passes, name, side_effect=IndexError("a fault")), fresh_cache():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        args = torch.rand(8, 6), torch.rand(6, 4), torch.rand(4, 10)
        with autofuse.debug() as report:
            found = torch.compile(program, backend="autofuse", options={"policy": "always"})(*args)
        torch.testing.assert_close(found, program(*args))
    assert [site.fused for site in report.sites] == [True, True]
    assert "IndexError: a fault" in caplog.text
    cached = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]
    assert bool(cached) == (name != "circumstances")
