"""The eager ops inside of compiled functions: without a graph break, with the results of eager calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autofuse import ops
from tests.passes.harness import fake_group
from tests.ranks import RankPool

Function = Callable[[Tensor, Tensor], Tensor]


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


CASES: dict[str, Function] = {
    "all_reduce": lambda x, w: ops.matmul_all_reduce(x, w, w[0]),
    "of a group": lambda x, w: ops.matmul_all_reduce(x, w, group=_group()),
    "of a name": lambda x, w: ops.matmul_all_reduce(x, w, group="0"),
    "reduce_scatter": lambda x, w: ops.matmul_reduce_scatter(x.view(2, 2, 4), w, dim=1),
    "all_gather": lambda x, w: ops.all_gather_matmul(x, [w, w.relu()])[1],
    "of products": lambda x, w: ops.matmul_all_gather(x, w),
    "bags": lambda x, w: ops.embedding_bag_all_to_all([w], [torch.arange(4)], [torch.arange(4)]) * x.sum(),
    "combine": lambda x, w: ops.expert_matmul_all_to_all(x.view(1, 4, 4), w.view(1, 4, 4)),
    "dispatch": lambda x, w: ops.all_to_all_expert_matmul(x.view(2, 1, 2, 4), w.view(1, 4, 4)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_one_graph(name: str, dynamic: bool) -> None:
    with fake_group(2):
        compiled = torch.compile(CASES[name], backend="aot_eager", fullgraph=True, dynamic=dynamic)
        x, w = torch.ones(4, 4), torch.ones(4, 4)
        assert compiled(x, w).shape == CASES[name](x, w).shape


def test_one_graph_of_a_mesh() -> None:
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        compiled = torch.compile(
            lambda x: ops.matmul_all_reduce(x, x, group=mesh), backend="aot_eager", fullgraph=True
        )
        assert compiled(torch.ones(4, 4)).shape == (4, 4)


def test_a_wrong_call_is_told_as_in_eager() -> None:
    with fake_group(2), pytest.raises(Exception, match="cannot multiply x"):
        torch.compile(ops.matmul_all_reduce, backend="aot_eager", fullgraph=True)(
            torch.ones(4, 3), torch.ones(4, 4)
        )


def _same(rank: int, world: int, backend: str) -> None:
    torch._dynamo.reset()
    for fn in CASES.values():
        torch.manual_seed(rank)
        x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        want = fn(x, w)
        found = torch.compile(fn, backend=backend, fullgraph=True)(x, w)
        torch.testing.assert_close(found, want)
        grads = (torch.autograd.grad(y.square().sum(), (x, w)) for y in (found, want))
        for got, expected in zip(*grads, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", ["autofuse", "inductor"])
def test_results_and_gradients(ranks: Callable[[int], RankPool], backend: str) -> None:
    ranks(2).run(_same, backend, timeout=200)
