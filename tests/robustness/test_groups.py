"""Several groups in one model, and process groups that come and go."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autofuse
from tests.passes.dense import group as everybody
from tests.passes.harness import passes_only
from tests.ranks import RankPool
from tests.robustness.seven import MAKERS, integers

Ranks = Callable[[int], RankPool]


class TwoGroups(nn.Module):
    """A tensor-parallel layer inside a data-parallel one: the product is summed over tp, its rows over dp."""

    def __init__(self, tp: dist.ProcessGroup, dp: dist.ProcessGroup) -> None:
        super().__init__()
        self.tp, self.dp = tp, dp

    def forward(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        hidden = funcol.all_reduce(x @ v, "sum", self.tp)
        return funcol.reduce_scatter_tensor(hidden @ w, "sum", 0, self.dp)


def _mesh(rank: int, world: int, generated: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    d, t = divmod(rank, 2)
    torch._dynamo.reset()
    model = TwoGroups(mesh["tp"].get_group(), mesh["dp"].get_group())
    backend = "autofuse" if generated else passes_only()
    compiled = torch.compile(model, backend=backend)
    x = [[integers(10 * i + j, 6, 4) for j in range(2)] for i in range(2)]
    v = [integers(50 + j, 4, 6) for j in range(2)]
    w = [[integers(60 + 10 * i + j, 6, 8) for j in range(2)] for i in range(2)]
    hidden = [x[i][0] @ v[0] + x[i][1] @ v[1] for i in range(2)]
    exact = (hidden[0] @ w[0][t] + hidden[1] @ w[1][t]).chunk(2)[d]
    with autofuse.debug() as report, torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(x[d][t], v[t], w[d][t]), exact)
    return [f"{site.pattern} {site.world}" for site in report.fused]


@pytest.mark.parametrize("generated", [False, True])
def test_a_mesh_of_two_by_two(ranks: Ranks, generated: bool) -> None:
    for fused in ranks(4).run(_mesh, generated, timeout=120):
        assert fused == ["matmul_all_reduce 2", "matmul_reduce_scatter 2"]


def _interleaved(rank: int, world: int) -> None:
    """All ops on groups that overlap: everybody, the first three, pairs; ranks are late by turns."""
    everybody = dist.new_group(list(range(world)))
    three = dist.new_group([0, 1, 2])
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    pair = pairs[rank in (1, 2)]
    groups = [(everybody, world), *([(three, 3)] if rank < 3 else []), (pair, 2)]
    cases = [
        (name, size, maker(dist.get_rank(group), size, 4, group.group_name))
        for maker_name, maker in MAKERS.items()
        for group, size in groups
        for name in (maker_name,)
    ]
    for factor in range(1, 6):
        for name, size, case in cases:
            assert torch.equal(case.run(factor), (case.exact * factor).float()), (name, size)


def test_groups_that_overlap(ranks: Ranks) -> None:
    ranks(4).run(_interleaved)


def _model(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", everybody()).relu()


def _again(rank: int, world: int, directory: str, rounds: int) -> None:
    """Init, compile, run, destroy; in a process of its own, or in one that has another group already."""
    torch.set_num_threads(1)
    for i in range(rounds):
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store{i}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=30),
        )
        torch._dynamo.reset()
        compiled = torch.compile(_model, backend=passes_only())
        w = integers(70 + i, 5, 3)
        for k in range(3):
            x = [integers(10 * i + r + 100 * k, 4, 5) for r in range(world)]
            with autofuse.debug() as report:
                y = compiled(x[rank], w)
            assert torch.equal(y, torch.stack([t @ w for t in x]).sum(0).relu())
            assert len(report.fused) == (k == 0)
        case = MAKERS["expert_matmul_all_to_all"](rank, world, 5, everybody().group_name)
        assert torch.equal(case.run(1), case.exact.float())
        dist.destroy_process_group()


def _repeated(rank: int, world: int, directory: str) -> None:
    """In a rank of a pool: first its own group goes."""
    dist.destroy_process_group()
    _again(rank, world, directory, 4)


def test_process_groups_come_and_go(fresh: Ranks) -> None:
    with tempfile.TemporaryDirectory() as directory:
        pool = fresh(2)
        pool.run(_repeated, directory)
        assert [
            name for name in os.listdir("/dev/shm") if any(f"af-{pid}-" in name for pid in pool.pids)
        ] == []


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_ways_to_start_a_process(method: str, fresh: Ranks) -> None:
    """Every rank starts a child, and the children are the ranks of a new group."""
    with tempfile.TemporaryDirectory() as directory:
        assert fresh(2).run(_starts_child, method, directory, timeout=90) == [0, 0]


def _starts_child(rank: int, world: int, method: str, directory: str) -> int | None:
    MAKERS["matmul_all_reduce"](rank, world, 5, everybody().group_name).run(1)
    dist.destroy_process_group()  # gloo's threads do not survive a fork
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    child = multiprocessing.get_context(method).Process(target=_again, args=(rank, world, directory, 2))  # type: ignore[attr-defined]
    child.start()
    child.join(60)
    code: int | None = child.exitcode
    child.kill()
    return code
