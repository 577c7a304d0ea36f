from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

import autofuse
from autofuse import passes
from autofuse.passes.report import Listing
from tests.frontend.conftest import report_collectives
from tests.frontend.models import both_ways, one_way, operands
from tests.ranks import RankPool

pytestmark = pytest.mark.usefixtures("kept")


class Linear(nn.Module):
    """Returns a nested structure; `calls` counts what really runs."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.group = group

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict:
        y = funcol.all_reduce(self.linear(x), "sum", self.group)
        return {"y": (y * scale, None), "n": x.shape[0], "list": [y.sum()]}


def test_explain_takes_a_module_and_keywords_and_any_pytree(group: str) -> None:
    report = autofuse.explain(Linear(group))(operands()[0], scale=2.0)
    assert [(s.collective, s.graph) for s in report.sites] == [("all_reduce", "forward 0")]
    assert "all_reduce" in str(report.graphs[0].before)


def test_explain_backward(group: str) -> None:
    x, w = operands(requires_grad=True)
    report = autofuse.explain(both_ways, backward=True)(x, w, group)
    assert [graph.kind for graph in report.graphs] == ["forward", "backward"]
    assert x.grad is None
    module = Linear(group)
    assert len(autofuse.explain(module, backward=True)(x).graphs) == 2
    assert all(p.grad is None for p in module.parameters())


def test_explain_backward_of_splits_that_are_read(group: str) -> None:
    """The gradient has the shape of the input, however many rows are guessed to be exchanged."""

    def exchanged(x: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
        sizes = splits.tolist()
        return funcol.all_to_all_single_autograd(x * 2, sizes, sizes, group)

    x = torch.ones(10, 3, requires_grad=True)
    splits = torch.full((dist.get_world_size(),), 10 // dist.get_world_size())
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        report = autofuse.explain(exchanged, backward=True)(x, splits)
    assert [graph.kind for graph in report.graphs] == ["forward", "backward"]


def test_explain_runs_no_kernel_and_no_collective(group: str) -> None:
    ran = []

    @torch.library.custom_op("autofuse_tests::witness", mutates_args=())
    def witness(x: torch.Tensor) -> torch.Tensor:
        ran.append(True)
        return x.clone()

    witness.register_fake(torch.empty_like)
    autofuse.explain(lambda x: funcol.all_reduce(witness(x), "sum", group))(torch.ones(4))
    assert not ran


def test_explain_leaves_dynamo_caches_alone(group: str) -> None:
    compiles = []

    def backend(gm: torch.fx.GraphModule, inputs: list) -> object:
        compiles.append(gm)
        return gm.forward

    compiled = torch.compile(one_way, backend=backend, fullgraph=True)
    x, w = operands()
    compiled(x, w, group)
    for _ in range(2 + torch._dynamo.config.recompile_limit):
        assert len(autofuse.explain(one_way)(x, w, group).sites) == 1
    compiled(x, w, group)
    assert len(compiles) == 1


def test_explain_shows_a_first_compilation_whatever_it_saw_before(group: str) -> None:
    x, w = operands()
    for rows in (2, 3, 4):
        (graph,) = autofuse.explain(one_way)(x[:rows], w, group).graphs
        assert placeholders(graph.before) == 2
    with autofuse.debug() as report:
        torch.compile(one_way, backend="autofuse")(x[:5], w, group)
    assert placeholders(report.graphs[0].before) == 2


def placeholders(listing: Listing) -> int:
    return sum(line.text.endswith("= placeholder") for line in listing)


def test_sizes_that_depend_on_data(group: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = x[x[:, 0] > 0]
        return funcol.all_reduce(rows @ w, "sum", group)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert len(autofuse.explain(f)(*operands()).graphs) == 1


def test_graph_breaks_name_their_reason(group: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        dist.all_reduce(y, async_op=True).wait()
        return y.relu()

    report = autofuse.explain(f)(*operands())
    assert any("async_op=True" in text for text in report.graph_breaks)
    assert len(report.graphs) == 2
    with autofuse.debug() as report:
        torch.compile(f, backend="autofuse")(*operands())
    assert any("async_op=True" in text for text in report.graph_breaks)


def test_graph_breaks_of_collectives_come_with_advice(group: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        dist.all_reduce(y, async_op=True).wait()
        return y

    assert "leave async_op=True out" in str(autofuse.explain(f)(*operands()))


def test_torch_distributed_nn(group: str) -> None:
    """From torch 2.12 on dynamo leaves a function that calls it uncompiled."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.distributed.nn.functional.all_reduce(x @ w).relu()

    report = autofuse.explain(f)(*operands())
    if TorchVersion(torch.__version__) < "2.12":
        assert [site.collective for site in report.sites] == ["all_reduce"]
        assert not report.graph_breaks
    else:
        assert not report.sites
        assert "torch.distributed.nn" in report.graph_breaks[0]
        assert "instead of torch.distributed.nn" in str(report)


def _explain_on_one_rank(rank: int, world: int) -> int:
    """Other ranks stay away: a collective that ran would wait for them."""

    def f(x: torch.Tensor, w: torch.Tensor, name: str) -> torch.Tensor:
        y = one_way(x, w, name)
        handle = dist.all_reduce(y, async_op=True)
        torch._dynamo.graph_break()
        handle.wait()
        parts = [torch.empty_like(y) for _ in range(world)]
        dist.all_gather(parts, y, async_op=True).wait()
        dist.barrier()
        return one_way(parts[0].t(), y, name)

    if rank:
        return 0
    with patch.object(passes, "fuse_or_keep", report_collectives):  # ranks run other tests afterwards
        return len(autofuse.explain(f)(*operands(), dist.group.WORLD.group_name).sites)


def test_one_rank_can_ask_alone(ranks: "type[RankPool]") -> None:
    assert ranks(2).run(_explain_on_one_rank) == [2, 0]


def test_rewrite_takes_a_graph(group: str) -> None:
    gm = make_fx(one_way, tracing_mode="fake")(*operands(), group)
    report = autofuse.rewrite(gm)
    assert [site.collective for site in report.kept] == ["all_reduce"]
    assert report.graphs[0].name == "graph 0"
