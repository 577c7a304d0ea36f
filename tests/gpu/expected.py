"""References, operands and errors of the tests that run on ranks with GPUs."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.ranks import ONE_GPU

MOST_ERROR = 4e-3  # of bfloat16, whose roundings are 2**-9 each: of the partial sums and of the result


def group_of_all() -> ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None, "this process has joined no group"
    return group


def capturable(ways: Sequence[str]) -> list[str]:
    """Those that a CUDA graph can hold: ranks on one GPU have no NCCL."""
    return [way for way in ways if not (ONE_GPU and "nccl" in way)]


def runnable(ways: Sequence[str]) -> list[str]:
    """Those that these ranks can run: on one GPU none of copy engines, and none of torch's of several
    streams."""
    from autofuse.lowering.gpu.dense.ways import ASYNC_TP

    return [way for way in ways if not (ONE_GPU and ("copied=1" in way or way == ASYNC_TP))]


def operands(
    op: str, m: int, k: int, n: int, rank: int, world: int, transposed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x (a gather's part) and w, other ones on every rank."""
    torch.manual_seed(1000 * rank + m + n)
    rows = m // world if op == "all_gather_matmul" else m
    x = torch.randn(rows, k, device="cuda", dtype=dtype)
    w = torch.randn((n, k) if transposed else (k, n), device="cuda", dtype=dtype) / math.sqrt(k)
    return x, w.t() if transposed else w


def reference(op: str, x: Tensor, w: Tensor, outer: int = 1, dim: int = 0) -> Tensor:
    """In fp64, from partial products that are rounded as the collective takes them."""
    from autofuse.lowering.reference.layout import parts, whole

    world, rank = dist.get_world_size(), dist.get_rank()
    if op == "all_gather_matmul":
        gathered = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(gathered, x)
        return whole(torch.stack(gathered), 0, outer).double() @ w.double()
    total = (x.double() @ w.double()).to(x.dtype).double()
    if op == "matmul_all_gather":
        products = [torch.empty_like(total) for _ in range(world)]
        dist.all_gather(products, total)
        return whole(torch.stack(products), dim, outer)
    dist.all_reduce(total)
    return total if op == "matmul_all_reduce" else parts(total, dim, outer, world)[rank]


def error_of(found: Tensor, wanted: Tensor) -> float:
    assert not found.isnan().any(), "something was not written"
    assert found.shape == wanted.shape
    return float((found.double() - wanted).norm() / wanted.norm())


def poison() -> None:
    """All that the workspace's kernels do not read before it is written becomes NaN."""
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    device = torch.device("cuda", torch.cuda.current_device())
    memory = workspace_for(group_of_all().group_name, device).memory
    torch.cuda.synchronize()
    dist.barrier()
    for region in (memory.inbox, memory.finished, memory.copies, memory.products):
        region.views[memory.rank].fill_(255)
    memory.outbox.fill_(255)
    memory.pieces.fill_(math.nan)
    torch.cuda.synchronize()
    dist.barrier()


def every_result(way: str, op: str, given: tuple[Any, ...]) -> list[list[Tensor]]:
    """What an op returns in a way: in calls back to back, and in replays of a CUDA graph that holds one."""
    from autofuse.lowering.gpu import by_name

    by_name.run(way, op, given)  # grows the workspace if need be
    poison()
    results = [by_name.run(way, op, given) for _ in range(3)]
    if capturable([way]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(by_name.run(way, op, given))
        for _ in range(2):
            for t in results[-1]:
                t.fill_(torch.nan)
            graph.replay()
        torch.cuda.synchronize()  # before the graph is freed
    return results
