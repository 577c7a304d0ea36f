"""What the tests of passes that merge or move collectives run on ranks with GPUs."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import autofuse
from tests.gpu.expected import error_of
from tests.ranks import fresh_group

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

D = 520
"""Width of the model."""


def _weight(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / math.sqrt(shape[-2])


def parallel_block(group: "GroupName", world: int) -> Callable[[Tensor], Tensor]:
    """Attention and MLP side by side, with biases, as GPT-NeoX has them."""
    a, b, c, d = _weight(D, 264), _weight(264, D), _weight(D, 128), _weight(128, D)
    first, second = torch.randn(2, D, device="cuda", dtype=torch.bfloat16).unbind()

    def model(x: Tensor) -> Tensor:
        heads = funcol.all_reduce((x @ a) @ b, "sum", group) + first
        mlp = funcol.all_reduce((x @ c).relu() @ d, "sum", group) + second
        return heads + (x + mlp)

    return model


def cut_up(group: "GroupName", world: int) -> Callable[[Tensor], Tensor]:
    """Queries, keys and values of one gathered projection, which do not begin where a rank's part does."""
    w = _weight(D, 264)
    columns = [8 * world, 16 * world, 240 * world]

    def model(x: Tensor) -> Tensor:
        parts = funcol.all_gather_tensor(x @ w, 0, group).chunk(world)
        q, k, v = torch.cat(parts, 1).split(columns, 1)
        return torch.cat([v.relu(), k, q * 2], 1)

    return model


def every_expert(group: "GroupName", world: int) -> Callable[[Tensor], Tensor]:
    """Experts that multiply every token, reduced before they are added up, as Llama-4 has it."""
    up, down = _weight(4, D, 64), _weight(4, 64, D)

    def model(x: Tensor) -> Tensor:
        y = torch.bmm(torch.bmm(x.expand(4, *x.shape), up).relu(), down)
        return funcol.all_reduce(y.view(-1, D), "sum", group).view(4, -1, D).sum(0)

    return model


PROGRAMS = {program.__name__: program for program in (parallel_block, cut_up, every_expert)}


def compiled(rank: int, world: int, name: str, m: int) -> tuple[float, str]:
    """The error against eager mode, and the report if not exactly one op is left of all collectives."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    model = PROGRAMS[name](fresh_group(), world)
    run, worst = torch.compile(model, backend="autofuse", options={"policy": "always"}), 0.0
    with autofuse.debug() as report, torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(m, D, device="cuda", dtype=torch.bfloat16)
            worst = max(worst, error_of(run(x), model(x).double()))
    after = str(report.graphs[0].after)
    is_one = "c10d" not in after and after.count("= autofuse.") == 1
    return worst, "" if is_one else f"{report}\n{after}"
