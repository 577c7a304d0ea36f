"""Groups that are nodes of the graph: one rank compiles, and every rank that runs it has its own groups.

Torch calls that `compile_on_one_rank` and has it from 2.12 on; in 2.11 these graphs have names of groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

import autofuse
from tests.ranks import RankPool

from .dense import group, sequence_parallel
from .harness import fake_group, passes_only

Ranks = Callable[[int], RankPool]
HAS_NODES = TorchVersion(torch.__version__) >= "2.12"


def one_rank_compiles() -> AbstractContextManager[Any]:
    for config in (torch.compiler.config, dist.config) if HAS_NODES else ():
        if hasattr(config, "compile_on_one_rank"):
            return config.patch(compile_on_one_rank=True)  # type: ignore[attr-defined]
    return contextlib.nullcontext()


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


# --- graphs -------------------------------------------------------------------------------------------


def reduced(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", group())


def with_a_node(op: str) -> fx.GraphModule:
    """`reduced`, with its group as a placeholder or an attribute of the module."""
    gm = make_fx(reduced, tracing_mode="fake")(integers(0, 4, 6), integers(1, 6, 8))
    reduce = next(n for n in gm.graph.nodes if "all_reduce" in str(n.target))
    gm.tp = group()
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    with gm.graph.inserting_before(first):
        node = gm.graph.placeholder("tp") if op == "placeholder" else gm.graph.get_attr("tp")
    if op == "placeholder":
        node.meta["val"] = group()
    reduce.update_arg(2, node)
    gm.recompile()
    return gm


@pytest.mark.parametrize("op", ["placeholder", "get_attr"])
def test_the_fused_op_reads_the_node(op: str) -> None:
    with fake_group(4), autofuse.config.patch(policy="always"):
        gm = with_a_node(op)
        (site,) = autofuse.rewrite(gm).sites
        (fused,) = (n for n in gm.graph.nodes if "autofuse" in str(n.target))
    assert (site.fused, site.world) == (True, 4)
    assert_expected_inline(
        str(fused.args), """([x_1], [w_1], [], 'mm', 'sum', False, [], '', '', tp, 'direct', 'all_reduce')"""
    )


def _runs(rank: int, world: int, op: str) -> None:
    with autofuse.config.patch(policy="always"):
        gm = with_a_node(op)
        autofuse.rewrite(gm)
    x, w = [integers(r, 4, 6) for r in range(world)], integers(9, 6, 8)
    extra = [group()] if op == "placeholder" else []
    assert torch.equal(gm(x[rank], w, *extra), sum(x) @ w)  # type: ignore[operator]


@pytest.mark.parametrize("op", ["placeholder", "get_attr"])
def test_the_fused_op_takes_the_group_at_run_time(op: str, ranks: Ranks) -> None:
    ranks(2).run(_runs, op)


# --- torch.compile ------------------------------------------------------------------------------------


def _by_mesh(x: Tensor, v: Tensor, w: Tensor, mesh: DeviceMesh) -> Tensor:
    hidden = funcol.all_reduce(x @ v, "sum", (mesh, 1))
    return funcol.reduce_scatter_tensor(hidden @ w, "sum", 0, (mesh, 0))


def _by_group(x: Tensor, v: Tensor, w: Tensor, mesh: DeviceMesh) -> Tensor:
    hidden = funcol.all_reduce(x @ v, "sum", mesh.get_group("tp"))
    return funcol.reduce_scatter_tensor(hidden @ w, "sum", 0, mesh.get_group("dp"))


def _in_place(x: Tensor, v: Tensor, w: Tensor, mesh: DeviceMesh) -> Tensor:
    hidden = x @ v
    dist.all_reduce(hidden, group=mesh.get_group("tp"))
    product = hidden @ w
    out = product.new_empty(product.shape[0] // 2, product.shape[1])
    dist.reduce_scatter_tensor(out, product, group=mesh.get_group("dp"))
    return out


def _trained(rank: int, mesh: DeviceMesh) -> None:
    """Sequence parallelism with DTensor: forward and backward."""
    model, (x,) = sequence_parallel()(4, rank)
    compiled = torch.compile(model, backend=passes_only())
    results = [
        torch.autograd.grad(f(x).square().sum(), [x, *model.parameters()])  # type: ignore[attr-defined]
        for f in (model, compiled)
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def _compiled(rank: int, world: int) -> list[tuple[str, str]]:
    """On a 2 by 2 mesh, where ranks have groups of other names: what is fused, and the rewritten graph."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    d, t = divmod(rank, 2)
    x = [[integers(10 * i + j, 6, 4) for j in range(2)] for i in range(2)]
    v = [integers(50 + j, 4, 6) for j in range(2)]
    w = [[integers(60 + 10 * i + j, 6, 8) for j in range(2)] for i in range(2)]
    hidden = [x[i][0] @ v[0] + x[i][1] @ v[1] for i in range(2)]
    exact = (hidden[0] @ w[0][t] + hidden[1] @ w[1][t]).chunk(2)[d]
    found = []
    with one_rank_compiles(), autofuse.config.patch(policy="always"):
        for fn, backend in ((_by_mesh, "autofuse"), (_by_group, "autofuse"), (_in_place, passes_only())):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend=backend)
            with autofuse.debug() as report, torch.no_grad():
                for _ in range(2):
                    assert torch.equal(compiled(x[d][t], v[t], w[d][t], mesh), exact)
            found.append((" ".join(f"{s.pattern} {s.world}" for s in report.fused), report.graphs[0].after))
        torch._dynamo.reset()
        with autofuse.debug() as report:
            _trained(rank, mesh)
        found.append((" ".join(f"{s.pattern} {s.world}" for s in report.fused), report.graphs[0].after))
    return found


def test_nothing_of_the_rank_that_compiles_is_in_the_graph(ranks: Ranks) -> None:
    results = ranks(4).run(_compiled, timeout=200)
    for fused, _ in (found for each in results for found in each[:3]):
        assert fused == "matmul_all_reduce 2 matmul_reduce_scatter 2"
    for fused, _ in (each[3] for each in results):
        assert (
            fused == "all_gather_matmul 4 matmul_reduce_scatter 4 all_gather_matmul 4 matmul_reduce_scatter 4"
        )
    for graphs in zip(*results, strict=True):
        # With names in the graph, those of the groups that a rank is in: here they differ between ranks.
        assert (len({after for _, after in graphs}) == 1) or not HAS_NODES
