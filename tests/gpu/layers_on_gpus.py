"""What the tests of compiled layers of experts run on ranks with GPUs."""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn

import autofuse
from tests.gpu.experts_on_gpus import COMBINE, DISPATCH, workspace
from tests.passes.experts import CAPACITY, LOCAL, TOKENS, D, Dropless, FixedCapacity, H

TOLERANCE = 0.03
"""As on CPUs: results are rounded to bfloat16 at other places than eager's."""


def _prefer_kernels(world: int) -> None:
    """As if they had been measured to be fastest, of all products of a layer, forward and backward."""
    from autofuse.lowering.gpu.choice.choose import add_points
    from autofuse.lowering.gpu.choice.kernel import fused_ways
    from autofuse.lowering.gpu.choice.points import Point
    from autofuse.lowering.gpu.experts.ways import ExpertProblem

    for op, k, n in product((COMBINE, DISPATCH), (D, H, 2 * H), (D, H)):
        problem = ExpertProblem(op, LOCAL, world * CAPACITY, k, n, world, torch.bfloat16)
        add_points(workspace(), (Point.of(problem, {fused_ways(problem)[0]: 1.0}),))


def _step(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = call(x)
    y.float().square().sum().backward()
    found = {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    return {name: t.clone() for name, t in found.items() if t is not None}


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "fixed capacity": lambda: FixedCapacity("gated").bfloat16(),
    "dropless, sorted": lambda: Dropless(sorts=True),
    "dropless, counted": Dropless,
}


def trained(rank: int, world: int, kind: str) -> dict[str, str]:
    """What is wrong with a training step: sites that are kept, results that are not those of eager."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    if kind == "fixed capacity":
        _prefer_kernels(world)
    model = LAYERS[kind]().cuda()
    x = torch.randn(TOKENS, D, device="cuda").bfloat16()
    # Inductor pads the 12 rows of an expert where it finds that faster, and such sites are kept.
    compiled = torch.compile(model, backend="autofuse", options={"policy": "always", "shape_padding": False})
    with autofuse.debug() as report, torch._dynamo.config.patch(capture_scalar_outputs=True):
        wanted = _step(model, model, x)
        steps = [_step(model, compiled, x) for _ in range(3)]
    sites = [(site.graph.split()[0], site.pattern) for site in report.fused]
    every = [(kind, op) for kind in ("forward", "backward") for op in (DISPATCH, COMBINE)]
    found = {"sites": "" if sites == every else f"{report}\n{report.graphs[0].before}"}
    for name, value in wanted.items():
        scale = value.double().abs().max()
        errors = [float((step[name].double() - value.double()).abs().max() / scale) for step in steps]
        found[name] = "" if max(errors) < TOLERANCE else f"errors {errors}"
    return found
