"""Failures on ranks with GPUs: the last rank is late or is killed; what all are told, what works then."""

import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import fresh_group

from .compiled_on_gpus import Block
from .expected import error_of, reference

LIMIT_S = 2.0
LATE_S = LIMIT_S + 6.0


def _operands(rank: int, m: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rank)
    x = torch.randn(m, 256, device="cuda", dtype=torch.bfloat16)
    return x, torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)


def _reduction(group: str, x: Tensor, w: Tensor, copied: bool = False) -> Callable[[], Tensor]:
    """Calls of matmul_all_reduce in a fused way."""
    from autofuse.lowering.gpu.choice.kernel import ways_of
    from autofuse.lowering.gpu.dense.factors import Factors
    from autofuse.lowering.gpu.dense.run import Reduction, problem_of
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    workspace = workspace_for(group, torch.device("cuda", torch.cuda.current_device()))
    problem = problem_of("matmul_all_reduce", x, w, workspace)
    way = next(way for way in ways_of(problem).values() if way.fused and way.is_copied == copied)
    factors = Factors([x], [w])

    def call() -> Tensor:
        return Reduction(workspace, way, problem, w.stride(), False, "direct", "a.py:1")(factors)[0]

    return call


def _prefer_fused(group: str, m: int, k: int, n: int) -> None:
    """From now on a fused way reduces `[m, k] @ [k, n]` of the group, as if measured to be the fastest."""
    from autofuse.lowering.gpu.choice.choose import add_points
    from autofuse.lowering.gpu.choice.kernel import fused_ways
    from autofuse.lowering.gpu.choice.points import Point
    from autofuse.lowering.gpu.dense.run import problem_of
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    x, w = (torch.empty(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    workspace = workspace_for(group, x.device)
    problem = problem_of("matmul_all_reduce", x, w, workspace)
    add_points(workspace, (Point.of(problem, {fused_ways(problem)[0]: 1.0}),))


def _together() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def _told(call: Callable[[], object], within_s: float) -> str:
    """What `call` raises in time, again and again."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            call()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.05)
    return "no error"


def lost_peer(rank: int, world: int, m: int, copied: bool, captured: bool) -> tuple[str, float]:
    """What each rank is told, and the largest error of 1,000 calls after a reset.

    captured: nothing but replays, of a graph that works again after the reset.
    """
    import autofuse

    group, operands = fresh_group(), _operands(rank, m)
    wanted = reference("matmul_all_reduce", *operands)
    run = _reduction(group, *operands, copied)
    run()  # ranks compile for different times
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    with autofuse.config.patch(timeout_s=LIMIT_S):
        run()  # from here on waits are short
        _together()
        if rank == world - 1:
            told = _told(lambda: autofuse.check(group), LATE_S)  # it waits for nobody
        elif captured:
            for _ in range(3):  # for the second one, a copy stream has no credit of the lost rank
                graph.replay()
            told = _told(lambda: autofuse.check(group), LATE_S)
        else:
            told = _told(run, LATE_S)
        torch.cuda.synchronize()
        autofuse.reset(group)
        worst = torch.zeros((), device="cuda", dtype=torch.float64)
        for _ in range(1000):
            if captured:
                graph.replay()
            else:
                out = run()
            worst = torch.maximum(worst, (out.double() - wanted).norm() / wanted.norm())
        autofuse.check(group)
    return told, float(worst)


def replayed_by_inductor(rank: int, world: int) -> tuple[list[str], str, float]:
    """The log, what the next call raises where Inductor replays graphs, and the error after a reset."""
    import logging
    from unittest.mock import Mock, patch

    import autofuse
    from autofuse.lowering.gpu.memory import failures

    torch._dynamo.reset()
    torch.manual_seed(rank)
    group, logged = fresh_group(), list[str]()
    model = Block(512, 2048, world, group).cuda().bfloat16()
    run = torch.compile(model, backend="autofuse", mode="reduce-overhead")
    handler = Mock(level=logging.ERROR, handle=lambda record: logged.append(record.getMessage()))
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    dist.broadcast(x, 0)
    short = _reduction(group, *_operands(rank, 64))
    _prefer_fused(group, 64, 2048 // world, 512)
    with torch.no_grad(), autofuse.config.patch(timeout_s=120.0):
        for _ in range(4):
            run(x)
        short()
    with torch.no_grad(), autofuse.config.patch(timeout_s=LIMIT_S):
        short()  # from here on waits are short
        _together()
        with patch.object(failures.log, "handlers", [handler]):
            if rank == world - 1:
                time.sleep(LATE_S)
            else:
                run(x)
                time.sleep(LIMIT_S + 3)
            told = _told(lambda: run(x), 1.0)
        with autofuse.config.patch(timeout_s=60.0):
            autofuse.reset(group)  # the last rank comes later
        for _ in range(20):
            found = run(x).clone()
        torch.cuda.synchronize()
        autofuse.check(group)
        return logged, told, error_of(found, model(x).double())


def killed(rank: int, world: int, m: int) -> None:
    """The last rank dies; how the others fail, and after how many seconds."""
    import autofuse

    group = fresh_group()
    with autofuse.config.patch(timeout_s=60.0):
        run = _reduction(group, *_operands(rank, m))
        run()
        _together()
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        text = _told(run, 30.0)
        raise AssertionError(f"{text} [after {time.monotonic() - began:.1f} s]")


def disagreeing(rank: int, world: int) -> tuple[str, float]:
    """The last rank calls with other sizes: what all are told before anything is stored, and the error of
    calls that are alike afterwards."""
    group, operands = fresh_group(), _operands(rank, 64)
    told = _told(_reduction(group, *_operands(rank, 64 if rank < world - 1 else 80)), 5.0)
    return told, error_of(_reduction(group, *operands)(), reference("matmul_all_reduce", *operands))
