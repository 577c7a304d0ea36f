"""Compiled programs that tests run on ranks with GPUs: training, biases, a sharded vocabulary."""

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import autofuse
from tests.ranks import fresh_group

from .expected import error_of, group_of_all, operands, poison, reference

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


class Block(torch.nn.Module):
    """A tensor-parallel MLP as plain code writes it."""

    def __init__(self, width: int, hidden: int, world: int, group_name: "GroupName") -> None:
        super().__init__()
        self.group_name = group_name
        self.up = torch.nn.Linear(width, hidden // world, bias=False)
        self.down = torch.nn.Linear(hidden // world, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.silu(self.up(x))
        return funcol.all_reduce(self.down(y), "sum", self.group_name)


def vocabulary(rank: int, world: int) -> tuple[float, list[str | None]]:
    """A compiled model against the same model in eager mode: its error, and the ops that were fused.

    The model reads an embedding whose table is sharded by rows. Then it multiplies, scales, casts to float32
    and reduces."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    group, rows, columns = fresh_group(), 1000, 512
    table = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(columns, columns, device="cuda", dtype=torch.bfloat16) / math.sqrt(columns)

    def model(ids: Tensor) -> tuple[Tensor, Tensor]:
        theirs = (ids < rank * rows) | (ids >= (rank + 1) * rows)
        local = (ids - rank * rows).masked_fill(theirs, 0)
        found = torch.nn.functional.embedding(local, table).masked_fill(theirs[..., None], 0)
        x = funcol.all_reduce(found, "sum", group)
        y = (x.flatten(0, 1) @ w * 0.5).float()
        return funcol.all_reduce(y, "sum", group), y

    run, worst = torch.compile(model, backend="autofuse", options={"policy": "always"}), 0.0
    with autofuse.debug() as report, torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            ids = torch.randint(0, world * rows, (4, 16), device="cuda")
            for found, wanted in zip(run(ids), model(ids), strict=True):
                worst = max(worst, error_of(found, wanted.double()))
    return worst, [site.op for site in report.fused]


def compiled(rank: int, world: int, mode: str | None, dynamic: bool) -> tuple[float, int]:
    """Error of a compiled model against eager over several token counts, and how many sites were fused.

    The group is new: its workspace is made, and grows, while the model runs.
    """

    torch._dynamo.reset()
    torch.manual_seed(rank)
    model = Block(512, 2048, world, fresh_group()).cuda().bfloat16()
    run = torch.compile(model, backend="autofuse", mode=mode, dynamic=dynamic)
    worst, tokens = 0.0, (7, 64, 300, 1024) if dynamic else (64,)
    # Calls this short are fused only where they are captured: by Inductor, or as somebody says.
    with autofuse.debug() as report, torch.no_grad():
        for m in (*tokens, *tokens):
            torch.manual_seed(m)
            x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
            dist.broadcast(x, 0)
            for _ in range(3):
                found = run(x).clone()
            worst = max(worst, error_of(found, model(x).double()))
    return worst, len(report.fused)


def _gradients(model: torch.nn.Module) -> list[Tensor]:
    """Of all parameters, each of which has one."""
    found = []
    for p in model.parameters():
        assert p.grad is not None
        found.append(p.grad)
    return found


def trained(rank: int, world: int) -> float:
    """Gradients of a compiled, checkpointed model against eager; the largest error."""
    from torch.utils.checkpoint import checkpoint

    torch._dynamo.reset()
    torch.manual_seed(rank)
    model = Block(512, 2048, world, group_of_all().group_name).cuda().bfloat16()

    def step(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model, x, use_reentrant=False)
        return (y.float() ** 2).mean()

    torch.manual_seed(99)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    step(x).backward()
    wanted = [g.double() for g in _gradients(model)]
    model.zero_grad()
    torch.compile(step, backend="autofuse")(x).backward()
    return max(error_of(found, g) for found, g in zip(_gradients(model), wanted, strict=True))


def with_biases(rank: int, world: int, m: int) -> float:
    """Weights of different widths, with biases or some, and the gathered X or not; the largest error of every
    way."""
    from autofuse.lowering.gpu.choice.kernel import ways_of as by_name
    from autofuse.lowering.gpu.dense.run import Gather, of_weights, problem_of
    from autofuse.lowering.gpu.memory.workspace import workspace_for

    x, wide = operands("all_gather_matmul", m, 512, 1024, rank, world, True, torch.bfloat16)
    _, tall = operands("all_gather_matmul", m, 512, 1032, rank, world, False, torch.bfloat16)
    gathered = reference("all_gather_matmul", x, torch.eye(512, device="cuda", dtype=torch.bfloat16))
    workspace = workspace_for(group_of_all().group_name, x.device)
    cases = [
        ((wide, wide[:, :136], wide[:, 64:400]), (True, True, True)),
        ((tall[:, :136], tall, tall[:, 8:], tall[:, :8], tall), (False,) * 5),  # the last one is late
        ((wide, wide), (True, False)),
        ((wide, wide), (False, True)),
        ((tall, wide[:, 16:]), (True, True)),  # laid out otherwise
    ]
    worst = 0.0
    for w, biased in cases:
        biases = [
            torch.randn(wi.shape[1], device="cuda", dtype=torch.bfloat16) if b else None
            for wi, b in zip(w, biased, strict=True)
        ]
        problem = of_weights(problem_of("all_gather_matmul", x, w[0], workspace), w, biases)
        wanted = [gathered @ wi.double() for wi in w]
        wanted = [p if b is None else p + b.double() for p, b in zip(wanted, biases, strict=True)]
        for name, way in by_name(problem).items():
            for keep in (True, False):
                more = keep or len(w) > len(problem.columns)
                gather = Gather(
                    workspace, way, problem, w[0].stride(), more, keep, f"test {len(w)}", biased=biased[0]
                )
                gather(x, w, biases)  # grows the workspace if need be
                poison()
                outputs = gather(x, w, biases)
                if keep:
                    assert torch.equal(outputs.pop().double(), gathered), name
                worst = max(worst, *map(error_of, outputs, wanted))
    return worst
